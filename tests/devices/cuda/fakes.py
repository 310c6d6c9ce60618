"""Stand-ins for ``cuda.bindings.driver`` and ``pynvml``: a driver whose memory is counted and whose kernels do nothing.

``FakeDriver`` answers as the bindings do, with a tuple that starts with a code.  Launching a graph raises the flag that
its ``raise_flag`` kernel would have raised, so a lane's wait ends; answers are whatever the staging holds.
"""

from __future__ import annotations

import ctypes
import enum
import sys
import types
from collections import Counter

import numpy as np


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_MISALIGNED_ADDRESS = 716
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701


_GRAPH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_ONE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class FakeDriver(types.ModuleType):
    """fail : {function: (n, code)}: the n-th call of it, from 1, answers that code and does nothing."""

    CUresult = CUresult
    CU_MEMHOSTALLOC_PORTABLE = 1
    CU_MEMHOSTALLOC_DEVICEMAP = 2
    CUstream_flags = types.SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = types.SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUstreamCaptureMode = types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
    CUdevice_attribute = types.SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=16,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76,
    )

    def __init__(self, cards=(), *, version=13000, free_bytes=1 << 30, init=0, fail=None):
        super().__init__("cuda.bindings.driver")
        self.cards, self.version, self.free, self.init = list(cards), version, free_bytes, init
        self.fail = fail or {}
        self.count: Counter[str] = Counter()
        self.live: dict[str, dict] = {
            kind: {} for kind in ("memory", "pinned", "stream", "event", "graph", "module", "context")
        }
        self._next = 1000
        self._capturing: list | None = None
        self._graphs: dict[int, list] = {}
        self._entries = {
            b"cuCtxSetCurrent": _ONE(lambda context: 0),
            b"cuGraphLaunch": _GRAPH(self._launch_graph),
            b"cuStreamQuery": _ONE(self._query),
        }

    def _do(self, name: str) -> CUresult | None:
        self.count[name] += 1
        n, code = self.fail.get(name, (0, 0))
        return CUresult(code) if self.count[name] == n else None

    def _new(self, kind: str, value=True) -> int:
        self._next += 1
        self.live[kind][self._next] = value
        return self._next

    def _drop(self, kind: str, handle):
        del self.live[kind][int(handle)]  # a KeyError is a double free
        return (CUresult.CUDA_SUCCESS,)

    # ---- discovery
    def cuInit(self, flags):
        return (CUresult(self.init),)

    def cuDriverGetVersion(self):
        return CUresult.CUDA_SUCCESS, self.version

    def cuDeviceGetCount(self):
        return CUresult.CUDA_SUCCESS, len(self.cards)

    def cuDeviceGet(self, ordinal):
        return CUresult.CUDA_SUCCESS, ordinal

    def cuDeviceGetUuid(self, device):
        raw = bytes.fromhex(self.cards[device]["uuid"].removeprefix("GPU-").replace("-", ""))
        return CUresult.CUDA_SUCCESS, types.SimpleNamespace(bytes=raw)

    def cuDeviceGetAttribute(self, attribute, device):
        major, minor = map(int, self.cards[device]["compute"].split("."))
        return CUresult.CUDA_SUCCESS, {75: major, 76: minor, 16: 8}[attribute]

    def cuDeviceGetName(self, size, device):
        return CUresult.CUDA_SUCCESS, self.cards[device]["name"].encode().ljust(size, b"\0")

    def cuDeviceGetPCIBusId(self, size, device):
        return CUresult.CUDA_SUCCESS, self.cards[device]["pci"].upper().encode().ljust(size, b"\0")

    def cuDeviceTotalMem(self, device):
        return CUresult.CUDA_SUCCESS, self.cards[device]["total"]

    # ---- context
    def cuDevicePrimaryCtxRetain(self, device):
        return CUresult.CUDA_SUCCESS, self._new("context")

    def cuDevicePrimaryCtxRelease(self, device):
        self.live["context"].popitem()
        return (CUresult.CUDA_SUCCESS,)

    def cuCtxSetCurrent(self, context):
        return (CUresult.CUDA_SUCCESS,)

    def cuCtxSynchronize(self):
        return (CUresult.CUDA_SUCCESS,)

    def cuModuleLoadData(self, data):
        return CUresult.CUDA_SUCCESS, self._new("module")

    def cuModuleUnload(self, module):
        return self._drop("module", module)

    def cuModuleGetFunction(self, module, name):
        return CUresult.CUDA_SUCCESS, name.decode()

    def cuGetProcAddress(self, name, version, flags):
        return CUresult.CUDA_SUCCESS, ctypes.cast(self._entries[name], ctypes.c_void_p).value, 0

    # ---- memory
    def cuMemGetInfo(self):
        used = sum(a.nbytes for a in self.live["memory"].values())
        return CUresult.CUDA_SUCCESS, self.free - used, self.free

    def _array(self, kind: str, n_bytes: int):
        array = np.zeros(n_bytes + 256, np.uint8)
        at = array.ctypes.data + -array.ctypes.data % 256
        self.live[kind][at] = array
        return CUresult.CUDA_SUCCESS, at

    def cuMemAlloc(self, n_bytes):
        failed = self._do("cuMemAlloc")
        if failed is None and n_bytes > self.cuMemGetInfo()[1]:
            failed = CUresult.CUDA_ERROR_OUT_OF_MEMORY
        return (failed, 0) if failed else self._array("memory", n_bytes)

    def cuMemFree(self, at):
        return self._drop("memory", at)

    def cuMemHostAlloc(self, n_bytes, flags):
        failed = self._do("cuMemHostAlloc")
        return (failed, 0) if failed else self._array("pinned", n_bytes)

    def cuMemFreeHost(self, at):
        return self._drop("pinned", at)

    def cuMemsetD8(self, at, value, n):
        ctypes.memset(at, value, n)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemcpyHtoD(self, to, at, n):
        ctypes.memmove(to, at, n)
        return (CUresult.CUDA_SUCCESS,)

    cuMemcpyDtoD = cuMemcpyHtoD

    def cuMemcpyHtoDAsync(self, to, at, n, stream):
        failed = self._do("cuMemcpyHtoDAsync")
        if failed is None:
            ctypes.memmove(to, at, n)
        return (failed or CUresult.CUDA_SUCCESS,)

    # ---- streams, events, graphs
    def cuStreamCreate(self, flags):
        return CUresult.CUDA_SUCCESS, self._new("stream")

    def cuStreamDestroy(self, stream):
        return self._drop("stream", stream)

    def cuStreamSynchronize(self, stream):
        return (self._do("cuStreamSynchronize") or CUresult.CUDA_SUCCESS,)

    def cuEventCreate(self, flags):
        return CUresult.CUDA_SUCCESS, self._new("event")

    def cuEventDestroy(self, event):
        return self._drop("event", event)

    def cuEventRecord(self, event, stream):
        return (CUresult.CUDA_SUCCESS,)

    def cuEventSynchronize(self, event):
        return (CUresult.CUDA_SUCCESS,)

    def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, pointers, extra):
        failed = self._do("cuLaunchKernel")
        if failed is not None:
            return (failed,)
        if self._capturing is not None:
            self._capturing.append(self._bind(function, pointers))
        else:
            self._run(self._bind(function, pointers))
        return (CUresult.CUDA_SUCCESS,)

    @staticmethod
    def _bind(function, pointers):
        if function != "raise_flag":
            return function, 0, 0
        count, flag = (ctypes.c_uint64.from_address(p).value for p in (ctypes.c_uint64 * 2).from_address(pointers))
        return function, count, flag

    @staticmethod
    def _run(node):
        function, count, flag = node
        if function == "raise_flag":
            counter = ctypes.c_uint32.from_address(count)
            counter.value += 1
            ctypes.c_uint32.from_address(flag).value = counter.value

    def cuStreamBeginCapture(self, stream, mode):
        self._capturing = []
        return (CUresult.CUDA_SUCCESS,)

    def cuStreamEndCapture(self, stream):
        nodes, self._capturing = self._capturing, None
        return CUresult.CUDA_SUCCESS, nodes

    def cuGraphInstantiate(self, graph, flags):
        failed = self._do("cuGraphInstantiate")
        if failed:
            return failed, 0
        handle = self._new("graph")
        self._graphs[handle] = graph
        return CUresult.CUDA_SUCCESS, handle

    def cuGraphDestroy(self, graph):
        return (CUresult.CUDA_SUCCESS,)

    def cuGraphExecDestroy(self, graph):
        return self._drop("graph", graph)

    def _launch_graph(self, graph, stream):
        failed = self._do("cuGraphLaunch")
        if failed:
            return int(failed)
        for node in self._graphs[graph]:
            if self.count["trap"] == 0:
                self._run(node)
        return 0

    def _query(self, stream):
        return int(self._do("cuStreamQuery") or 0)

    def leaks(self) -> dict[str, int]:
        """What is still held, by kind."""
        return {kind: len(held) for kind, held in self.live.items() if held}


