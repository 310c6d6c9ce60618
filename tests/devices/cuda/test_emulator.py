"""The emulator itself: what it computes is what a card would, and what kernels do wrong is said with their name."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import textwrap
import threading
import time
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from devices.cuda import emulator
from devices.cuda.emulator import build
from devices.cuda.fakes import CUresult
from devices.cuda.support import same_bits

from coli._core import kernels
from coli.devices.cuda.compile import source
from coli.devices.cuda.context import PARAMETERS

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing()))

TEXT = Path(__file__).parent / "data" / "emulated.cu"


class Bench:
    """The kernels of data/emulated.cu on an emulated card: arrays in, launches, arrays out."""

    def __init__(self, driver: emulator.EmulatedDriver, text: str) -> None:
        self.driver = driver
        self.module = driver.cuModuleLoadData(str(emulator.kernel_library(text)).encode())[1]
        self.stream = driver.cuStreamCreate(1)[1]

    def put(self, array: np.ndarray) -> int:
        at = self.driver.cuMemAlloc(array.nbytes)[1]
        ctypes.memmove(at, array.ctypes.data, array.nbytes)
        return at

    def get(self, at: int, *shape: int, dtype=np.uint32) -> np.ndarray:
        out = np.empty(shape, dtype)
        ctypes.memmove(out.ctypes.data, at, out.nbytes)
        return out

    def function(self, name: str) -> int:
        return self.driver.cuModuleGetFunction(self.module, name.encode())[1]

    def launch(self, name: str, grid: int | tuple[int, int], threads: int, shared: int, *arguments,
               early: bool = False) -> CUresult:  # fmt: skip
        """Addresses, or ctypes values."""
        values = [a if isinstance(a, ctypes._SimpleCData) else ctypes.c_uint64(a) for a in arguments]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        gx, gy = (grid, 1) if isinstance(grid, int) else grid
        return self.driver.cuLaunchKernel(self.function(name), gx, gy, 1, threads, 1, 1, shared, self.stream,
                                          ctypes.addressof(pointers), 0, early)[0]  # fmt: skip

    def run(self, *arguments) -> CUresult:
        """Launch and wait."""
        return self.launch(*arguments) or self.driver.cuStreamSynchronize(self.stream)[0]

    def graph(self, body) -> int:
        self.driver.cuStreamBeginCapture(self.stream, 1)
        body()
        graph = self.driver.cuStreamEndCapture(self.stream)[1]
        return self.driver.cuGraphInstantiate(graph, 0)[1]

    def play(self, graph: int) -> CUresult:
        launched = CUresult(self.driver._launch_graph(graph, self.stream))
        return launched or self.driver.cuStreamSynchronize(self.stream)[0]


@pytest.fixture(scope="module")
def text() -> str:
    return TEXT.read_text()


@pytest.fixture
def bench(text):
    """A card of its own a test: what fails loses it."""
    driver = emulator.EmulatedDriver()
    yield Bench(driver, text)
    driver.shut()


# ---- what it computes -------------------------------------------------------------------------------------------


def test_halves_convert_as_numpy_does(bench):
    """All 65,536 halves become the float that they are, and floats round to the nearest half, ties to even."""
    halves = np.arange(65536, dtype=np.uint16)
    rng = np.random.default_rng(0)
    floats = rng.integers(0, 1 << 32, 65536, np.uint64).astype(np.uint32).view(np.float32)
    floats[:30000] = rng.normal(0, 1e-4, 30000)  # around the subnormal halves
    floats[30000:40000] = halves[20000:30000].view(np.float16).astype(np.float32) * np.float32(1 + 2**-11)  # ties
    a, b, c, d = bench.put(halves), bench.put(floats), bench.put(np.empty(65536, np.float32)), bench.put(halves)
    assert bench.run("halves", 256, 256, 0, a, b, c, d) == 0
    found, wanted = bench.get(c, 65536, dtype=np.float32), halves.view(np.float16).astype(np.float32)
    numbers = ~np.isnan(wanted)
    assert same_bits(found[numbers], wanted[numbers]) and np.isnan(found[~numbers]).all()
    with np.errstate(over="ignore"):
        wanted = floats.astype(np.float16).view(np.uint16)
    numbers = ~np.isnan(floats)
    assert (bench.get(d, 65536, dtype=np.uint16)[numbers] == wanted[numbers]).all()


def test_lanes_exchange_as_on_a_card(bench):
    """Shuffles, votes and reductions, of whole warps and of parts of them, after some lanes have ended."""
    out = bench.put(np.zeros((12, 32), np.uint32))
    assert bench.run("lanes", 1, 32, 0, out) == 0
    lane = np.arange(32)
    value = lane * lane
    found = bench.get(out, 12, 32)
    wanted = [
        value[lane ^ 5], value[(lane + 3) % 32], value[np.where(lane + 4 < 32, lane + 4, lane)],
        value[np.where(lane >= 2, lane - 2, lane)], value[lane // 8 * 8 + 1], np.full(32, 31 * 31),
        np.full(32, value.sum()), np.full(32, 0x88888888), np.full(32, 1), np.where(lane < 16, 120, 376),
        [sum(1 << j for j in range(32) if j % 3 == i % 3) for i in range(32)],
        np.where(lane < 20, np.arange(20).sum(), 0),
    ]  # fmt: skip
    for row, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert (a == np.asarray(b, np.uint64).astype(np.uint32)).all(), row


@pytest.mark.parametrize("name", ["tensor", "tensor_staged"])
def test_mma_multiplies_tiles(bench, name):
    """16 x 32 times 32 x 8 of signed bytes, from registers, and through cp.async and ldmatrix."""
    rng = np.random.default_rng(1)
    a, b = rng.integers(-128, 128, (16, 32), np.int8), rng.integers(-128, 128, (8, 32), np.int8)
    c = rng.integers(-1000, 1000, (16, 8), np.int32)
    at = bench.put(c)
    assert bench.run(name, 1, 32, 0, bench.put(a), bench.put(b), at) == 0
    assert (bench.get(at, 16, 8, dtype=np.int32) == c + a.astype(np.int32) @ b.T.astype(np.int32)).all()


def test_copies_are_late_until_they_are_waited_for(bench):
    """What cp.async copies is not there before its group is waited for."""
    data, out = bench.put(np.arange(4, dtype=np.uint32)), bench.put(np.zeros(8, np.uint32))
    assert bench.run("late_copy", 1, 1, 0, data, out) == 0
    assert bench.get(out, 8).tolist() == [0xFFFFFFFF] * 4 + [0, 1, 2, 3]


def test_barrier_left_out_gives_other_bits(bench):
    """Threads of a block run upwards in one block and downwards in the next: a race shows up in one of them."""
    rows = np.arange(4 * 64, dtype=np.uint32).reshape(4, 64)
    for name, is_right in (("turn_around", True), ("turn_around_racing", False)):
        at = bench.put(rows)
        assert bench.run(name, 4, 64, 256, at) == 0
        assert (bench.get(at, 4, 64) == rows[:, ::-1]).all() == is_right


def test_votes_of_a_block_are_counted(bench):
    """__syncthreads_count, _and and _or, of threads that have not ended."""
    out = bench.put(np.zeros(3, np.uint32))
    assert bench.run("votes", 1, 96, 0, out) == 0
    assert bench.get(out, 3).tolist() == [32, 0, 1]


# ---- streams and graphs -----------------------------------------------------------------------------------------


def test_grid_that_starts_early_sees_nothing_of_the_one_before(bench):
    """In a graph a kernel that reads before it waits reads what was there before; one that waits first does not."""
    for name, is_right in (("add_after_wait", True), ("add_before_wait", False)):
        at = bench.put(np.zeros(64, np.uint32))

        def body(name=name, at=at) -> None:
            for _ in range(3):
                bench.launch(name, 2, 32, 0, at, early=True)

        assert bench.play(bench.graph(body)) == 0
        assert (bench.get(at, 64) == 3).all() == is_right


def test_kernel_waits_for_the_host(bench):
    """A kernel polls pinned memory while the host goes on; its stream is not idle until the host has answered."""
    word = bench.driver.cuMemHostAlloc(64, 0)[1]
    held = np.ctypeslib.as_array((ctypes.c_uint32 * 16).from_address(word))
    held[:] = 0
    assert bench.launch("ask_host", 3, 64, 0, word) == 0
    until = time.monotonic() + 10
    for n in range(1, 4):  # blocks run one after another, so they ask one after another
        while held[0] != n and time.monotonic() < until:
            time.sleep(0.001)
        assert (held[0], held[2]) == (n, 64 * (n - 1))
        assert bench.driver._query(bench.stream) == CUresult.CUDA_ERROR_NOT_READY
        held[1] = n
    assert bench.driver.cuStreamSynchronize(bench.stream)[0] == 0
    assert held[2] == 3 * 64


def test_graph_holds_copies_sets_and_what_other_streams_add(bench):
    """A capture takes kernels, copies and sets; a stream that waits for its event joins it."""
    driver, other = bench.driver, bench.driver.cuStreamCreate(1)[1]
    first, second = driver.cuEventCreate(0)[1], driver.cuEventCreate(0)[1]
    source_at, at = bench.put(np.full(64, 5, np.uint32)), bench.put(np.zeros(64, np.uint32))

    def body() -> None:
        driver.cuMemcpyDtoDAsync(at, source_at, 256, bench.stream)
        driver.cuEventRecord(first, bench.stream)
        driver.cuStreamWaitEvent(other, first, 0)
        driver.cuMemsetD32Async(at, 7, 16, other)
        driver.cuEventRecord(second, other)
        driver.cuStreamWaitEvent(bench.stream, second, 0)
        bench.launch("add_after_wait", 2, 32, 0, at)

    graph = bench.graph(body)
    assert (bench.get(at, 64) == 0).all()
    for _ in range(2):
        assert bench.play(graph) == 0
        assert bench.get(at, 64).tolist() == [8] * 16 + [6] * 48
    assert driver.cuStreamWaitEvent(other, second, 0)[0] == CUresult.CUDA_ERROR_INVALID_VALUE


def test_streams_work_beside_each_other(bench):
    """A stream that waits for the host holds nobody up, and an event is passed when its stream gets there."""
    driver, other = bench.driver, bench.driver.cuStreamCreate(1)[1]
    word = driver.cuMemHostAlloc(64, 0)[1]
    ctypes.memset(word, 0, 64)
    event, at = driver.cuEventCreate(0)[1], bench.put(np.zeros(4, np.uint32))
    bench.launch("ask_host", 1, 32, 0, word)
    driver.cuEventRecord(event, bench.stream)
    driver.cuStreamWaitEvent(other, event, 0)
    driver.cuMemsetD32Async(at, 9, 4, other)
    third = driver.cuStreamCreate(1)[1]
    driver.cuMemsetD32Async(at + 8, 1, 2, third)
    assert driver.cuStreamSynchronize(third)[0] == 0
    assert bench.get(at, 4).tolist() == [0, 0, 1, 1]
    answer = threading.Timer(0.05, ctypes.memset, (word + 4, 1, 1))
    answer.start()
    assert driver.cuEventSynchronize(event)[0] == 0
    assert driver.cuStreamSynchronize(other)[0] == 0
    assert bench.get(at, 4).tolist() == [9] * 4
    answer.join()


# ---- what kernels do wrong --------------------------------------------------------------------------------------

WRONG = {
    # name: (threads, bytes of dynamic shared memory, code, what is said)
    "half_at_a_barrier": (64, 0, "LAUNCH_FAILED", "deadlock: of 64 threads 0 have ended, 33 at .*, 31 for"),
    "two_barriers": (64, 0, "LAUNCH_FAILED", "at the barrier of .* threads wait at that of"),
    "two_intrinsics": (32, 0, "LAUNCH_FAILED", "lanes of one warp meet in different intrinsics"),
    "outside_its_mask": (32, 0, "LAUNCH_FAILED", "lane 1 calls an intrinsic with the mask 00000001"),
    "reads_behind_shared": (32, 64, "ILLEGAL_ADDRESS", "no access to address"),
    "writes_behind_shared": (1, 60, "ILLEGAL_ADDRESS", "wrote behind its shared memory"),
    "index_outside": (32, 0, "MISALIGNED_ADDRESS", r"an index outside its array, at .*:\d+"),
    "misaligned": (1, 0, "MISALIGNED_ADDRESS", "a misaligned address"),
    "null": (1, 0, "ILLEGAL_ADDRESS", r"no access to address \(nil\)"),
    "divides_by_zero": (1, 0, "LAUNCH_FAILED", "division of an integer by zero"),
    "traps": (32, 0, "LAUNCH_FAILED", "trap"),
    "endless_stack": (1, 0, "ILLEGAL_ADDRESS", "no access to address"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_fault_ends_the_card_and_names_the_kernel(bench, name):
    """The driver answers the code from then on, and the complaint says which kernel, block and thread did what."""
    threads, shared, code, said = WRONG[name]
    at = bench.put(np.zeros(256, np.uint32))
    found = bench.run(name, 1, threads, shared, at)
    assert found.name == f"CUDA_ERROR_{code}"
    assert re.match(rf"{name}, block \(0, 0, 0\), thread \(\d+, 0, 0\): .*{said}", bench.driver.complaint)
    assert bench.launch("votes", 1, 96, 0, at) == found


def test_launch_beyond_the_bounds_is_refused(bench):
    """Too many threads, too much shared memory and empty grids are refused when they are launched, not later."""
    at, code = bench.put(np.zeros(256, np.uint32)), CUresult
    assert bench.launch("bounded", 1, 65, 0, at) == code.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    assert bench.launch("votes", 0, 32, 0, at) == code.CUDA_ERROR_INVALID_VALUE
    assert bench.launch("turn_around", 1, 64, 50 << 10, at) == code.CUDA_ERROR_INVALID_VALUE
    bench.driver.cuFuncSetAttribute(bench.function("turn_around"), 8, 64 << 10)
    assert bench.run("turn_around", 1, 64, 50 << 10, at) == code.CUDA_SUCCESS


def test_write_behind_an_allocation_is_noticed_when_it_is_freed(bench):
    """The bytes between an allocation's end and its next 256 are watched, those behind cannot be reached."""
    at = bench.put(np.zeros(60, np.uint32))
    assert bench.run("add_after_wait", 2, 32, 0, at) == 0
    with pytest.raises(AssertionError, match="wrote behind the 240 bytes"):
        bench.driver.cuMemFree(at)


