"""What layers take of a card beside their weights when it computes them whole: vectors, and one sequence's state.

A pure function of sizes, so `coli plan` charges a card that nobody here owns as loading charges one that is there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from coli.placement.components import ModelShape
from coli.placement.facts import LAYER_KINDS, DeviceFacts
from coli.placement.grammar import MODES, parse

KV_STEP = 1024  # positions by which a device's keys and values grow at most (devices/cuda/mixer.py)

# What a kind of layers may take of a card beside its weights: more, and the weights that it displaces would save more.
_SHARE = 16


def whole_layer_bytes(
    shape: ModelShape, place: str, context: int, share_bytes: int, device: int = 0
) -> dict[str, int]:
    """Bytes beside the weights of each kind of LAYER_KINDS that a placement may put whole on a card.

    place : as for `plan`; a list that puts no out-projection on the card has no whole DeltaNet layers there.
    device : the card's place among the devices.
    context : positions that the sequence may reach.   share_bytes : what a kind may take.

    A kind whose vectors and state do not fit is left out.  Keys and values get room for as many positions as fit, in
    steps; a sequence that outgrows it takes what is free, and goes on on the CPU when that is used up.  So a longer
    context never leaves more for weights.
    """
    linear, full = LAYER_KINDS
    vectors = dict(zip(LAYER_KINDS, shape.vector_bytes, strict=True))
    wanted = {}
    if _may_hold(place, shape.layers, device, linear, "dnout"):
        n_bytes = shape.state_bytes + vectors[linear]
        if n_bytes <= share_bytes:
            wanted[linear] = n_bytes
    if _may_hold(place, shape.layers, device, full):
        step_bytes = shape.kv_bytes(KV_STEP)
        steps = min(-(-context // KV_STEP), max(0, share_bytes - vectors[full]) // step_bytes if step_bytes else 0)
        if steps:
            wanted[full] = steps * step_bytes + vectors[full]
    return wanted


def _may_hold(place: str, layers: int, device: int, *names: str) -> bool:
    """Whether a placement may put components of all these names on a device."""
    if place in MODES:
        return place != "off"
    items = [parse(place, layers).item(name) for name in names]
    return all(item is not None and device in item.devices for item in items)


class Charged(NamedTuple):
    """A card that may take layers whole.

    facts : charged with what goes with them; its ``whole_layers`` are those of runs, the only ones that count in time.
    kinds : those that it may take one by one.   span_bytes : of its charge, what runs take; 0 where it takes none.
    """

    facts: DeviceFacts
    kinds: tuple[str, ...]
    span_bytes: int


def with_whole_layers(
    facts: DeviceFacts, shape: ModelShape, place: str, context: int, device: int = 0, span_bytes: int | None = None
) -> Charged:
    """The facts of a card that can take layers whole, charged with what goes with those that it may take.

    device : its place among the devices.   span_bytes : what runs of layers take beside; None: it takes none.
    Raises PlacementError where ``place`` is a list that is not understood.
    """
    if not facts.whole_layers:
        return Charged(facts, (), 0)
    share_bytes = max(0, facts.free_bytes - facts.reserve_bytes) // _SHARE
    taken = whole_layer_bytes(shape, place, context, share_bytes, device)
    kinds, takes_runs = tuple(taken), bool(taken) and span_bytes is not None and span_bytes <= share_bytes
    charged = sum(taken.values()) + (span_bytes if takes_runs else 0)
    made = replace(facts, layer_bytes=charged, whole_layers=kinds if takes_runs else ())
    return Charged(made, kinds, span_bytes if takes_runs else 0)