class FakeNvml(types.ModuleType):
    """NVML with cards in its own order."""

    class NVMLError(Exception):
        pass

    def __init__(self, cards=(), broken=False, release="580.65.06"):
        super().__init__("pynvml")
        self.cards, self.broken, self.release = list(cards), broken, release

    def nvmlInit(self):
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlShutdown(self):
        pass

    def nvmlSystemGetDriverVersion(self):
        return self.release

    def nvmlDeviceGetCount(self):
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.cards[index]

    def nvmlDeviceGetName(self, card):
        return card["name"].encode()

    def nvmlDeviceGetUUID(self, card):
        return card["uuid"]

    def nvmlDeviceGetPciInfo(self, card):
        return types.SimpleNamespace(busId=f"0000{card['pci'].upper()}".encode())

    def nvmlDeviceGetCudaComputeCapability(self, card):
        return [int(part) for part in card["compute"].split(".")]

    def nvmlDeviceGetMemoryInfo(self, card):
        return types.SimpleNamespace(free=card["free"], total=card["total"])


def install(monkeypatch, driver: types.ModuleType | None, nvml: types.ModuleType | None) -> None:
    """Make ``from cuda.bindings import driver`` and ``import pynvml`` find these; None is a missing package."""
    import cuda.bindings
    import cuda.bindings.nvrtc
    import cuda.core  # noqa: F401  (both take what they need of the real driver module at import)

    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    if driver is not None:
        monkeypatch.setattr(cuda.bindings, "driver", driver, raising=False)
    else:
        monkeypatch.delattr(cuda.bindings, "driver", raising=False)
