"""A machine that plays tokens: every step of every layer with its own clock, from nothing but plain numbers.

It knows no plan and no price (a test holds that it imports nothing of coli): it is told where each matrix and each
expert lies, draws what a router would choose, and lets the executors run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

STEPS = {"lmhead": 1, "dnproj": 1, "dnout": 1, "attnproj": 2, "shexp": 1}
PROJECTIONS = ({"dnproj", "dnout"}, {"attnproj"})


@dataclass(frozen=True)
class Machine:
    """gb_s and latency_us of each device, gb_s of the CPU.

    layer_us : of each device, what a layer that it takes whole costs besides its bytes; None: it takes none.  The way
        into a run of such layers, and a question to the host in one of them, cost its latency each.
    """

    cpu_gb_s: float
    devices: Sequence[tuple[float, float]]
    layer_us: Sequence[float | None] = ()

    def matrix_us(self, name: str, n_bytes: float, device: int | None) -> float:
        """One component by itself."""
        if device is None:
            return n_bytes / self.cpu_gb_s / 1e3
        gb_s, latency_us = self.devices[device]
        return STEPS[name] * latency_us + n_bytes / gb_s / 1e3

    def taker_of(self, parts: dict[str, int | None]) -> int | None:
        """Who takes a layer whole: the device of its projections, unless another has the shared expert."""
        projections = {name: device for name, device in parts.items() if name != "shexp"}
        (device, *others) = set(projections.values()) or {None}
        if others or device is None or set(projections) not in PROJECTIONS or parts.get("shexp") not in (None, device):
            return None
        return device if self.layer_us and self.layer_us[device] is not None else None


def draw_tokens(weights: Sequence[Sequence[float]], topk: int, n: int, seed: int) -> list[list[list[int]]]:
    """What a router chooses: for each token and layer ``topk`` different experts, by weight.  [token][layer][rank]"""
    draw = random.Random(seed)
    tokens = []
    for _ in range(n):
        token = []
        for row in weights:
            # The smallest of exponential clocks: drawing without replacement, in proportion to the weights.
            clocks = sorted((draw.expovariate(weight), e) for e, weight in enumerate(row))
            token.append([e for _, e in clocks[:topk]])
        tokens.append(token)
    return tokens


def play(
    machine: Machine,
    components: Sequence[tuple[str, int | None, int, int | None]],
    owner_of: dict[tuple[int, int], int],
    expert_bytes: int,
    cpu_expert_bytes: float,
    tokens: Sequence[Sequence[Sequence[int]]],
    small_bytes: float = 0.0,
) -> float:
    """Microseconds of a token, on average.

    components : (name, layer, bytes, device).   owner_of : (layer, expert) -> device, for those in VRAM.
    small_bytes : what a layer reads besides, where it is computed.
    """
    n_layers = len(tokens[0])
    takers = []
    for layer in range(n_layers):
        takers.append(machine.taker_of({name: device for name, of_layer, _, device in components if of_layer == layer}))
    total_us = 0.0
    for token in tokens:
        clock = 0.0
        for layer, chosen in enumerate(token):
            taker = takers[layer]
            if taker is None:
                clock += small_bytes / machine.cpu_gb_s / 1e3
            else:
                clock += machine.layer_us[taker] + small_bytes / machine.devices[taker][0] / 1e3
                if layer == 0 or takers[layer - 1] != taker:
                    clock += machine.devices[taker][1]
            for name, of_layer, n_bytes, device in components:
                if of_layer == layer and name != "shexp":
                    if taker is None:
                        clock += machine.matrix_us(name, n_bytes, device)
                    else:
                        clock += n_bytes / machine.devices[taker][0] / 1e3
            shexp = next(((b, d) for name, of_layer, b, d in components if (name, of_layer) == ("shexp", layer)), None)
            owners = [owner_of.get((layer, expert)) for expert in chosen]
            # Whoever is not the layer's taker begins when that has asked, once it knows what it lacks.
            others = clock
            if taker is not None and (any(owner != taker for owner in owners) or (shexp and shexp[1] != taker)):
                others += machine.devices[taker][1]
            cpu, cards = others, [clock if i == taker else others for i in range(len(machine.devices))]
            busy = [i == taker for i in range(len(cards))]
            if shexp is not None:
                n_bytes, device = shexp
                if device is None:
                    cpu += machine.matrix_us("shexp", n_bytes, None)
                else:
                    cards[device] += n_bytes / machine.devices[device][0] / 1e3
                    cards[device] += 0.0 if busy[device] else machine.devices[device][1]
                    busy[device] = True
            for device in owners:
                if device is None:
                    cpu += cpu_expert_bytes / machine.cpu_gb_s / 1e3
                    continue
                gb_s, latency_us = machine.devices[device]
                cards[device] += expert_bytes / gb_s / 1e3 + (0.0 if busy[device] else latency_us)
                busy[device] = True
            # A card that nobody has asked has nothing to wait for.
            ends = [end for end, worked in zip(cards, busy, strict=True) if worked]
            clock = max([cpu if cpu > others else clock, clock, *ends])
        for name, of_layer, n_bytes, device in components:
            if of_layer is None:
                in_run = device is not None and takers[-1] == device
                clock += (
                    n_bytes / machine.devices[device][0] / 1e3 if in_run else machine.matrix_us(name, n_bytes, device)
                )
        total_us += clock
    return total_us / len(tokens)