def test_fault_nobody_asked_about_fails_the_block(text):
    """`emulated()` does not end quietly over a kernel that failed."""
    with pytest.raises(AssertionError, match=r"traps, block \(0, 0, 0\)"), emulator.emulated() as driver:
        Bench(driver, text).run("traps", 1, 1, 0, 0)


# ---- building ---------------------------------------------------------------------------------------------------


def test_every_kernel_is_in_the_library_with_its_parameters():
    """The library has every kernel that PARAMETERS knows and no other, with as many parameters."""
    with emulator.emulated() as driver:
        module = driver.cuModuleLoadData(str(emulator.kernel_library(source())).encode())[1]
        found = {name.decode(): kernel.n_parameters for name, kernel in driver.live["module"][module].items()}
    known = {name: max((k for k in PARAMETERS if f"{name}_".startswith(f"{k}_")), key=len) for name in found}
    assert set(known.values()) == set(PARAMETERS)
    assert found == {name: len(PARAMETERS[kernel]) for name, kernel in known.items()}


def test_instruction_that_is_not_known_is_named():
    """PTX without a counterpart is refused with the function's name and the instruction, not at its first use."""
    text = '#line 1 "new.cu"\nstatic __device__ void shine(int *p)\n{\n    asm("shine.bright.u32 %0;" :: "r"(*p));\n}'
    with pytest.raises(emulator.UnknownInstruction, match=r"new.cu: function shine: .*shine.bright.u32 %0.*ptx.h"):
        emulator.kernel_library(text)


