"""Times and checks the CUDA device: the tables of docs/benchmarks-gpu.md.

    python bench/gpu.py [kernels] [hops] [functions] [failures] [decode] [exchange] [whole]
    python bench/gpu.py --cards 2

kernels    each product in a graph over weights that do not fit the L2 cache, against the card's read bandwidth
hops       what a call costs through the Device interface, host memory to host memory
functions  exp, sigmoid, silu and softplus over all 2^32 bit patterns against the CPU
failures   memory that another process took, and a kernel that traps
decode     gpu_decode.py: off against auto with the memory of several cards
exchange   gpu_exchange.py: what experts that change places cost the decode
whole      gpu_whole.py: the whole model on the card, prompts and depth
--cards 2  gpu_cards.py: every split of a model over two cards

gpu_load.py times loading from files; it takes a folder, so it is run by itself.

Needs a card.  Products and expert groups are compared with the CPU's bits before they are timed; a line that differs
says WRONG.  Consecutive products overlap as they do in a graph of the device (programmatic dependent launch).
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests"), str(HERE)]

import gpu_cards  # noqa: E402
import gpu_decode  # noqa: E402
import gpu_exchange  # noqa: E402
import gpu_whole  # noqa: E402
from devices.cuda.support import (  # noqa: E402
    activations,
    ffn,
    matrix_bytes,
    matrix_spec,
    product,
    same_bits,
    slab_bytes,
    slab_spec,
)  # fmt: skip
from gpu_decode import MIB, row  # noqa: E402

from coli._core import kernels  # noqa: E402
from coli.container.layout import matrix_layout, slab_layout  # noqa: E402
from coli.devices.base import DeviceError, MatrixSpec  # noqa: E402
from coli.devices.cuda import plan, probe  # noqa: E402
from coli.devices.cuda.context import Context  # noqa: E402
from coli.devices.cuda.mixer import MixerSpec  # noqa: E402

ROTATE_BYTES = 400 * MIB  # several times the largest L2 cache
HIDDEN, EXPERT = 2048, 512  # Qwen3.6-35B-A3B
MATRICES = {
    "lm_head 248320x2048": ("i8_row", 248320, 2048),
    "dnproj 12288x2048": ("i8_row", 12288, 2048),
    "attnproj in 9216x2048": ("i8_row", 9216, 2048),
    "dnout, o 2048x4096": ("i8_row", 2048, 4096),
    "int4 12288x2048": ("i4_group", 12288, 2048),
    "int4 2048x4096": ("i4_group", 2048, 4096),
}


class Timer:
    """Times graphs of launches by events."""

    def __init__(self, context: Context, lane) -> None:
        from cuda.bindings import driver

        self._driver, self._context, self._lane = driver, context, lane
        flags = driver.CUevent_flags.CU_EVENT_DEFAULT
        self._events = [context.check(driver.cuEventCreate(flags), "event") for _ in range(2)]

    def us(self, body, launches: int, repeats: int = 15) -> float:
        """Median microseconds of one of the ``launches`` that ``body`` makes."""
        context, driver, stream = self._context, self._driver, self._lane.stream
        context.set_current()
        graph = context.capture(stream, body)
        times = []
        for _ in range(repeats + 2):
            context.check(driver.cuEventRecord(self._events[0], stream), "record")
            context.check(driver.cuGraphLaunch(graph, stream), "launch")
            context.check(driver.cuEventRecord(self._events[1], stream), "record")
            context.synchronize(stream)
            times.append(context.check(driver.cuEventElapsedTime(*self._events), "time") * 1000 / launches)
        context.free_graph(graph)
        return statistics.median(times[2:])


def on_card(lane, y_at: int) -> SimpleNamespace:
    """A lane whose answers stay on the card, so that the link is not in the time."""
    return SimpleNamespace(context=lane.context, stream=lane.stream, x=lane.x, list=lane.list,
                           scratch_at=lane.scratch_at, scratch_bytes=lane.scratch_bytes,
                           y=SimpleNamespace(address=y_at))  # fmt: skip


def bench_kernels(device) -> None:
    """Bandwidth of the products, against what an empty reading kernel reaches in this session."""
    from cuda.bindings import driver

    rng = np.random.default_rng(0)
    context = device._opened()
    y_at = context.alloc(2048 * 12288 * 4, "answers")
    print("\n### Kernels\n")
    row("kernel", "bytes", "us", "GB/s", "of read")
    row("---", "---:", "---:", "---:", "---:")
    device.open_arena(600 * MIB, 0, None)
    lane = device._lanes[0]
    lane.reserve(MIB, MIB)
    timer, arena = Timer(context, lane), device._arena

    def read() -> None:
        context.launch("read_all", "", (8 * context.multiprocessors, 1), 512, 0, lane.stream, arena.address,
                       512 * MIB // 16, y_at)  # fmt: skip

    read_gb_s = 512 * MIB / timer.us(read, 1) / 1e3
    row("read 512 MiB", 512 * MIB, f"{512 * MIB / read_gb_s / 1e3:.1f}", f"{read_gb_s:.0f}", "1.00")
    for what, (format, rows, cols) in MATRICES.items():
        layout = matrix_layout(format, rows, cols)
        data = matrix_bytes(rng, layout)
        copies = max(1, min(ROTATE_BYTES // layout.total_bytes, 200))
        device.open_arena(copies * layout.total_bytes, 0, None)
        lane, arena = device._lanes[0], device._arena
        lane.reserve(MIB, 4 * rows)
        timer = Timer(context, lane)
        spec = MatrixSpec(what, format, rows, cols, layout.block_bytes, layout.n_blocks, layout.n_groups, data)
        handle = device.upload(spec)
        x = activations(rng, 1, cols)
        same = same_bits(device.matmul(handle, x), product(data, layout, x))
        for i in range(1, copies):
            context.check(
                driver.cuMemcpyDtoD(arena.address + i * layout.total_bytes, arena.address, layout.used_bytes), "copy"
            )
        acts, _ = plan.acts_at(lane.scratch_at, 1, layout.n_groups)
        here = on_card(lane, y_at)

        def gemv(layout=layout, copies=copies, acts=acts, here=here, arena=arena) -> None:
            for i in range(copies):
                plan.product(here, arena.address + i * layout.total_bytes, layout, 1, acts, y_at)

        us = timer.us(gemv, copies)
        gb_s = layout.used_bytes / us / 1e3
        row(what + ("" if same else " WRONG"), layout.used_bytes, f"{us:.2f}", f"{gb_s:.0f}", f"{gb_s / read_gb_s:.2f}")
    for format, count in (("i4_group", 8), ("i8_row", 1)):
        slab, spec = slab_layout(format, HIDDEN, EXPERT), slab_spec(format, HIDDEN, EXPERT)
        groups = max(1, ROTATE_BYTES // (count * slab.total_bytes))
        device.open_arena(0, groups * count, spec)
        lane, arena = device._lanes[1], device._arena
        lane.reserve(MIB, MIB)
        data = [slab_bytes(rng, slab) for _ in range(count)]
        for i in range(groups * count):
            device.write_slot(i, data[i % count])
        x = activations(rng, 1, HIDDEN)
        y = device.take(device.issue(0, list(range(count)), [0] * count, x))
        same = same_bits(y, np.concatenate([ffn(d, slab, x) for d in data]))
        jobs = np.zeros(groups * count, plan.JOB)
        jobs["slab"] = [arena.slot(i) for i in range(groups * count)]
        jobs["out"] = np.arange(groups * count) % count
        jobs_at = lane.scratch_at + MIB
        staging = context.pin(jobs.nbytes, "jobs")
        staging.array[:] = jobs.view(np.uint8)
        context.copy_in(jobs_at, staging.address, jobs.nbytes, lane.stream)
        acts, _ = plan.acts_at(lane.scratch_at, 1, slab.gate.n_groups)
        here = on_card(lane, y_at)

        def group(slab=slab, groups=groups, count=count, acts=acts, here=here, jobs_at=jobs_at) -> None:
            for i in range(groups):
                plan._few_jobs(here, slab, jobs_at + 16 * i * count, count, 1, acts, here.scratch_at + 2 * MIB)

        us = Timer(context, lane).us(group, groups)
        n_bytes = count * slab.total_bytes
        what = f"{count} experts {format}" if count > 1 else f"shared expert {format}"
        row(
            what + ("" if same else " WRONG"),
            n_bytes,
            f"{us:.2f}",
            f"{n_bytes / us / 1e3:.0f}",
            f"{n_bytes / us / 1e3 / read_gb_s:.2f}",
        )
    print("\n### Prefill\n")
    row("12288x2048", "tokens", "us", "TOP/s")
    row("---", "---:", "---:", "---:")
    for format in ("i8_row", "i4_group"):
        layout = matrix_layout(format, 12288, 2048)
        device.open_arena(layout.total_bytes, 0, None)
        lane = device._lanes[0]
        lane.reserve(16 * MIB, MIB)
        data = matrix_bytes(rng, layout)
        handle = device.upload(
            MatrixSpec("x", format, 12288, 2048, layout.block_bytes, layout.n_blocks, layout.n_groups, data)
        )
        device._uploader.finish()
        for tokens in (32, 128, 512, 2048):
            acts, _ = plan.acts_at(lane.scratch_at, tokens, layout.n_groups)
            here = on_card(lane, y_at)
            timer = Timer(context, lane)
            us = timer.us(lambda: plan.product(here, handle.address, layout, tokens, acts, y_at), 1)  # noqa: B023
            row(format, tokens, f"{us:.1f}", f"{2 * 12288 * 2048 * tokens / us / 1e6:.0f}")


def bench_hops(device) -> None:
    """Calls as the engine makes them: activations and answers in host memory."""
    rng = np.random.default_rng(0)
    slab, spec = slab_layout("i4_group", HIDDEN, EXPERT), slab_spec("i4_group", HIDDEN, EXPERT)
    shared, shared_spec = slab_layout("i8_row", HIDDEN, EXPERT), slab_spec("i8_row", HIDDEN, EXPERT)
    device.open_arena(800 * MIB, 8, spec)
    for slot in range(8):
        device.write_slot(slot, slab_bytes(rng, slab))
    resident = device.upload_slab("shexp", shared_spec, slab_bytes(rng, shared))
    x, x4096 = activations(rng, 1, 2048), activations(rng, 1, 4096)
    print("\n### Calls through the Device interface\n")
    row("call, one token", "median us", "10th percentile")
    row("---", "---:", "---:")

    def timed(what: str, call, n: int = 300) -> None:
        times = []
        for _ in range(n):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        row(what, f"{statistics.median(times):.1f}", f"{sorted(times)[n // 10]:.1f}")

    row("empty graph, no copies", f"{device.latency_us:.1f}", "")
    for what, (format, rows, cols) in MATRICES.items():
        layout = matrix_layout(format, rows, cols)
        data = matrix_bytes(rng, layout)
        handle = device.upload(
            MatrixSpec(what, format, rows, cols, layout.block_bytes, layout.n_blocks, layout.n_groups, data)
        )
        out, v = np.empty((1, rows), np.float32), x if cols == 2048 else x4096
        timed("matmul " + what, lambda: device.matmul(handle, v, out))  # noqa: B023
    timed("ffn, shared expert int8", lambda: device.ffn(resident, x))
    eight = list(range(8))
    timed("issue + take, 8 experts int4", lambda: device.take(device.issue(0, eight, [0] * 8, x)))
    timed("issue alone (take not timed)", lambda: device.issue(0, eight, [0] * 8, x))
    data = slab_bytes(rng, slab)
    timed("write_slot, one int4 expert", lambda: device.write_slot(0, data), 100)
    for mixer, what in layers(device, rng):
        state, position = device.new_state(mixer), 1000
        turn = np.ones((1000, 32), np.float32)
        device.mix(mixer, state, 0, activations(rng, 1000, HIDDEN), turn, turn)
        one = (mixer, state, position, x, turn[:1], turn[:1])
        timed(f"mix, {what} at position 1,000", lambda: device.mix(*one))  # noqa: B023
        many = activations(rng, 512, HIDDEN)
        device.mix(mixer, state, position, many, turn[:512], turn[:512])  # the staging grows
        start = time.perf_counter()
        device.mix(mixer, state, position, many, turn[:512], turn[:512])
        row(f"mix, {what}, 512 positions from 1,000", f"{(time.perf_counter() - start) * 1e6:.0f}", "")
        state.close()


def layers(device, rng: np.random.Generator):
    """A DeltaNet and an attention layer of the 35B geometry with random weights: (mixer, what it is)."""
    g = {
        "dn_k_heads": 16, "dn_v_heads": 32, "dn_k_dim": 128, "dn_v_dim": 128, "conv_taps": 4, "n_q_heads": 16,
        "n_kv_heads": 2, "head_dim": 256, "rotary_half": 32, "kv_f16": True, "q_scale": 128**-0.5, "attn_scale": 1 / 16,
        "eps": 1e-6,
    }  # fmt: skip
    vectors = {
        "conv": rng.normal(0, 0.5, (4, 8192)), "exp_a_log": rng.uniform(0.1, 2, 32), "dt_bias": rng.normal(0, 1, 32),
        "dn_norm": np.ones(128), "q_norm": np.ones(256), "k_norm": np.ones(256),
    }  # fmt: skip
    out = device.upload(matrix_spec(rng, "i8_row", HIDDEN, 4096))
    for is_attention, rows, what in ((False, 12288, "DeltaNet"), (True, 9216, "attention")):
        ba = None if is_attention else matrix_spec(rng, "bf16", 64, HIDDEN)
        into = device.upload(matrix_spec(rng, "i8_row", rows, HIDDEN))
        yield device.mixer(MixerSpec(is_attention, g, vectors, ba), into, out), what


FUNCTIONS = ("exp", "sigmoid", "silu", "softplus")
SPAN = 1 << 24

CHECK = """
#define CHECK(NAME) extern "C" __global__ void check_##NAME(u32 first, const u32 *expected, u64 *wrong) \\
{ \\
    u32 i = blockIdx.x * 256 + threadIdx.x, bits = first + i; \\
    if ((bits & 0x7fffffffu) <= BITS_INF && __float_as_uint(NAME##_(__uint_as_float(bits))) != expected[i]) \\
        atomicAdd((unsigned long long *)wrong, 1ull); \\
}
CHECK(exp) CHECK(sigmoid) CHECK(silu) CHECK(softplus)
"""


def _fill(job: tuple[str, int, int]) -> None:
    name, span, at = job
    bits = np.arange(span * SPAN, (span + 1) * SPAN, dtype=np.uint64).astype(np.uint32)
    _shared[at * SPAN : (at + 1) * SPAN] = getattr(kernels, name)(bits.view(np.float32)).view(np.uint32)


def bench_functions(workers: multiprocessing.pool.Pool, device) -> None:
    """The four transcendentals over every float32 that is not a NaN."""
    from cuda.bindings import driver

    from coli.devices.cuda.compile import compile_cubin, source

    context = device._opened()
    context.set_current()
    text = source() + CHECK
    module = context.check(driver.cuModuleLoadData(compile_cubin(device.card.arch, text)), "load")
    at, wrong_at = context.alloc(4 * SPAN, "expected"), context.alloc(256, "count")
    stream = context.stream()
    address = _shared.ctypes.data
    context.check(driver.cuMemHostRegister(address, _shared.nbytes, 0), "pin")
    print("\n### Transcendentals, all 2^32 bit patterns\n")
    row("function", "different", "s")
    row("---", "---:", "---:")
    spans, batch = 256, len(_shared) // SPAN
    for name in FUNCTIONS:
        start = time.perf_counter()
        function = context.check(driver.cuModuleGetFunction(module, f"check_{name}".encode()), "find")
        context.zero(wrong_at, 8)
        for first in range(0, spans, batch):
            workers.map(_fill, [(name, first + i, i) for i in range(batch)], chunksize=1)
            for i in range(batch):
                context.copy_in(at, address + i * SPAN * 4, SPAN * 4, stream)
                values = [ctypes.c_uint32((first + i) * SPAN), ctypes.c_uint64(at), ctypes.c_uint64(wrong_at)]
                pointers = (ctypes.c_void_p * 3)(*map(ctypes.addressof, values))
                context.check(
                    driver.cuLaunchKernel(
                        function, SPAN // 256, 1, 1, 256, 1, 1, 0, stream, ctypes.addressof(pointers), 0
                    ),
                    name,
                )
            context.synchronize(stream)
        count = ctypes.c_uint64()
        context.check(driver.cuMemcpyDtoH(ctypes.addressof(count), wrong_at, 8), "read")
        row(name, count.value, f"{time.perf_counter() - start:.1f}")


TRAP = 'extern "C" __global__ void trap() { asm("trap;"); }'

HOG = """
import sys
from cuda.bindings import driver as d
d.cuInit(0); dev = d.cuDeviceGet(0)[1]; ctx = d.cuDevicePrimaryCtxRetain(dev)[1]; d.cuCtxSetCurrent(ctx)
free = d.cuMemGetInfo()[1]
print(int(d.cuMemAlloc(free - int(sys.argv[1]))[0]), flush=True)
sys.stdin.read()
"""


def bench_failures(device) -> None:
    """What a card that is full, and one that traps, look like from outside."""
    from cuda.bindings import driver

    from coli.devices.cuda.compile import compile_cubin

    rng = np.random.default_rng(0)
    layout = matrix_layout("i8_row", 1024, 2048)
    data = matrix_bytes(rng, layout)
    spec = MatrixSpec("m", "i8_row", 1024, 2048, layout.block_bytes, layout.n_blocks, layout.n_groups, data)
    x = activations(rng, 1, 2048)
    print("\n### Failures\n")
    device.close()
    before = device.free_bytes()
    hog = subprocess.Popen(
        [sys.executable, "-c", HOG, str(900 * MIB)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    hog.stdout.readline()
    print(f"- another process took the card: free {before / MIB:,.0f} -> {device.free_bytes() / MIB:,.0f} MiB")
    try:
        device.open_arena(800 * MIB, 0, None)
        print("- WRONG: an arena of 800 MiB was opened")
    except DeviceError as error:
        print(f"- 800 MiB: kind {error.kind!r}: {error}")
    device.open_arena(16 * MIB, 0, None)
    handle = device.upload(spec)
    print(
        f"- 16 MiB afterwards: {'equal' if same_bits(device.matmul(handle, x), product(data, layout, x)) else 'WRONG'}"
    )
    hog.stdin.close()
    hog.wait()
    device.close()
    device.open_arena(16 * MIB, 0, None)
    handle = device.upload(spec)
    device.matmul(handle, x)
    context = device._context
    module = context.check(driver.cuModuleLoadData(compile_cubin(device.card.arch, TRAP)), "load")
    trap = context.check(driver.cuModuleGetFunction(module, b"trap"), "find")
    driver.cuLaunchKernel(trap, 1, 1, 1, 1, 1, 1, 0, device._lanes[0].stream, 0, 0)
    start = time.perf_counter()
    for attempt in range(2):
        try:
            device.matmul(handle, x)
            print("- WRONG: a trapped card answered")
        except DeviceError as error:
            print(
                f"- trap, call {attempt + 1}: kind {error.kind!r} after "
                f"{(time.perf_counter() - start) * 1e3:.1f} ms: {error}"
            )
    device.close()
    print("- closed after the loss")


def main() -> int:
    global _shared
    parts = ("kernels", "hops", "functions", "failures", "decode", "exchange", "whole")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(parts) + "; all by default")
    parser.add_argument("--cards", type=int, default=1, help="2 and more: what several cards do together, only that")
    args = parser.parse_args()
    wanted = args.parts or parts
    unknown = [part for part in wanted if part not in parts]
    if unknown:
        parser.error(f"no part {unknown[0]}; known are {', '.join(parts)}")
    if args.cards > 1:
        return gpu_cards.main(["--cards", str(args.cards)])
    workers = None
    if "functions" in wanted:  # the pool forks before the driver starts: a context does not survive a fork
        _shared = np.frombuffer(mmap.mmap(-1, 32 * SPAN * 4), np.uint32)
        workers = multiprocessing.get_context("fork").Pool(min(32, len(os.sched_getaffinity(0))))
    devices = probe.list_devices()
    if not devices:
        print(f"no card: {probe.probe_cuda()}", file=sys.stderr)
        return 2
    device = devices[0]
    print(f"{device.name}, {device.card.arch}, {len(os.sched_getaffinity(0))} CPUs, {time.strftime('%Y-%m-%d')}")
    benches = {"kernels": bench_kernels, "hops": bench_hops, "failures": bench_failures}
    scripts = {"decode": gpu_decode, "exchange": gpu_exchange, "whole": gpu_whole}
    for part in parts:
        if part not in wanted:
            continue
        if part in benches:
            benches[part](device)
        elif part == "functions":
            bench_functions(workers, device)
        else:
            device.close()  # they open cards of their own
            scripts[part].main([])
    device.close()
    if workers is not None:
        workers.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
