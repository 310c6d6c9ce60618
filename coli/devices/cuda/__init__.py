"""NVIDIA cards through cuda-python.

    probe.py     which cards there are and how nvidia-smi numbers them, or the reason why there are none
    device.py    CudaDevice: the Device interface
    lane.py      one stream with its staging, scratch and flag; dense and expert work have one each
    plan.py      which kernels make a product or an expert group, with their grids
    mixer.py     a whole DeltaNet or attention layer with its state
    span.py      a run of whole layers: handles, seats, graphs; spanplan.py: its kernels; spanrun.py: a batch in it
    workspace.py what the spans of a card share; mailbox.py: the pinned memory where card and host meet
    stream.py    experts in passing; segments.py: slots that come and go
    ruler.py     what a card reads in a second, and a round trip
    upload.py    container bytes into the arena through pinned buffers
    arena.py     what lies where in the one allocation
    context.py   a card's context, its allocations, kernels and graphs; driver codes become DeviceErrors
    compile.py   kernels/*.cu -> a cubin for the card's own architecture
    kernels/     the arithmetic; contract.cu is docs/numerics.md as device code

Nothing of CUDA is imported before a card is asked for.
"""
