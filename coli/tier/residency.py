"""Where each expert is: the table [layer][expert] -> (device, slot).

Invariant: the table and the slots say the same.  An expert is in at most one slot of at most one device, and an
expert that is in none is the CPU's, who can always compute it.  Only the engine thread changes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coli._core.routing import MAX_DEVICES, ON_CPU, Table
from coli.tier.slots import SlotTable


class Residency:
    """The table of all experts over the slots of all devices.  An expert's key is layer * experts + expert.

    device : int8 (layers, experts), ON_CPU where it is in no slot.   slot : int32 (layers, experts), valid where it is.
    tables : the slots of each device.   routes : `_core.routing.Table` over them, what a layer and a token ask.
    """

    def __init__(self, layers: int, experts: int, slots: Sequence[int]) -> None:
        assert len(slots) <= MAX_DEVICES, f"{len(slots)} devices"
        self.device = np.full((layers, experts), ON_CPU, np.int8)
        self.slot = np.zeros((layers, experts), np.int32)
        self.tables = [SlotTable(n) for n in slots]
        self._flat_device = self.device.reshape(-1)
        self._flat_slot = self.slot.reshape(-1)
        self.routes = Table(self.device, self.slot, len(slots))

    @property
    def n_residents(self) -> int:
        """Experts that are on a device."""
        return sum(table.n_residents for table in self.tables)

    def is_resident(self, keys: np.ndarray) -> np.ndarray:
        """Which of some keys are on a device: bool, the shape of ``keys``."""
        return self._flat_device[keys] != ON_CPU

    def device_of(self, key: int) -> int:
        """The device that an expert is on, or ON_CPU."""
        return int(self._flat_device[key])

    def slot_of(self, key: int) -> int:
        """The slot of an expert that is on a device."""
        return int(self._flat_slot[key])

    def everybody(self) -> np.ndarray:
        """Which experts are on a device: bool, by key."""
        return self._flat_device != ON_CPU

    def publish(self, device: int, slot: int, key: int) -> None:
        """An expert's upload into a reserved slot is complete: from now on it is found there."""
        assert self._flat_device[key] == ON_CPU, f"expert {key} would be on two devices"
        self.tables[device].publish(slot, key)
        self._flat_device[key] = device
        self._flat_slot[key] = slot

    def vacate(self, key: int) -> int:
        """An expert leaves; its slot, which is now reserved."""
        device, slot = int(self._flat_device[key]), int(self._flat_slot[key])
        self.tables[device].vacate(slot)
        self._flat_device[key] = ON_CPU
        return slot

    def drop_device(self, device: int) -> int:
        """All experts of a device leave, and it has no slots any more.  How many there were."""
        keys = self.tables[device].residents()
        self._flat_device[keys] = ON_CPU
        self.tables[device] = SlotTable(0)
        return len(keys)
