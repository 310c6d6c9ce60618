"""The expert tier: hot experts live in slots of the devices' arenas, the CPU computes the others.

How a layer uses it, on the engine thread::

    tier.note(layer, top_idx, decoding)                # heat: decode rows; a prompt's say what is hot now
    groups = tier.issue(layer, top_idx, x, external)   # external[row, rank] = 1: a device has it, else 0
    ...                                                # the CPU: ranks that are not external, the shared expert
    for group in groups:
        y = tier.take(group)                           # float32 (len(group.rows), hidden), or None: it failed
        if y is None: ...                              # the CPU computes (group.rows, group.ranks) too
        else: routing.put(expert_y, slot_of, group.rows, group.ranks, y)
    ...                                                # combine in rank order
    tier.between_tokens()                              # after each step: promotion, and the heat file now and then
    tier.stepped(seconds)                              # what the step took; behind a prompt also tier.after_prompt()

An exception between ``issue`` and the last ``take`` must be followed by ``tier.drain()``.  Contributions are
unweighted and bit-equal to the CPU's, so whoever computed a rank, the sum is the same; the tier decides speed only.

All this runs between two streams of weights, where nothing is in the caches: what a layer and a token ask is a few
lines of Python around `_core.routing`.

A device that computes whole layers by itself (a span) has a table of its own of who is in its slots: it is told by
``device.seat`` whenever the residency changes, which is between two steps.  Of the layers of its span the engine asks
``issue(..., skip=device, taken=...)`` for what the others hold, and counts what the device did with `took`.

Invariants: an expert is resident in at most one slot; on each device residents + reserved slots + free slots are all
its slots; every routed (row, rank) is in exactly one group or left to the CPU; no slot is written that an open
group reads.  The tables change on the engine thread alone; uploads run on one thread a device and are published by
`between_tokens`.  The tier opens no arena and closes no device: whoever planned the residents does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from coli.devices.base import Device, DeviceError
from coli.log import logger
from coli.placement.price import deal
from coli.tier.cards import Card, Group
from coli.tier.exchange import Exchange
from coli.tier.heat import Heat
from coli.tier.heatfile import HeatFile
from coli.tier.promotion import Promotion
from coli.tier.residency import ON_CPU, Residency
from coli.tier.room import CHECK_EVERY_S, bytes_to_give_back, slots_to_keep
from coli.tier.saving import HeatSaver
from coli.tier.warmstart import MAX_FAILURES, Upload, fill

_log = logger("tier")


class ExpertTier:
    """Experts over devices.  With no devices it still counts heat, and leaves every rank to the CPU.

    slabs : of each layer, uint8 (experts, slab_bytes): views of the container, which must stay open as long.
    devices, slots : the devices, by the index that placement uses, with their arenas open, and the slots of each arena.
    homes : of each device, the (layer, expert) pairs at home there, hottest first; an expert has one home at most, and
        is resident there or nowhere (`placement.plan`'s homes).
    heat : the counts.   heat_file : where they are saved; None saves nothing.
    keep_free_bytes : of each device, memory that should stay free while it runs: when others take it, slots are given
        back, where the device can.  None: nobody looks.
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
        keep_free_bytes: Sequence[int] | None = None,
    ) -> None:
        self.layers, self.experts = heat.recent.shape
        assert [self.experts] * self.layers == [len(layer) for layer in slabs], "slabs and heat are of two models"
        assert len(devices) == len(slots) == len(homes), "devices, slots and homes differ in length"
        self.heat = heat
        self.residency = Residency(self.layers, self.experts, slots)
        self.slab_bytes = slabs[0].shape[1]
        self._slabs = slabs
        keep_free = [0] * len(devices) if keep_free_bytes is None else keep_free_bytes
        self._cards = [Card(i, *facts) for i, facts in enumerate(zip(devices, slots, keep_free, strict=True))]
        self._home = np.full(self.layers * self.experts, ON_CPU, np.int8)  # by key
        self._index = {card.device: card.index for card in self._cards}
        self._order: list[list[int]] = []  # keys at home on each device, hottest first; for the warm start
        for device, pairs in enumerate(homes):
            keys = [layer * self.experts + expert for layer, expert in pairs]
            assert len(set(keys)) == len(keys) and (self._home[keys] == ON_CPU).all(), "an expert has two homes"
            self._home[keys] = device
            self._order.append(keys)
        self.exchange = Exchange(heat, self.residency, self._home, promotion)
        self._turn = 0  # of the devices, in starting uploads
        self._last_step: tuple[int, int, bool, int] | None = None  # as `Exchange.decoded` takes it; None: a prompt's
        self._waited_for = 0
        self._given_back_bytes = 0
        self._check_at = time.monotonic() + CHECK_EVERY_S
        self._decode_hits = self._decode_choices = self._misses = self._in_passing = 0
        self.saver = HeatSaver(heat, heat_file)
        self._closed = False

    # ---- a layer -------------------------------------------------------------------------------------------

    def holds(self, layer: int) -> bool:
        """Whether experts of this layer can be on a device at all."""
        return bool((self._home.reshape(self.layers, -1)[layer] != ON_CPU).any())

    def slabs(self, layer: int) -> np.ndarray:
        """The experts of a layer as the container has them: uint8 (experts, slab_bytes), views."""
        return self._slabs[layer]

    def lacks(self, device: Device, first: int, last: int) -> bool:
        """Whether any expert of layers [first, last) is not on this device."""
        index = next((card.index for card in self._cards if card.device is device), ON_CPU)
        return index == ON_CPU or bool((self.residency.device[first:last] != index).any())

    def has_others(self, device: Device) -> bool:
        """Whether any other device may hold experts."""
        return any(card.live and card.n_slots and card.device is not device for card in self._cards)

    def issue(
        self,
        layer: int,
        top_idx: np.ndarray,
        x: np.ndarray,
        external: np.ndarray,
        skip: Device | None = None,
        taken: np.ndarray | None = None,
    ) -> list[Group]:
        """Start every device on what it holds of a layer.

        top_idx : int32 (rows, top_k).   x : float32 (rows, hidden); free again on return.
        external : uint8 (rows, top_k), written: 1 where a device computes that rank, 0 where the CPU must.
        skip : a device that is in the middle of this layer and computes by itself what it holds.
        taken : uint8 (rows, top_k), another array than external: 1 in the ranks that ``skip`` computes.
        A device that fails here is left out: its ranks are the CPU's.
        """
        skipped = ON_CPU if skip is None else self._index.get(skip, ON_CPU)
        parts, left = self.residency.routes.split(layer, top_idx, external, skipped, taken)
        self._misses += left
        started = []
        for index, slots, rows, ranks in parts:
            card = self._cards[index]
            card.hits += len(slots)
            group = Group(card.device, index, layer, slots, rows, ranks)
            try:
                group.ticket = card.device.issue(layer, slots, rows, x)
            except DeviceError as error:
                external[rows, ranks] = 0
                self._group_failed(group, error)
                continue
            card.open.append(group)
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

    def took(self, device: Device, first_layer: int, top_idx: np.ndarray, *, in_passing: int = 0) -> None:
        """A device has computed by itself what it holds of these layers: int32 (layers, rows, top_k), counted as hits.

        in_passing : ranks besides, of experts that were sent to it for this batch only.
        Where no other may hold any, `issue` was not asked for the rest: that was the CPU's.
        """
        self._in_passing += in_passing
        index, hits = self._index.get(device), 0
        if index is not None:
            hits = self.residency.routes.hits(first_layer, top_idx, index)
            self._cards[index].hits += hits
        if not self.has_others(device):
            self._misses += top_idx.size - hits - in_passing

    def note(self, layer: int, top_idx: np.ndarray, decoding: bool = True) -> None:
        """Count what rows chose in a layer, int32 (rows, top_k), or in several from it on, (layers, rows, top_k).

        decoding : they are decode rows.  A prompt's say what is hot now, and are no heat beyond that.
        """
        self.heat.note(layer, top_idx, decoding)
        if not decoding:
            self.exchange.saw_prompt()

    def drain(self) -> None:
        """Take and forget every open group: the step that issued them was cut off."""
        for card in self._cards:
            for group in list(card.open):
                self.take(group)

    # ---- between tokens ------------------------------------------------------------------------------------

    def between_tokens(self) -> None:
        """Publish finished uploads, count heat, start swaps, and save heat when it is time.  Cheap when idle."""
        keys = self.heat.fold()
        n_choices = len(keys)
        hits = self.residency.routes.residents(keys)  # before anything moves: a hit is what the token found
        self._decode_choices += n_choices
        self._decode_hits += hits
        copying, n_uploaded = False, 0
        for card in self._cards:
            if card.on_the_way:
                copying = True
                n_uploaded += self._publish_finished(card)
        self._last_step = (n_choices, n_choices - hits, copying, n_uploaded) if n_choices else None
        if time.monotonic() >= self._check_at:
            self._check_at = time.monotonic() + CHECK_EVERY_S
            self._make_room()
        if n_choices:
            if self.exchange.is_due():
                self._look()
            self.exchange.started(self._start_swaps(self.exchange.allowed()))
        self.saver.save_if_due()

    def stepped(self, seconds: float) -> None:
        """The step behind the last `between_tokens` took so long, with all that belongs to it."""
        if self._last_step is None:
            self.exchange.took_in(seconds)
        else:
            self.exchange.decoded(seconds, *self._last_step)

    def after_prompt(self) -> None:
        """A prompt is computed, its first token is next, and nobody else waits for one: the moment for the swaps that
        are worth a delay.  The others of the prompt's follow beside the decode."""
        if not self.exchange.is_due():
            return
        self._look()
        n = self.exchange.worth_waiting_for()
        while n > 0:
            started = self._start_swaps(n)
            if not started:
                break
            n -= started
            self._waited_for += started
            self.settle()

    def settle(self) -> None:
        """Wait for the uploads that are on their way, and publish them."""
        for card in self._cards:
            while card.on_the_way:
                self._publish_next(card)

    def _look(self) -> None:
        self.exchange.look([card.index for card in self._cards if card.live and card.accepts])

    def _start_swaps(self, n: int) -> int:
        """Start at most n uploads, over the devices in turn.  How many there were."""
        if n <= 0:
            return 0
        # one round at a time, so that uploads never queue up
        cards = [card for card in self._cards if card.live and card.accepts and not card.on_the_way]
        started = 0
        while cards and started < n:
            self._turn += 1
            card = cards[self._turn % len(cards)]
            swap = self.exchange.take(card.index)
            if swap is None or not card.live:
                cards.remove(card)
                continue
            newcomer, victim = swap
            if victim is None:
                slot = self.residency.tables[card.index].reserve()
            elif card.open and card.is_read(self.residency.slot_of(victim)):
                continue  # nobody leaves from under a ticket
            else:
                slot = self._vacate(card, victim)
                if slot is None:
                    continue
                card.swaps += 1
            upload = Upload(card.index, slot, newcomer)
            try:
                card.send(upload, self._slab)
            except DeviceError as error:
                self._uploaded(upload, error)
                cards.remove(card)
                continue
            started += 1
        return started

    def _publish_finished(self, card: Card) -> int:
        """Publish a device's uploads that have ended.  How many there were."""
        ended = 0
        while not card.ended.empty():
            self._publish_next(card)
            ended += 1
        return ended

    def _publish_next(self, card: Card) -> None:
        """Publish a device's next upload that ends, waited for."""
        upload, outcome = card.next_ended()
        if not isinstance(outcome, BaseException):
            self.exchange.figures.uploaded(outcome)
            self._uploaded(upload, None)
        elif isinstance(outcome, DeviceError):
            self._uploaded(upload, outcome)
        else:  # a bug, which must be seen; the books stay right
            if card.live:
                self.residency.tables[card.index].release(upload.slot)
            raise outcome

    def _uploaded(self, upload: Upload, error: DeviceError | None) -> None:
        """An upload has ended: the expert is resident, or its slot is free."""
        card = self._cards[upload.device]
        if not card.live:
            return  # its table is gone
        if error is None:
            error = card.seat(*divmod(upload.key, self.experts), upload.slot)
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

    def _vacate(self, card: Card, key: int) -> int | None:
        """An expert leaves its device; its slot, now reserved.  None: the device could not be told and is given up."""
        error = card.seat(*divmod(key, self.experts), None)
        if error is not None:
            self.quarantine(card.device, str(error))
            return None
        return self.residency.vacate(key)

    # ---- memory ----------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Give slots back on devices whose memory others have taken."""
        for card in self._cards:
            if not card.live or not card.keep_free_bytes or not self.residency.tables[card.index].n_slots:
                continue
            try:
                missing = bytes_to_give_back(card.device.free_bytes(), card.keep_free_bytes)
            except DeviceError:
                continue  # the next group says why
            if missing:
                self.give_back(card.index, missing)

    def give_back(self, device: int, n_bytes: int) -> int:
        """Free at least so much of a device's slots, in whole segments; fewer where there are fewer.  Bytes freed.

        Experts that were there are the CPU's; the hot ones among them find other slots.  Between two steps.
        """
        card = self._cards[device]
        segment_bytes = card.device.slot_segment_bytes
        if not segment_bytes or card.open or not card.live:
            return 0  # it cannot, or not now
        n_slots = self.residency.tables[device].n_slots
        keep = slots_to_keep(n_slots, self.slab_bytes, segment_bytes, n_bytes)
        freed = self.resize(device, keep)
        if freed < 0:
            self._given_back_bytes -= freed
            _log.warning(
                f"{card.label}: its memory is short, {-freed / 2**20:,.0f} MiB of it are given back: "
                f"{keep:,} of {n_slots:,} expert slots stay"
            )
        return max(0, -freed)

    def n_slots(self, device: int) -> int:
        """Expert slots that a device has now."""
        return self.residency.tables[device].n_slots

    def resize(self, device: int, n_slots: int) -> int:
        """Have so many slots on a device, the first ones.  Bytes that it takes more of the device, negative where less.

        Between two steps.  Where a device has no memory for more slots, or is given up meanwhile, nothing is taken.
        """
        card, table = self._cards[device], self.residency.tables[device]
        self.settle()
        if not card.live or n_slots == table.n_slots:
            return 0
        for key in table.owner[n_slots:].tolist():
            if key >= 0:
                slot = self._vacate(card, key)
                if slot is None:
                    return 0
                table.release(slot)
        before = table.n_slots
        if n_slots < before:
            table.resize(n_slots)
        try:
            taken = card.device.resize_slots(n_slots)
        except DeviceError as error:
            _log.warning(f"{card.label}: {before:,} expert slots do not become {n_slots:,}: {error}")
            if error.kind == "lost":
                self.quarantine(card.device, str(error))
            return 0
        if n_slots > before:
            table.resize(n_slots)
        card.n_slots = n_slots
        self.exchange.look_soon()
        return taken

    # ---- the beginning ---------------------------------------------------------------------------------------

    def warm_start(self) -> None:
        """Fill every device with the hottest experts at home on it; one line when it is done."""
        self._fill(self._order, "warm start")

    def refill(self) -> None:
        """Fill slots that have come with the experts that are hottest now; one line when it is done."""
        heat = self.heat.now.reshape(-1)
        waiting = [np.flatnonzero((self._home == i) & ~self.residency.everybody()) for i in range(len(self._cards))]
        self._fill([keys[np.argsort(-heat[keys], kind="stable")].tolist() for keys in waiting], "more slots")

    def _fill(self, keys_of: Sequence[Sequence[int]], why: str) -> None:
        start = time.perf_counter()
        uploads: list[list[Upload]] = []  # by device
        for card, keys in zip(self._cards, keys_of, strict=True):
            table = self.residency.tables[card.index]
            chosen = keys[: table.n_free] if card.live and card.accepts else []
            uploads.append([Upload(card.index, table.reserve(), key) for key in chosen])
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
        seconds = time.perf_counter() - start
        self.exchange.figures.uploaded(seconds / max(map(len, uploads)))
        n, total = self.residency.n_residents, self.layers * self.experts
        _log.info(
            f"{why}: {n:,} of {total:,} experts resident ({n * self.slab_bytes / 2**20:,.0f} MiB) in {seconds:.1f} s"
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
        for key in self.residency.tables[device].residents().tolist():
            if card.seat(*divmod(key, self.experts), None) is not None:
                break  # it is not there to be told
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

    # ---- about it ------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Where ranks were computed and what is resident, as of the last `between_tokens`.

        hits, misses : contributions of devices and of the CPU, prompts too.   in_passing : of devices, from bytes that
        were sent for one batch of a prompt only; neither hits nor misses.   hit_rate : of decode alone, by residency,
        None before the first token.   swaps : begun; waited_for : of them, before a first token.
        given_back_bytes : of slots, for others who needed the memory.   seconds : of a decode step, an upload, what an
        upload takes from the decode, and a miss; None where it is not known.   bytes : of experts, by where they are;
        ``devices`` in the order of placement.
        """
        resident = [table.n_residents for table in self.residency.tables]
        total = self.layers * self.experts
        return {
            "hits": sum(card.hits for card in self._cards),
            "misses": self._misses,
            "in_passing": self._in_passing,
            "hit_rate": self._decode_hits / self._decode_choices if self._decode_choices else None,
            "decode_tokens": self.heat.tokens,
            "residents": sum(resident),
            "experts": total,
            "uploads": sum(card.uploads for card in self._cards),
            "swaps": sum(card.swaps for card in self._cards),
            "failed_uploads": sum(card.failed_uploads for card in self._cards),
            "waited_for": self._waited_for,
            "given_back_bytes": self._given_back_bytes,
            "failed_groups": sum(card.failed_groups for card in self._cards),
            "seconds": self.exchange.figures.to_dict(),
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
        with contextlib.ExitStack() as rest:  # each of it, whatever the one before it raised; the last one first
            rest.callback(self.saver.close)
            rest.callback(self.heat.fold)
            for card in self._cards:
                rest.callback(self._end_uploads, card)
            self.drain()

    def _end_uploads(self, card: Card) -> None:
        """End a device's thread behind its uploads, and publish them all, also behind one that raises."""
        card.uploader.shutdown()
        with contextlib.ExitStack() as rest:
            for _ in card.on_the_way:
                rest.callback(self._publish_next, card)

    def _slab(self, key: int) -> np.ndarray:
        layer, expert = divmod(key, self.experts)
        return self._slabs[layer][expert]