def test_text_that_does_not_compile_is_refused_with_its_line():
    """The compiler's complaint has the kernels' own line."""
    with pytest.raises(emulator.BuildError, match=r"new.cu:2:\d+: error: .*nonsense"):
        emulator.kernel_library('#line 1 "new.cu"\n\nextern "C" __global__ void k() { nonsense(); }')


def test_library_is_kept_by_its_text(monkeypatch, tmp_path):
    """The same text is compiled once; another text, or another architecture, is another library."""
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    text = 'extern "C" __global__ void k(int *p) { *p = __CUDA_ARCH__; }'
    compiled = []
    monkeypatch.setattr(build, "_compile", lambda s, library, more=(): (compiled.append(library), library.touch()))
    libraries = [emulator.kernel_library(*k) for k in [(text,), (text,), (text, "sm_80"), (text + " ",)]]
    assert libraries[0] == libraries[1] and len(set(libraries)) == len(compiled) == 3


# ---- what it is for ---------------------------------------------------------------------------------------------


def test_sum_in_another_order_is_noticed():
    """A kernel that adds in another order gives other bits than the CPU; the kernel as it is gives the same."""
    folder = resources.files("coli.devices.cuda") / "kernels"
    right = (folder / "contract.cu").read_text() + (folder / "dense.cu").read_text()
    tree = "for (int h = 16; h >= 1; h /= 2)\n        p = __fadd_rn"
    assert right.count(tree) == 1
    rng = np.random.default_rng(2)
    w, x = rng.normal(0, 1, (40, 300)).astype(np.float32), rng.normal(0, 1, (3, 300)).astype(np.float32)
    wanted = kernels.dense(w, x)
    wrong = right.replace(tree, tree.replace("16; h >= 1; h /= 2", "1; h <= 16; h *= 2"))
    for text, is_right in ((right, True), (wrong, False)):
        with emulator.emulated() as driver:
            bench = Bench(driver, text)
            y = bench.put(np.zeros((3, 40), np.float32))
            kinds = {"p": ctypes.c_uint64, "q": ctypes.c_int64, "i": ctypes.c_int32}
            values = bench.put(w), 0, 0, 0, 1200, 40, 300, bench.put(x), 300, y, 40
            passed = [kinds[kind](value) for kind, value in zip(PARAMETERS["dense"], values, strict=True)]
            assert bench.run("dense_f32", (5, 3), 256, 0, *passed) == 0
            found = bench.get(y, 3, 40, dtype=np.float32)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
        assert same_bits(found, wanted) == is_right


def test_emulator_leaves_nothing_behind(text):
    """Fifty cards in one process give their threads and their memory back."""
    script = f"""
        import os, sys
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        from pathlib import Path
        import numpy as np
        from devices.cuda import emulator
        from devices.cuda.test_emulator import Bench
        def kib():
            return int(Path("/proc/self/statm").read_text().split()[1]) * 4
        sizes = []
        for _ in range(50):
            driver = emulator.EmulatedDriver()
            bench = Bench(driver, Path({str(TEXT)!r}).read_text())
            at = bench.put(np.zeros((1 << 20) // 4, np.uint32))
            assert bench.run("votes", 1, 96, 0, at) == 0
            assert bench.run("traps", 1, 512, 0, at) != 0
            driver.cuMemFree(at)
            driver.shut()
            sizes.append(kib())
        assert len(os.listdir("/proc/self/task")) < 10, os.listdir("/proc/self/task")
        assert max(sizes[25:]) < min(sizes[10:25]) + 2000, sizes
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
