"""Where each expert is: the table [layer][expert] -> (device, slot), and the groups that a layer's routing makes of it.

Invariant: the table and the slots say the same.  An expert is in at most one slot of at most one device, and an
expert that is in none is the CPU's, who can always compute it.  Only the engine thread changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from coli.tier.slots import SlotTable

ON_CPU = -1


class Routed(NamedTuple):
    """The part of a layer's routing that one device holds; contribution i is rank ranks[i] of row rows[i].

    slots : int32 (n,), the slot of each contribution.   rows, ranks : int64 (n,), row by row in rank order.
    """

    device: int
    slots: np.ndarray
    rows: np.ndarray
    ranks: np.ndarray


class Residency:
    """The table of all experts over the slots of all devices.  An expert's key is layer * experts + expert.

    device : int8 (layers, experts), ON_CPU where it is in no slot.   slot : int32 (layers, experts), valid where it is.
    tables : the slots of each device.

    A second form of the same, [layer][expert] -> (device, slot) or None as plain lists, is for decode: for one row of
    8 ranks a loop over them takes about a third of the time of numpy's calls.
    """

    def __init__(self, layers: int, experts: int, slots: Sequence[int]) -> None:
        self.device = np.full((layers, experts), ON_CPU, np.int8)
        self.slot = np.zeros((layers, experts), np.int32)
        self.tables = [SlotTable(n) for n in slots]
        self._flat_device = self.device.reshape(-1)
        self._flat_slot = self.slot.reshape(-1)
        self._places: list[list[tuple[int, int] | None]] = [[None] * experts for _ in range(layers)]

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
        self._set_place(key, (device, slot))

    def vacate(self, key: int) -> int:
        """An expert leaves; its slot, which is now reserved."""
        device, slot = int(self._flat_device[key]), int(self._flat_slot[key])
        self.tables[device].vacate(slot)
        self._flat_device[key] = ON_CPU
        self._set_place(key, None)
        return slot

    def drop_device(self, device: int) -> int:
        """All experts of a device leave, and it has no slots any more.  How many there were."""
        keys = self.tables[device].residents()
        self._flat_device[keys] = ON_CPU
        for key in keys.tolist():
            self._set_place(key, None)
        self.tables[device] = SlotTable(0)
        return len(keys)

    def route(self, layer: int, top_idx: np.ndarray) -> list[Routed]:
        """What each device holds of a layer's routing top_idx (rows, top_k); devices that hold nothing are left out.

        The hot path, once a layer: no loop over rows, and for one row none but over its ranks.
        """
        if len(top_idx) == 1:
            return self._route_row(layer, top_idx[0].tolist())
        where = self.device[layer].take(top_idx)  # (rows, top_k)
        found = []
        for device in range(len(self.tables)):
            rows, ranks = (where == device).nonzero()
            if len(rows):
                found.append(Routed(device, self.slot[layer].take(top_idx[rows, ranks]), rows, ranks))
        return found

    def _route_row(self, layer: int, experts: list[int]) -> list[Routed]:
        places = self._places[layer]
        held: list[tuple[list[int], list[int]] | None] = [None] * len(self.tables)
        for rank, expert in enumerate(experts):
            place = places[expert]
            if place is not None:
                device, slot = place
                mine = held[device]
                if mine is None:
                    held[device] = [slot], [rank]
                else:
                    mine[0].append(slot)
                    mine[1].append(rank)
        return [
            Routed(device, np.array(mine[0], np.int32), np.zeros(len(mine[0]), np.int64), np.array(mine[1], np.int64))
            for device, mine in enumerate(held)
            if mine is not None
        ]

    def _set_place(self, key: int, place: tuple[int, int] | None) -> None:
        layer, expert = divmod(key, self.device.shape[1])
        self._places[layer][expert] = place
