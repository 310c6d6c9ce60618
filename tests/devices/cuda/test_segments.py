"""coli/devices/cuda/segments.py: memory for slots that comes and goes at one address."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli.devices.base import DeviceError
from coli.devices.cuda import probe
from coli.devices.cuda.segments import SEGMENT_BYTES, SlotMemory

MIB = 1 << 20
CARD = isinstance(probe.probe_cuda(), list)
bindings = pytest.importorskip("cuda.bindings.driver", reason="the bindings are an extra")


class FakeDriver:
    """The driver's calls on a card of ``total`` bytes: what is mapped where, and that it is used as the manual says."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.created: dict[int, int] = {}  # handle -> bytes, not released yet
        self.mapped: dict[int, int] = {}  # address -> bytes
        self.writable: set[int] = set()
        self.reserved: dict[int, int] = {}

    def __getattr__(self, name):  # structures and enumerations are the real ones
        return getattr(bindings, name)

    def cuMemGetAllocationGranularity(self, prop, flag):
        return 0, 2 * MIB

    def cuMemAddressReserve(self, size, alignment, address, flags):
        self.reserved[1 << 40] = size
        return 0, 1 << 40

    def cuMemCreate(self, size, prop, flags):
        assert size > 0 and size % (2 * MIB) == 0
        if sum(self.mapped.values()) + size > self.total:
            return 2, None
        self.created[len(self.created) + 1] = size
        return 0, len(self.created)

    def cuMemMap(self, address, size, offset, handle, flags):
        assert self.created[handle] == size and address not in self.mapped and address % (2 * MIB) == 0
        assert address + size <= (1 << 40) + self.reserved[1 << 40]
        self.mapped[address] = size
        return (0,)

    def cuMemRelease(self, handle):
        return (0,)

    def cuMemSetAccess(self, address, size, access, n):
        assert self.mapped[address] == size and len(access) == n == 1
        self.writable.add(address)
        return (0,)

    def cuMemUnmap(self, address, size):
        assert self.mapped.pop(address) == size
        self.writable.discard(address)
        return (0,)

    def cuMemAddressFree(self, address, size):
        assert not self.mapped and self.reserved.pop(address) == size
        return (0,)


class FakeContext:
    name, lost = "fake", None

    def set_current(self) -> None:
        pass

    def check(self, result, doing):
        if result[0]:
            raise DeviceError(f"{doing}: {result[0]}", "out of memory")
        return result[1] if len(result) == 2 else None


def make(monkeypatch, total: int) -> tuple[SlotMemory, FakeDriver]:
    driver = FakeDriver(total)
    with monkeypatch.context() as patch:
        patch.setattr("cuda.bindings.driver", driver)
        patch.setitem(__import__("sys").modules, "cuda.bindings", SimpleNamespace(driver=driver))
        return SlotMemory(FakeContext(), 0, total), driver


@given(st.lists(st.integers(0, 1100 * MIB), max_size=12))
def test_any_sizes_are_covered_and_no_segment_is_left_over(sizes):
    """Whatever it grew and shrank to: what was asked for is mapped without holes, nothing behind its last segment is,
    and one that does not fit changes nothing."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        memory, driver = make(monkeypatch, 1000 * MIB)
        for n_bytes in sizes:
            before = memory.n_bytes
            try:
                taken = memory.resize(n_bytes)
            except DeviceError as error:
                assert (error.kind, before) == ("out of memory", memory.n_bytes)
                assert n_bytes > 990 * MIB
                continue
            assert taken == memory.n_bytes - before
            assert n_bytes <= memory.n_bytes < n_bytes + SEGMENT_BYTES
            end = memory.address
            for address, size in sorted(driver.mapped.items()):
                assert address == end and address - memory.address < max(n_bytes, 1)
                end += size
            assert end - memory.address == memory.n_bytes == sum(driver.mapped.values())
            assert driver.writable == set(driver.mapped)
        memory.close()
        memory.close()
        assert not driver.mapped and not driver.reserved


def test_memory_given_back_is_whole_segments_from_multiples(monkeypatch):
    """The tier plans with segments that begin at multiples from slot 0 on, also after growing from a ragged end."""
    memory, driver = make(monkeypatch, 1000 * MIB)
    memory.resize(70 * MIB)
    memory.resize(200 * MIB)
    assert [0, 64, 70, 128, 192] == [(address - memory.address) // MIB for address in sorted(driver.mapped)]
    assert -72 * MIB == memory.resize(128 * MIB)


@pytest.mark.gpu
@pytest.mark.skipif(not CARD, reason="no NVIDIA card")
def test_card_gives_memory_back_and_keeps_what_stays():
    """On a real card: bytes before the border survive shrinking and growing, and free memory says what happened."""
    from coli.devices.cuda.context import Context

    card = probe.probe_cuda()[0]
    context = Context(card.cuda_ordinal, card.arch, card.name)
    try:
        before = context.memory()[0]
        memory = SlotMemory(context, card.cuda_ordinal, context.memory()[1])
        assert 512 * MIB == memory.resize(512 * MIB) == before - context.memory()[0]
        data = np.random.default_rng(0).integers(0, 256, MIB, np.uint8)
        at = memory.address + 64 * MIB - MIB // 2  # over a border
        driver = context._driver
        context.check(driver.cuMemcpyHtoD(at, data.ctypes.data, MIB), "write")
        assert -384 * MIB == memory.resize(128 * MIB)
        assert 128 * MIB == before - context.memory()[0]
        memory.resize(256 * MIB)
        found = np.empty_like(data)
        context.check(driver.cuMemcpyDtoH(found.ctypes.data, at, MIB), "read")
        assert (data == found).all()
        with pytest.raises(DeviceError) as error:
            memory.resize(context.memory()[1])
        assert (error.value.kind, memory.n_bytes) == ("out of memory", 256 * MIB)
        memory.close()
        assert before == context.memory()[0]
    finally:
        context.close()
