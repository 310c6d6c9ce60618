"""A driver whose card is the CPU: FakeDriver's memory and counts, and kernels that run (fibers.h).

Device memory is host memory with a page behind it that nobody may touch; new memory is poisoned.  Streams run on
threads of their own, so a graph is under way while its caller goes on, and a kernel may wait for the host.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from devices.cuda.emulator import build
from devices.cuda.fakes import CUresult, FakeDriver, FakeNvml, install

CARD = {
    "name": "Emulated card", "uuid": "GPU-e0000000-0000-0000-0000-00000000000e", "pci": "0000:0e:00.0",
    "total": 4 << 30, "free": 4 << 30, "compute": "9.0",
}  # fmt: skip
_POISON = 0xFF
_ASKED_FOR_SHARED_BYTES = 227 << 10  # with cuFuncSetAttribute
_SHARED_BYTES = 48 << 10  # without


class _Kernel(ctypes.Structure):
    """``struct Kernel`` of abi.h."""

    _fields_ = [
        ("name", ctypes.c_char_p), ("call", ctypes.c_void_p), ("run", ctypes.c_void_p),
        ("n_parameters", ctypes.c_int), ("max_threads", ctypes.c_int), ("sizes", ctypes.POINTER(ctypes.c_int)),
    ]  # fmt: skip


class _Config:
    """CUlaunchConfig: any attributes."""

    attrs: Any = ()
    numAttrs = 0


class Memory:
    """n bytes, aligned to 256, poisoned, between two pages without access."""

    def __init__(self, n_bytes: int) -> None:
        self.nbytes = n_bytes
        self._size = -(-max(n_bytes, 1) // 256) * 256
        pages = -(-self._size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, pages + 2 * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE)  # the poison touches all of it
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for at in (base, base + mmap.PAGESIZE + pages):
            ctypes.CDLL(None).mprotect(ctypes.c_void_p(at), ctypes.c_size_t(mmap.PAGESIZE), 0)  # no access
        self.address = base + mmap.PAGESIZE + pages - self._size
        ctypes.memset(self.address, _POISON, self._size)

    def overflowed(self) -> bool:
        """Whether somebody wrote between the end and the next page."""
        rest = self._size - self.nbytes
        return ctypes.string_at(self.address + self.nbytes, rest) != bytes([_POISON]) * rest


class EmulatedDriver(FakeDriver):
    """FakeDriver with kernels that run."""

    CUfunction_attribute = type("CUfunction_attribute", (), {"CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": 8})
    CUlaunchAttributeID = type("CUlaunchAttributeID", (), {"CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION": 6})
    CUlaunchAttribute = CUlaunchAttributeValue = type("CUlaunchAttribute", (), {})
    CUlaunchConfig = _Config

    def __init__(self, cards=(CARD,), **options):
        super().__init__(cards, **{"free_bytes": 4 << 30, **options})
        self._streams = build.load(build.streams_library())
        for name in ("card", "stream", "event", "end_capture"):
            getattr(self._streams, f"emulator_{name}").restype = ctypes.c_void_p
        self._streams.emulator_message.restype = ctypes.c_char_p
        self._card = ctypes.c_void_p(self._streams.emulator_card())
        self._functions: dict[int, _Kernel] = {}
        self._most_shared: dict[int, int] = {}
        self.was_asked = False  # for its complaint

    @property
    def complaint(self) -> str:
        """What the first kernel that failed did; "" while none has."""
        self.was_asked = True
        return build.lines(self._streams.emulator_message(self._card).decode())

    def _code(self, name: str, *arguments: Any) -> tuple[CUresult]:
        """A call of streams.cpp, or the failure that was asked for."""
        failed = self._do(name)
        return (failed,) if failed else (self._call(*arguments),)

    def _call(self, name: str, *arguments: Any) -> CUresult:
        """Handles come as (kind, handle), addresses as int."""
        passed = []
        for a in arguments:
            if isinstance(a, tuple):
                kind, a = a[0], int(a[1])
                if a not in self.live[kind]:
                    return CUresult.CUDA_ERROR_INVALID_HANDLE
            passed.append(ctypes.c_void_p(a) if isinstance(a, int) else a)
        return CUresult(getattr(self._streams, f"emulator_{name}")(*passed))

    def _lost(self) -> CUresult | None:
        code = self._streams.emulator_code(self._card)
        return CUresult(code) if code else None

    # ---- modules
    def cuModuleLoadData(self, data):
        n = ctypes.c_int()
        library = build.load(Path(bytes(data).decode()))
        library.emulator_kernels.restype = ctypes.POINTER(_Kernel)
        table = library.emulator_kernels(ctypes.byref(n))
        return CUresult.CUDA_SUCCESS, self._new("module", {table[i].name: table[i] for i in range(n.value)})

    def cuModuleGetFunction(self, module, name):
        kernel = self.live["module"][module].get(name)
        if kernel is None:
            return CUresult.CUDA_ERROR_NOT_FOUND, 0
        address = ctypes.addressof(kernel)
        self._functions[address] = kernel
        return CUresult.CUDA_SUCCESS, address

    def cuFuncSetAttribute(self, function, attribute, value):
        if value > _ASKED_FOR_SHARED_BYTES:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        self._most_shared[function] = value
        return (CUresult.CUDA_SUCCESS,)

    # ---- memory
    def _array(self, kind, n_bytes):
        memory = Memory(n_bytes)
        self.live[kind][memory.address] = memory
        return CUresult.CUDA_SUCCESS, memory.address

    def _drop(self, kind, handle):
        held = self.live[kind][int(handle)]
        if isinstance(held, Memory):
            assert not held.overflowed(), f"somebody wrote behind the {held.nbytes:,} bytes of an allocation"
        return super()._drop(kind, handle)

    def cuMemcpyDtoH(self, to, at, n):
        return self.cuMemcpyHtoD(to, at, n)

    def _copy(self, name, to, at, n, stream):
        return self._code(name, "copy", ("stream", stream), int(to), int(at), ctypes.c_size_t(n))

    cuMemcpyHtoDAsync = partialmethod(_copy, "cuMemcpyHtoDAsync")
    cuMemcpyDtoHAsync = partialmethod(_copy, "cuMemcpyDtoHAsync")
    cuMemcpyDtoDAsync = partialmethod(_copy, "cuMemcpyDtoDAsync")
    cuMemcpyAsync = partialmethod(_copy, "cuMemcpyAsync")

    def _set(self, name, width, at, value, n, stream):
        return self._code(name, "set", ("stream", stream), int(at), ctypes.c_uint(value), ctypes.c_size_t(n),
                          ctypes.c_int(width))  # fmt: skip

    cuMemsetD8Async = partialmethod(_set, "cuMemsetD8Async", 1)
    cuMemsetD32Async = partialmethod(_set, "cuMemsetD32Async", 4)

    # ---- streams and events
    def cuCtxSynchronize(self):
        codes = [self._call("synchronize", ("stream", stream)) for stream in list(self.live["stream"])]
        return (next((code for code in codes if code), CUresult.CUDA_SUCCESS),)

    def cuStreamCreate(self, flags):
        stream = self._streams.emulator_stream(self._card)
        self.live["stream"][stream] = True
        return CUresult.CUDA_SUCCESS, stream

    def cuStreamCreateWithPriority(self, flags, priority):
        return self.cuStreamCreate(flags)

    def cuStreamDestroy(self, stream):
        self._drop("stream", stream)
        self._streams.emulator_stream_close(ctypes.c_void_p(int(stream)))
        return (CUresult.CUDA_SUCCESS,)

    def cuStreamSynchronize(self, stream):
        return self._code("cuStreamSynchronize", "synchronize", ("stream", stream))

    def cuStreamWaitEvent(self, stream, event, flags):
        return self._code("cuStreamWaitEvent", "wait", ("stream", stream), ("event", event))

    def cuEventCreate(self, flags):
        event = self._streams.emulator_event()
        self.live["event"][event] = True
        return CUresult.CUDA_SUCCESS, event

    def cuEventDestroy(self, event):
        self._drop("event", event)
        self._streams.emulator_event_close(ctypes.c_void_p(int(event)))
        return (CUresult.CUDA_SUCCESS,)

    def cuEventRecord(self, event, stream):
        return self._code("cuEventRecord", "record", ("event", event), ("stream", stream))

    def cuEventSynchronize(self, event):
        return self._code("cuEventSynchronize", "event_synchronize", ("event", event), self._card)

    # ---- launches and graphs
    def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, pointers, extra, early=False):
        failed = self._do("cuLaunchKernel") or self._lost()
        kernel, threads = self._functions[int(function)], bx * by * bz
        if failed is None and threads > kernel.max_threads:
            failed = CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
        if failed is None and not (
            0 < gx < 1 << 31 and 0 < gy < 1 << 16 and 0 < gz < 1 << 16 and threads > 0
            and shared <= self._most_shared.get(int(function), _SHARED_BYTES)
        ):  # fmt: skip
            failed = CUresult.CUDA_ERROR_INVALID_VALUE
        if failed is not None:
            return (failed,)
        dimensions = (ctypes.c_uint * 6)(gx, gy, gz, bx, by, bz)
        return (self._call("launch", ("stream", stream), ctypes.byref(kernel), dimensions, ctypes.c_uint(shared),
                           ctypes.c_void_p(int(pointers)), ctypes.c_int(early)),)  # fmt: skip

    def cuLaunchKernelEx(self, config, function, pointers, extra):
        early = any(getattr(a.value, "programmaticStreamSerializationAllowed", 0) for a in config.attrs)
        return self.cuLaunchKernel(
            function, config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX, config.blockDimY,
            config.blockDimZ, config.sharedMemBytes, config.hStream, pointers, extra, early,
        )  # fmt: skip

    def cuStreamBeginCapture(self, stream, mode):
        return self._code("cuStreamBeginCapture", "begin_capture", ("stream", stream))

    def cuStreamEndCapture(self, stream):
        streams = list(self.live["stream"])
        every = (ctypes.c_void_p * len(streams))(*streams)
        graph = self._streams.emulator_end_capture(ctypes.c_void_p(int(stream)), every, len(streams))
        return CUresult.CUDA_SUCCESS, graph

    def cuGraphInstantiate(self, graph, flags):
        failed = self._do("cuGraphInstantiate")
        if failed:
            return failed, 0
        self.live["graph"][graph] = True
        return CUresult.CUDA_SUCCESS, graph

    def cuGraphDestroy(self, graph):
        if graph not in self.live["graph"]:  # an executable graph lives on in the same place
            self._streams.emulator_graph_close(ctypes.c_void_p(graph))
        return (CUresult.CUDA_SUCCESS,)

    def cuGraphExecDestroy(self, graph):
        self._drop("graph", graph)
        self._streams.emulator_graph_close(ctypes.c_void_p(int(graph)))
        return (CUresult.CUDA_SUCCESS,)

    def _launch_graph(self, graph, stream):
        failed = self._do("cuGraphLaunch")
        return int(failed) if failed else int(self._call("graph_launch", ("graph", graph), ("stream", stream)))

    def _query(self, stream):
        return int(self._do("cuStreamQuery") or self._call("query", ("stream", stream)))

    def shut(self) -> None:
        """Wait for all work and give the threads back.  What a test left open is closed."""
        for stream in list(self.live["stream"]):
            self.cuStreamDestroy(stream)
        self._streams.emulator_card_close(self._card)


@contextmanager
def emulated(cards=(CARD,), source: str | None = None, **options: Any) -> Iterator[EmulatedDriver]:
    """An emulated card for everybody who asks for the driver, until the end of the block.

    source : other kernels than coli's.   options : of FakeDriver.
    AssertionError at the end where a kernel did something wrong and nobody has looked at ``complaint``.
    """
    from coli.devices.cuda import compile as compiling
    from coli.devices.cuda import context, ruler
    from coli.placement import SpanSpeed, Speed, Speeds
    from coli.probing import cards as probing

    fast = Speeds(Speed(4000), Speed(4000), SpanSpeed(0, 0, 0, 0, 4000))
    driver = EmulatedDriver(cards, **options)
    patch = pytest.MonkeyPatch()

    def compile_cubin(arch: str, text: str | None = None) -> bytes:
        return str(build.kernel_library(text or source or compiling.source(), arch)).encode()

    try:
        install(patch, driver, FakeNvml(list(cards)))
        patch.setattr(compiling, "compile_cubin", compile_cubin)
        patch.setattr(context, "compile_cubin", compile_cubin)
        # its own figures would take long and mean nothing; with these "auto" gives it all that fits
        patch.setattr(ruler, "_BYTES", 1 << 20)
        patch.setattr(probing, "measure_card", lambda device, beside, cpu: (fast, 1.0, 0.0))
        yield driver
        assert driver.was_asked or driver.complaint == "", driver.complaint
    finally:
        patch.undo()
        driver.shut()
