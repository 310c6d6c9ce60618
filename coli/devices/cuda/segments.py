"""Memory for expert slots that shrinks and grows at one address: a range of addresses, and segments mapped into it.

A slot's address is ``address + slot * stride`` whatever is mapped, so kernels, graphs and tables know nothing of
segments; giving slots back unmaps the segments behind the last slot that stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coli.container.layout import round_up
from coli.devices.base import DeviceError

if TYPE_CHECKING:
    from coli.devices.cuda.context import Context

SEGMENT_BYTES = 64 << 20  # what is given back at a time: 40 experts of the 35B; mapping one takes a fraction of a ms


class SlotMemory:
    """Device memory from ``address`` on, of which the first ``n_bytes`` are there.

    most_bytes : what it may ever become; only addresses are reserved for it.
    Raises DeviceError where the card has no such memory, "out of memory" where its addresses are used up.
    """

    def __init__(self, context: Context, ordinal: int, most_bytes: int) -> None:
        from cuda.bindings import driver

        self._context = context
        self._driver = driver
        self._prop = driver.CUmemAllocationProp()
        self._prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED  # it stays on the card
        self._prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._prop.location.id = ordinal
        self._access = driver.CUmemAccessDesc()
        self._access.location = self._prop.location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        context.set_current()
        smallest = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._page_bytes = int(self._check(driver.cuMemGetAllocationGranularity(self._prop, smallest)))
        self._reserved_bytes = round_up(most_bytes, SEGMENT_BYTES)
        self.address = int(self._check(driver.cuMemAddressReserve(self._reserved_bytes, SEGMENT_BYTES, 0, 0)))
        self._segments: list[tuple[int, int]] = []  # offset, bytes

    def _check(self, result: tuple) -> Any:
        return self._context.check(result, "map memory for expert slots")

    @property
    def n_bytes(self) -> int:
        """Memory that is there."""
        return sum(self._segments[-1]) if self._segments else 0

    def resize(self, n_bytes: int) -> int:
        """Have at least ``n_bytes``, and no segment behind them; the bytes that this takes, negative where it frees.

        Nothing on the card uses what goes.  Raises DeviceError("out of memory") and changes nothing.
        """
        before = self.n_bytes
        if n_bytes > self._reserved_bytes:
            found = f"{n_bytes:,} bytes of expert slots, {self._reserved_bytes:,} have addresses"
            raise DeviceError(f"{self._context.name}: {found}", "out of memory")
        self._context.set_current()
        try:
            while self.n_bytes < n_bytes:
                at = self.n_bytes
                # up to the next multiple: segments begin at multiples, wherever an earlier end was
                self._map(at, min(SEGMENT_BYTES - at % SEGMENT_BYTES, round_up(n_bytes - at, self._page_bytes)))
        except DeviceError:
            self._unmap_behind(before)
            raise
        self._unmap_behind(n_bytes)
        return self.n_bytes - before

    def _map(self, offset: int, n_bytes: int) -> None:
        driver, at = self._driver, self.address + offset
        handle = self._check(driver.cuMemCreate(n_bytes, self._prop, 0))
        try:
            self._check(driver.cuMemMap(at, n_bytes, 0, handle, 0))
        finally:
            self._check(driver.cuMemRelease(handle))  # the mapping keeps the memory
        try:
            self._check(driver.cuMemSetAccess(at, n_bytes, [self._access], 1))
        except DeviceError:
            driver.cuMemUnmap(at, n_bytes)
            raise
        self._segments.append((offset, n_bytes))

    def _unmap_behind(self, n_bytes: int) -> None:
        while self._segments and self._segments[-1][0] >= n_bytes:
            offset, size = self._segments[-1]
            self._check(self._driver.cuMemUnmap(self.address + offset, size))
            self._segments.pop()

    def close(self) -> None:
        """Give memory and addresses back.  Safe to call twice; does nothing on a lost card."""
        if self.address and self._context.lost is None:
            self._context.set_current()
            self._unmap_behind(0)
            self._check(self._driver.cuMemAddressFree(self.address, self._reserved_bytes))
            self.address = 0
