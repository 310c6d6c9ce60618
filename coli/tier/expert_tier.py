"""The expert tier: hot experts live in slots of the devices' arenas, the CPU computes the others.

How a layer uses it, on the engine thread::

    tier.note(layer, top_idx[decode_rows])             # heat: decode rows only
    groups = tier.issue(layer, top_idx, x, external)   # external[row, rank] = 1: a device has it, else 0
    ...                                                # the CPU: ranks that are not external, the shared expert
    for group in groups:
        y = tier.take(group)                           # float32 (len(group.rows), hidden), or None: it failed
        if y is None: ...                              # the CPU computes (group.rows, group.ranks) too
        else: expert_y[slot_of[group.rows, group.ranks]] = y
    ...                                                # combine in rank order
    tier.between_tokens()                              # after each step: promotion, and the heat file now and then

An exception between ``issue`` and the last ``take`` must be followed by ``tier.drain()``.  Contributions are
unweighted and bit-equal to the CPU's, so whoever computed a rank, the sum is the same; the tier decides speed only.
An engine that prefers to talk to the devices itself asks `route` for the groups and issues and takes them; it then
answers for failures itself (`quarantine`) and calls `between_tokens` with no ticket open.

Invariants: an expert is resident in at most one slot; on each device residents + reserved slots + free slots are all
its slots; every routed (row, rank) is in exactly one group or left to the CPU; no slot is written that an open
group reads.  The tables change on the engine thread alone; uploads run on one thread a device and are published by
`between_tokens`.  The tier opens no arena and closes no device: whoever planned the residents does.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coli.devices.base import Device, DeviceError
from coli.errors import ColiError
from coli.log import logger
from coli.placement.price import deal
from coli.tier.heat import Heat
from coli.tier.heatfile import HeatFile
from coli.tier.promotion import Promotion, choose_swaps
from coli.tier.residency import ON_CPU, Residency
from coli.tier.warmstart import MAX_FAILURES, Upload, fill

SAVE_EVERY_S = 300.0  # a crash loses at most so much heat; a save is a few milliseconds on a thread of its own

_log = logger("tier")


@dataclass(eq=False, slots=True)
class Group:
    """What one device computes of a layer: contribution i is expert rank ranks[i] of row rows[i].

    index : of the device.   slots : int32 (n,).   rows, ranks : int64 (n,).   ticket : None until it is issued.
    """

    device: Device
    index: int
    layer: int
    slots: np.ndarray
    rows: np.ndarray
    ranks: np.ndarray
    ticket: Any = None


@dataclass
class _Card:
    """A device of the tier, and what happened on it."""

    label: str
    device: Device
    n_slots: int
    uploader: ThreadPoolExecutor
    live: bool = True
    accepts: bool = True  # uploads; False after too many failed
    failed_uploads: int = 0
    failed_uploads_in_a_row: int = 0
    failed_groups: int = 0
    failed_groups_in_a_row: int = 0
    hits: int = 0
    uploads: int = 0
    swaps: int = 0
    open: list[Group] = field(default_factory=list)
    on_the_way: deque[tuple[Upload, Future]] = field(default_factory=deque)


class ExpertTier:
    """Experts over devices.  With no devices it still counts heat, and leaves every rank to the CPU.

    slabs : of each layer, uint8 (experts, slab_bytes): views of the container, which must stay open as long.
    devices, slots : the devices, by the index that placement uses, with their arenas open, and the slots of each arena.
    homes : of each device, the (layer, expert) pairs at home there, hottest first; an expert has one home at most, and
        is resident there or nowhere (`placement.plan`'s homes).
    heat : the counts.   heat_file : where they are saved; None saves nothing.
    """

    def __init__(
        self,
        slabs: Sequence[np.ndarray],
        devices: Sequence[Device],
        slots: Sequence[int],
        homes: Sequence[Sequence[tuple[int, int]]],
        *,
        heat: Heat,
        heat_file: HeatFile | None = None,
        promotion: Promotion = Promotion(),
    ) -> None:
        self.layers, self.experts = heat.recent.shape
        assert [self.experts] * self.layers == [len(layer) for layer in slabs], "slabs and heat are of two models"
        assert len(devices) == len(slots) == len(homes), "devices, slots and homes differ in length"
        self.heat = heat
        self.residency = Residency(self.layers, self.experts, slots)
        self.slab_bytes = slabs[0].shape[1]
        self._slabs = slabs
        self._promotion = promotion
        self._cards = [
            _Card(f"device {i} ({device.name})", device, n, ThreadPoolExecutor(1, f"coli-upload-{i}", _roam))
            for i, (device, n) in enumerate(zip(devices, slots, strict=True))
        ]
        self._home = np.full(self.layers * self.experts, ON_CPU, np.int8)  # by key
        self._order: list[list[int]] = []  # keys at home on each device, hottest first; for the warm start
        for device, pairs in enumerate(homes):
            keys = [layer * self.experts + expert for layer, expert in pairs]
            assert len(set(keys)) == len(keys) and (self._home[keys] == ON_CPU).all(), "an expert has two homes"
            self._home[keys] = device
            self._order.append(keys)
        self._next_look = promotion.every_tokens
        self._decode_hits = self._decode_choices = self._misses = 0
        self._heat_file = heat_file
        self._saver = ThreadPoolExecutor(1, "coli-heat", _roam)
        self._saving: tuple[np.ndarray, Future] | None = None
        self._save_at = time.monotonic() + SAVE_EVERY_S
        self._save_complaint = ""
        self._closed = False

    # ---- a layer -------------------------------------------------------------------------------------------

    def holds(self, layer: int) -> bool:
        """Whether experts of this layer can be on a device at all."""
        return bool((self._home.reshape(self.layers, -1)[layer] != ON_CPU).any())

    def route(self, layer: int, top_idx: np.ndarray) -> list[Group]:
        """What each device holds of top_idx, int32 (rows, top_k), counted as hits; nothing is started."""
        groups = []
        left = top_idx.size
        for routed in self.residency.route(layer, top_idx):
            card = self._cards[routed.device]
            groups.append(Group(card.device, routed.device, layer, routed.slots, routed.rows, routed.ranks))
            card.hits += len(routed.rows)
            left -= len(routed.rows)
        self._misses += left
        return groups

    def issue(self, layer: int, top_idx: np.ndarray, x: np.ndarray, external: np.ndarray) -> list[Group]:
        """Start every device on what it holds of a layer.

        top_idx : int32 (rows, top_k).   x : float32 (rows, hidden); free again on return.
        external : uint8 (rows, top_k), written: 1 where a device computes that rank, 0 where the CPU must.
        A device that fails here is left out: its ranks are the CPU's.
        """
        external[...] = 0
        started = []
        for group in self.route(layer, top_idx):
            try:
                group.ticket = group.device.issue(layer, group.slots, group.rows, x)
            except DeviceError as error:
                self._group_failed(group, error)
                continue
            external[group.rows, group.ranks] = 1
            self._cards[group.index].open.append(group)
            started.append(group)
        return started

    def take(self, group: Group) -> np.ndarray | None:
        """Wait for a group: float32 (len(group.rows), hidden), unweighted, or None where the device failed."""
        card = self._cards[group.index]
        if not card.live:  # given up in between
            self._count_as_misses(group)
            return None
        assert group in card.open, f"a group of layer {group.layer} is taken twice"
        card.open.remove(group)
        try:
            y = card.device.take(group.ticket)
        except DeviceError as error:
            self._group_failed(group, error)
            return None
        card.failed_groups_in_a_row = 0
        return y

    def note(self, layer: int, top_idx: np.ndarray) -> None:
        """Count what decode rows chose in a layer, int (rows, top_k).  Prompts are not counted."""
        self.heat.note(layer, top_idx)

    def drain(self) -> None:
        """Take and forget every open group: the step that issued them was cut off."""
        for card in self._cards:
            for group in list(card.open):
                self.take(group)

    # ---- between tokens ------------------------------------------------------------------------------------

    def between_tokens(self) -> None:
        """Publish finished uploads, count heat, start swaps, and save heat when it is time.  Cheap when idle."""
        keys = self.heat.fold()
        if len(keys):  # before anything moves: a hit is what the token found
            self._decode_choices += len(keys)
            self._decode_hits += int(self.residency.is_resident(keys).sum())
        self._publish_finished()
        if self.heat.tokens >= self._next_look:
            self._next_look = self.heat.tokens + self._promotion.every_tokens
            for device in range(len(self._cards)):
                self._start_swaps(device)
        self._autosave()

    def settle(self) -> None:
        """Wait for the uploads that are on their way, and publish them."""
        for card in self._cards:
            for _, future in card.on_the_way:
                future.exception()
        self._publish_finished()

    def _start_swaps(self, device: int) -> None:
        card = self._cards[device]
        if not card.accepts or not card.live or card.on_the_way:  # one round at a time: uploads never queue up
            return
        table = self.residency.tables[device]
        at_home = np.flatnonzero(self._home == device)
        candidates = at_home[~self.residency.is_resident(at_home)]
        residents = table.residents()
        if card.open:  # nobody leaves from under a ticket
            in_use = np.unique(np.concatenate([group.slots for group in card.open]))
            residents = residents[~np.isin(residents, table.owner[in_use])]
        heat = self.heat.recent.reshape(-1)
        for newcomer, victim in choose_swaps(heat, residents, candidates, table.n_free, self._promotion):
            slot = table.reserve() if victim is None else self.residency.vacate(victim)
            card.swaps += victim is not None
            upload = Upload(device, slot, newcomer)
            card.on_the_way.append((upload, card.uploader.submit(card.device.write_slot, slot, self._slab(newcomer))))

    def _publish_finished(self) -> None:
        for card in self._cards:
            # one uploader, so they end in the order in which they began
            while card.on_the_way and card.on_the_way[0][1].done():
                upload, future = card.on_the_way.popleft()
                error = future.exception()
                if error is not None and not isinstance(error, DeviceError):
                    raise error
                self._uploaded(upload, error)

    def _uploaded(self, upload: Upload, error: DeviceError | None) -> None:
        """An upload has ended: the expert is resident, or its slot is free."""
        card = self._cards[upload.device]
        if not card.live:
            return  # its table is gone
        if error is None:
            self.residency.publish(upload.device, upload.slot, upload.key)
            card.uploads += 1
            card.failed_uploads_in_a_row = 0
            return
        self.residency.tables[upload.device].release(upload.slot)
        card.failed_uploads += 1
        card.failed_uploads_in_a_row += 1
        if error.kind == "lost":
            self.quarantine(card.device, str(error))
            return
        # what a copy that broke off left behind may be half an expert
        with contextlib.suppress(DeviceError):
            card.device.clear_slot(upload.slot)
        if card.failed_uploads == 1:
            layer, expert = divmod(upload.key, self.experts)
            _log.warning(
                f"{card.label}: the upload of expert {expert} of layer {layer} failed ({error}); "
                "the slot stays free and the CPU computes the expert"
            )
        if card.accepts and card.failed_uploads_in_a_row == MAX_FAILURES:
            card.accepts = False
            _log.warning(f"{card.label}: {MAX_FAILURES} uploads in a row failed; no more is sent, the residents stay")

    # ---- the beginning ---------------------------------------------------------------------------------------

    def warm_start(self) -> None:
        """Fill every device with the hottest experts at home on it; one line when it is done."""
        start = time.perf_counter()
        uploads: list[list[Upload]] = []  # by device
        for device, keys in enumerate(self._order):
            table = self.residency.tables[device]
            chosen = keys[: table.n_free] if self._cards[device].live else []
            uploads.append([Upload(device, table.reserve(), key) for key in chosen])
        if not any(uploads):
            return
        waiting = {upload for mine in uploads for upload in mine}
        outcomes = fill([c.device for c in self._cards], [c.uploader for c in self._cards], uploads, self._slab)
        try:
            with contextlib.closing(outcomes):
                for upload, error in outcomes:
                    waiting.discard(upload)
                    self._uploaded(upload, error)
        finally:
            for upload in waiting:  # never tried: the device stopped answering, or an interrupt
                if self._cards[upload.device].live:
                    self.residency.tables[upload.device].release(upload.slot)
        n, total = self.residency.n_residents, self.layers * self.experts
        _log.info(
            f"warm start: {n:,} of {total:,} experts resident ({n * self.slab_bytes / 2**20:,.0f} MiB) "
            f"in {time.perf_counter() - start:.1f} s"
        )

    # ---- failures ----------------------------------------------------------------------------------------------

    def _group_failed(self, group: Group, error: DeviceError) -> None:
        card = self._cards[group.index]
        self._count_as_misses(group)
        card.failed_groups += 1
        card.failed_groups_in_a_row += 1
        if error.kind == "lost":
            self.quarantine(card.device, str(error))
        elif card.failed_groups_in_a_row >= MAX_FAILURES:
            self.quarantine(card.device, f"{MAX_FAILURES} groups failed in a row, the last one with: {error}")
        elif card.failed_groups == 1:
            _log.warning(f"{card.label}: a group of layer {group.layer} failed ({error}); the CPU computes it")

    def _count_as_misses(self, group: Group) -> None:
        self._cards[group.index].hits -= len(group.rows)
        self._misses += len(group.rows)

    def quarantine(self, lost: Device, reason: str = "it does not answer") -> None:
        """Give a device up for good: its experts are the CPU's at once, and move home to the devices that are left.

        Its open groups answer None.  The device itself is not asked again; closing it is its owner's business.
        A device that is none of the tier's, or was given up before, is none of its business.
        """
        device = next((i for i, card in enumerate(self._cards) if card.device is lost and card.live), None)
        if device is None:
            return
        card = self._cards[device]
        card.live = card.accepts = False
        card.open.clear()
        n = self.residency.drop_device(device)
        _log.warning(f"{card.label} is out: {reason}; the CPU computes the {n:,} experts that were on it")
        homeless = np.flatnonzero(self._home == device)
        weights = [other.n_slots if other.live else 0 for other in self._cards]
        if not any(weights):
            self._home[homeless] = ON_CPU
            return
        hottest_first = homeless[np.argsort(-self.heat.recent.reshape(-1)[homeless], kind="stable")]
        self._home[hottest_first] = deal(weights, len(homeless))

    @property
    def live(self) -> list[bool]:
        """Of each device, whether it is still asked."""
        return [card.live for card in self._cards]

    # ---- heat on disk ------------------------------------------------------------------------------------------

    def _autosave(self) -> None:
        if self._heat_file is None or time.monotonic() < self._save_at:
            return
        self._save_at = time.monotonic() + SAVE_EVERY_S
        self._finish_save()
        delta = self.heat.take_unsaved()
        if delta is not None:
            self._saving = delta, self._saver.submit(self._heat_file.merge, delta)

    def _finish_save(self) -> None:
        """See how the last save ended; one that failed is said once and its counts go into the next."""
        if self._saving is None:
            return
        (delta, future), self._saving = self._saving, None
        error = future.exception()
        if error is None:
            return
        if not isinstance(error, ColiError):
            raise error
        self.heat.give_back(delta)
        if str(error) != self._save_complaint:
            self._save_complaint = str(error)
            _log.warning(f"{error}; the run goes on, its heat is not saved")

    # ---- about it ------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Where ranks were computed and what is resident, as of the last `between_tokens`.

        hits, misses : contributions of devices and of the CPU, prompts too.   hit_rate : of decode alone, by residency,
        None before the first token.   swaps : begun.   bytes : of experts, by where they are; ``devices`` in the order
        of placement.
        """
        resident = [table.n_residents for table in self.residency.tables]
        total = self.layers * self.experts
        return {
            "hits": sum(card.hits for card in self._cards),
            "misses": self._misses,
            "hit_rate": self._decode_hits / self._decode_choices if self._decode_choices else None,
            "decode_tokens": self.heat.tokens,
            "residents": sum(resident),
            "experts": total,
            "uploads": sum(card.uploads for card in self._cards),
            "swaps": sum(card.swaps for card in self._cards),
            "failed_uploads": sum(card.failed_uploads for card in self._cards),
            "failed_groups": sum(card.failed_groups for card in self._cards),
            "bytes": {
                "cpu": (total - sum(resident)) * self.slab_bytes,
                "devices": [n * self.slab_bytes for n in resident],
            },
            "devices": [
                {
                    "name": card.device.name,
                    "live": card.live,
                    "slots": table.n_slots,
                    "residents": table.n_residents,
                    "reserved": table.n_reserved,
                    "hits": card.hits,
                    "uploads": card.uploads,
                    "swaps": card.swaps,
                }
                for card, table in zip(self._cards, self.residency.tables, strict=True)
            ],
        }

    def summary(self) -> str:
        """The text of the ``[tier]`` line."""
        stats = self.stats()
        rate = "-" if stats["hit_rate"] is None else f"{100 * stats['hit_rate']:.1f} %"
        where = ", ".join(
            f"{entry['name']} {entry['residents']:,} of {entry['slots']:,} slots ({n_bytes / 2**20:,.0f} MiB)"
            + ("" if entry["live"] else ", out")
            for entry, n_bytes in zip(stats["devices"], stats["bytes"]["devices"], strict=True)
        )
        return (
            f"hit rate {rate} of {stats['decode_tokens']:,} tokens; residents {stats['residents']:,} of "
            f"{stats['experts']:,} ({where or 'no device'}); CPU {stats['bytes']['cpu'] / 2**20:,.0f} MiB of experts; "
            f"uploads {stats['uploads']:,}, swaps {stats['swaps']:,}"
        )

    def close(self) -> None:
        """Finish open groups and uploads, end the threads, save heat.  May be called twice."""
        if self._closed:
            return
        self._closed = True
        self.drain()
        for card in self._cards:
            card.uploader.shutdown()
        self._publish_finished()
        self.heat.fold()
        self._finish_save()
        delta = self.heat.take_unsaved()
        if self._heat_file is not None and delta is not None:
            self._saving = delta, self._saver.submit(self._heat_file.merge, delta)
            self._finish_save()
        self._saver.shutdown()

    def _slab(self, key: int) -> np.ndarray:
        layer, expert = divmod(key, self.experts)
        return self._slabs[layer][expert]


def _roam() -> None:
    """Let a helper thread run wherever the process may: it must not inherit the one core of a pinned engine thread."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))
