"""One card's context: its allocations, kernels and graphs.  Driver codes become DeviceErrors here and nowhere else.

Knows no matrix.  A sticky error (illegal address, failed launch, lost card) kills a context for the process; from then
on no call goes to the driver any more, and what was allocated is left to it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from coli._core.cudalaunch import SILENT, TIMED_OUT, Launcher
from coli.devices.base import DeviceError
from coli.devices.cuda.compile import compile_cubin

ANSWER_LIMIT_S = 20.0  # the longest product takes milliseconds; a display driver resets a card after 2 s

# Codes after which a context answers nothing but the same code again (CUDA driver API, "Error Handling").
_STICKY = frozenset((
    "CUDA_ERROR_DEINITIALIZED", "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE", "CUDA_ERROR_CONTAINED", "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_LAUNCH_TIMEOUT", "CUDA_ERROR_CONTEXT_IS_DESTROYED", "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_HARDWARE_STACK_ERROR", "CUDA_ERROR_ILLEGAL_INSTRUCTION", "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE", "CUDA_ERROR_INVALID_PC", "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_TENSOR_MEMORY_LEAK", "CUDA_ERROR_EXTERNAL_DEVICE", "CUDA_ERROR_SYSTEM_NOT_READY",
    "CUDA_ERROR_UNKNOWN", "CUDA_ERROR_INVALID_CONTEXT",
))  # fmt: skip


class Acts(NamedTuple):
    """``struct Acts`` of contract.cu: quantised activations of several tokens."""

    q: int = 0
    scale: int = 0
    sum: int = 0
    stride: int = 0
    n_groups: int = 0


class Slabs(NamedTuple):
    """``struct Slabs`` of route.cu: the parts of a slab, blocks of 16 rows in each, and what a block takes."""

    gate_offset: int
    up_offset: int
    down_offset: int
    gate_bytes: int
    down_bytes: int
    format: int
    dim: int
    gate_blocks: int
    down_blocks: int
    down_groups: int
    pad: int = 0


_STRUCTS = {"p": "Q", "q": "q", "i": "i", "f": "f", "A": "QQQii", "S": "qqqqqiiiiii"}
_ALIGN = {"p": 8, "q": 8, "i": 4, "f": 4, "A": 8, "S": 8}

# Parameters of the kernels, in order: p pointer, q int64, i int32, f float, A struct Acts,
# S struct Slabs.
PARAMETERS = {
    "gemv": "pqiAipq",
    "gemm": "pppiiqiiAipq",
    "gate_up_tiles": "pppqqqiiAiA",
    "group_experts": "piipiiipp",
    "dense": "ppiiqiipqpq",
    "gate_up": "pqqqiAip",
    "down": "pqqiiippq",
    "pull": "pqiiAppip",
    "pull_float": "pqpppi",
    "silu_mul": "ppq",
    "raise_flag": "pp",
    "read_all": "pqp",
    "project": "pqiApipiqiiipp",
    "deltanet_token": "pqpiiiiiifppppppfpqA",
    "conv_heads": "pqpiiiiiifpppppp",
    "deltanet": "pppqpiiiipq",
    "deltanet_rows": "pppqpiiiipq",
    "gated_norm": "pqpqpifiiA",
    "attention_prepare": "pqppppiiiifippppp",
    "attention_scores_one": "pppiiiifiipp",
    "attention_scores_rows": "ppipiiiifiiiipp",
    "attention_values": "ppppiiiiipp",
    "attention_finish": "pppqiipipA",
    "attention_rows": "pppipiiiiiiipqpA",
    "begin_rows": "pqppifpAippi",
    "residual_norm": "ppqpifppqA",
    "gather_norm": "pppifpA",
    "send_rows": "pqip",
    "router_logits": "pippipqipqi",
    "choose_experts": "ppiiipppppppppp",
    "moe_gate_up": "SppSppAi",
    "moe_down": "SpppSpppii",
    "await_answer": "ppi",
    "combine_norm": "pippppippppppfpAp",
}


class Packer:
    """Where the parameters of one kernel lie while it is launched: the driver takes its own copy."""

    def __init__(self, kinds: str) -> None:
        offsets, layout, at = [], "<", 0
        for kind in kinds:
            pad = -at % _ALIGN[kind]
            layout += f"{pad}x{_STRUCTS[kind]}"
            offsets.append(at + pad)
            at = struct.calcsize(layout)
        self._pack = struct.Struct(layout).pack_into
        self._buffer = ctypes.create_string_buffer(at)
        base = ctypes.addressof(self._buffer)
        self._pointers = (ctypes.c_void_p * len(offsets))(*(base + offset for offset in offsets))
        self._nested = any(kind in "AS" for kind in kinds)
        self.address = ctypes.addressof(self._pointers)

    def put(self, arguments: tuple) -> None:
        """Write the arguments.  Raises struct.error where there are too few or too many, or one is no such number."""
        if self._nested:
            flat: list = []
            for value in arguments:
                if isinstance(value, tuple):
                    flat += value
                else:
                    flat.append(value)
            arguments = flat
        self._pack(self._buffer, 0, *arguments)


class Pinned:
    """Page-locked host memory that kernels read and write through the same address.  array : uint8, all of it."""

    def __init__(self, address: int, n_bytes: int) -> None:
        self.address = address
        self.n_bytes = n_bytes
        self.array = np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(address))


class Context:
    """The primary context of one card, and all that was made in it.

    ordinal : CUDA's number of the card.   arch : such as "sm_90".   name : for messages.
    """

    def __init__(self, ordinal: int, arch: str, name: str) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self.name = name
        self.lost: str | None = None
        self.moves = 0  # counts what graphs or lists have addresses of beside their own: states that moved
        self._sticky = {getattr(driver.CUresult, code, None) for code in _STICKY} - {None}
        self._allocated: set[int] = set()
        self._pinned: set[int] = set()
        self._streams: list[Any] = []
        self._events: list[Any] = []
        self._functions: dict[str, Any] = {}
        self._module: Any = None
        self._packers: dict[str, Packer] = {}
        self._early = _early_config(driver) if int(arch.removeprefix("sm_")) >= 90 else None
        self._device = self.check(driver.cuDeviceGet(ordinal), "open")
        self.handle = self.check(driver.cuDevicePrimaryCtxRetain(self._device), "open")
        try:
            self.set_current()
            attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
            self.multiprocessors = self.check(driver.cuDeviceGetAttribute(attribute, self._device), "open")
            self._module = self.check(driver.cuModuleLoadData(compile_cubin(arch)), "load the kernels")
            addresses = [self._address(entry) for entry in (b"cuCtxSetCurrent", b"cuGraphLaunch", b"cuStreamQuery")]
            self.launcher = Launcher(int(self.handle), *addresses, ANSWER_LIMIT_S)
        except BaseException:
            self.close()
            raise

    # ---- errors ----------------------------------------------------------------------------------------

    def check(self, result: tuple, doing: str) -> Any:
        """What a driver call returned besides its code.  Raises DeviceError for any code but success."""
        if int(result[0]) != 0:
            raise self.error(int(result[0]), doing)
        return result[1] if len(result) == 2 else result[1:]

    def error(self, code: int, doing: str) -> DeviceError:
        """The DeviceError of a code of the driver or of the launcher; remembers a sticky one."""
        if code == TIMED_OUT:
            self.lost = f"no answer within {ANSWER_LIMIT_S:.0f} s"
            return DeviceError(f"{self.name}: {doing}: {self.lost}", "lost")
        if code == SILENT:
            return DeviceError(f"{self.name}: {doing}: the kernels ended without an answer", "launch")
        code = self._driver.CUresult(code)
        if code in self._sticky:
            self.lost = code.name
            return DeviceError(f"{self.name}: {doing}: {code.name}", "lost")
        kind = "out of memory" if code == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY else "launch"
        return DeviceError(f"{self.name}: {doing}: {code.name}", kind)

    def require_alive(self) -> None:
        """Raises DeviceError("lost") once the context is dead."""
        if self.lost is not None:
            raise DeviceError(f"{self.name} is lost: {self.lost}", "lost")

    def set_current(self) -> None:
        """Make this the calling thread's context.  Every entry from outside does so: several cards share a thread."""
        self.require_alive()
        self.check(self._driver.cuCtxSetCurrent(self.handle), "enter")

    def _address(self, name: bytes) -> int:
        found = self.check(self._driver.cuGetProcAddress(name, 13000, 0), f"find {name.decode()}")
        return int(found[0] if isinstance(found, tuple) else found)

    # ---- memory ----------------------------------------------------------------------------------------

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the card, as this context sees them now."""
        self.set_current()
        return tuple(int(n) for n in self.check(self._driver.cuMemGetInfo(), "ask for free memory"))

    def alloc(self, n_bytes: int, what: str) -> int:
        """Address of new device memory, 256-byte aligned."""
        self.set_current()
        address = int(self.check(self._driver.cuMemAlloc(n_bytes), f"allocate {n_bytes:,} bytes for {what}"))
        self._allocated.add(address)
        return address

    def put(self, array: np.ndarray, what: str) -> int:
        """Address of a copy of a small array."""
        at = self.alloc(max(array.nbytes, 1), what)
        try:
            self.check(self._driver.cuMemcpyHtoD(at, array.ctypes.data, array.nbytes), f"copy {what}")
        except DeviceError:
            self.free(at)
            raise
        return at

    def free(self, address: int) -> None:
        """Give device memory back.  Does nothing on a lost card."""
        if address in self._allocated and self.lost is None:
            self._allocated.discard(address)
            self.check(self._driver.cuMemFree(address), "free memory")

    def pin(self, n_bytes: int, what: str) -> Pinned:
        """New page-locked host memory."""
        self.set_current()
        flags = self._driver.CU_MEMHOSTALLOC_PORTABLE | self._driver.CU_MEMHOSTALLOC_DEVICEMAP
        address = int(self.check(self._driver.cuMemHostAlloc(n_bytes, flags), f"pin {n_bytes:,} bytes for {what}"))
        self._pinned.add(address)
        return Pinned(address, n_bytes)

    def unpin(self, pinned: Pinned) -> None:
        """Give page-locked memory back.  Its array must not be used afterwards."""
        if pinned.address in self._pinned and self.lost is None:
            self._pinned.discard(pinned.address)
            self.check(self._driver.cuMemFreeHost(pinned.address), "unpin memory")

    def copy_here(self, to: int, at: int, n_bytes: int) -> None:
        """Copy inside the card, at once: what a lane starts afterwards finds the copy made."""
        self.set_current()
        self.check(self._driver.cuMemcpyDtoD(to, at, n_bytes), "copy")
        self.check(self._driver.cuCtxSynchronize(), "copy")  # the driver does not wait for copies between device memory

    def zero(self, address: int, n_bytes: int) -> None:
        """Set device memory to zero, at once."""
        self.set_current()
        self.check(self._driver.cuMemsetD8(address, 0, n_bytes), "clear memory")
        self.check(self._driver.cuCtxSynchronize(), "clear memory")

    # ---- streams, events, copies -------------------------------------------------------------------------

    def stream(self) -> Any:
        """A new stream, independent of the default one."""
        self.set_current()
        flags = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = self.check(self._driver.cuStreamCreate(flags), "make a stream")
        self._streams.append(stream)
        return stream

    def free_stream(self, stream: Any) -> None:
        """Give a stream back."""
        if stream in self._streams and self.lost is None:
            self._streams.remove(stream)
            self.check(self._driver.cuStreamDestroy(stream), "free a stream")

    def synchronize(self, stream: Any) -> None:
        """Wait for all work of a stream."""
        self.check(self._driver.cuStreamSynchronize(stream), "wait")

    def event(self) -> Any:
        """A new event, freed by the caller with `free_event`."""
        flags = self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        event = self.check(self._driver.cuEventCreate(flags), "make an event")
        self._events.append(event)
        return event

    def free_event(self, event: Any) -> None:
        """Give an event back."""
        if event in self._events and self.lost is None:
            self._events.remove(event)
            self.check(self._driver.cuEventDestroy(event), "free an event")

    def record(self, event: Any, stream: Any) -> None:
        """Mark this place of a stream."""
        self.check(self._driver.cuEventRecord(event, stream), "copy")

    def hold(self, stream: Any, event: Any) -> None:
        """What comes to a stream from here on waits for an event's place, as recorded last; the host does not."""
        self.check(self._driver.cuStreamWaitEvent(stream, event, 0), "copy")

    def wait_event(self, event: Any) -> None:
        """Block until an event's place is passed."""
        self.check(self._driver.cuEventSynchronize(event), "copy")

    def copy_in(self, to: int, pinned_address: int, n_bytes: int, stream: Any) -> None:
        """Start a copy from page-locked to device memory."""
        self.check(self._driver.cuMemcpyHtoDAsync(to, pinned_address, n_bytes, stream), "copy")

    # ---- kernels and graphs ------------------------------------------------------------------------------

    def launch(self, kernel: str, variant: str, grid: tuple[int, ...], threads: int, shared_bytes: int, stream: Any,
               *arguments: Any, early: bool = False) -> None:  # fmt: skip
        """Launch ``kernel_variant`` (or ``kernel``); arguments as PARAMETERS[kernel] lists them.

        early : it may start while the launch before it still runs, and waits itself; no difference before sm_90.
        """
        name = f"{kernel}_{variant}" if variant else kernel
        function = self._functions.get(name)
        if function is None:
            function = self.check(self._driver.cuModuleGetFunction(self._module, name.encode()), f"find {name}")
            self._functions[name] = function
        packer = self._packers.get(kernel)
        if packer is None:
            packer = self._packers[kernel] = Packer(PARAMETERS[kernel])
        packer.put(arguments)
        if early and self._early is not None:
            config = self._early
            config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
            config.blockDimX, config.sharedMemBytes, config.hStream = threads, shared_bytes, stream
            result = self._driver.cuLaunchKernelEx(config, function, packer.address, 0)
        else:
            result = self._driver.cuLaunchKernel(
                function, *(*grid, 1, 1)[:3], threads, 1, 1, shared_bytes, stream, packer.address, 0
            )
        self.check(result, name)

    def capture(self, stream: Any, body: Callable[[], None]) -> Any:
        """The launches that ``body`` makes on ``stream``, as an executable graph."""
        driver = self._driver
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.check(driver.cuStreamBeginCapture(stream, mode), "capture")
        try:
            body()
        except BaseException:
            ended = driver.cuStreamEndCapture(stream)
            if int(ended[0]) == 0:
                driver.cuGraphDestroy(ended[1])
            raise
        graph = self.check(driver.cuStreamEndCapture(stream), "capture")
        try:
            return self.check(driver.cuGraphInstantiate(graph, 0), "make a graph")
        finally:
            driver.cuGraphDestroy(graph)

    def free_graph(self, graph: Any) -> None:
        """Give an executable graph back."""
        if self.lost is None:
            self.check(self._driver.cuGraphExecDestroy(graph), "free a graph")

    # ---- the end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give everything back.  A lost card is left alone: calls into it may hang."""
        if self.handle is None or self.lost is not None:
            return
        driver = self._driver
        driver.cuCtxSetCurrent(self.handle)
        driver.cuCtxSynchronize()
        for address in self._allocated:
            driver.cuMemFree(address)
        for address in self._pinned:
            driver.cuMemFreeHost(address)
        for event in self._events:
            driver.cuEventDestroy(event)
        for stream in self._streams:
            driver.cuStreamDestroy(stream)
        if self._module is not None:
            driver.cuModuleUnload(self._module)
        driver.cuCtxSetCurrent(0)
        driver.cuDevicePrimaryCtxRelease(self._device)
        self._allocated.clear()
        self._pinned.clear()
        self._events.clear()
        self._streams.clear()
        self.handle = None


def _early_config(driver: Any) -> Any:
    """A launch with the attribute for programmatic dependent launch."""
    attribute, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
    value.programmaticStreamSerializationAllowed = 1
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value = value
    config = driver.CUlaunchConfig()
    config.attrs, config.numAttrs = [attribute], 1
    config.blockDimY = config.blockDimZ = 1
    return config
