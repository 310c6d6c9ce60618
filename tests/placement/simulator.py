"""A machine that plays tokens: every step of every layer with its own clock, from nothing but plain numbers.

It knows no plan and no price (a test holds that it imports nothing of coli): it is told where each matrix and each
expert lies, draws what a router would choose, and lets the executors run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

STEPS = {"lmhead": 1, "dnproj": 1, "dnout": 1, "attnproj": 2, "shexp": 1}


@dataclass(frozen=True)
class Machine:
    """gb_s and latency_us of each device, gb_s of the CPU."""

    cpu_gb_s: float
    devices: Sequence[tuple[float, float]]

    def matrix_us(self, name: str, n_bytes: float, device: int | None) -> float:
        """One component by itself."""
        if device is None:
            return n_bytes / self.cpu_gb_s / 1e3
        gb_s, latency_us = self.devices[device]
        return STEPS[name] * latency_us + n_bytes / gb_s / 1e3


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
) -> float:
    """Microseconds of a token, on average.

    components : (name, layer, bytes, device).   owner_of : (layer, expert) -> device, for those in VRAM.
    """
    total_us = 0.0
    for token in tokens:
        clock = 0.0
        for layer, chosen in enumerate(token):
            for name, of_layer, n_bytes, device in components:
                if of_layer == layer and name != "shexp":
                    clock += machine.matrix_us(name, n_bytes, device)
            cpu, cards = clock, [clock] * len(machine.devices)
            busy = [False] * len(cards)
            for name, of_layer, n_bytes, device in components:
                if of_layer == layer and name == "shexp":
                    if device is None:
                        cpu += machine.matrix_us(name, n_bytes, None)
                    else:
                        cards[device] += machine.matrix_us(name, n_bytes, device)
                        busy[device] = True
            for expert in chosen:
                device = owner_of.get((layer, expert))
                if device is None:
                    cpu += cpu_expert_bytes / machine.cpu_gb_s / 1e3
                    continue
                gb_s, latency_us = machine.devices[device]
                cards[device] += expert_bytes / gb_s / 1e3 + (0.0 if busy[device] else latency_us)
                busy[device] = True
            clock = max(cpu, *cards) if cards else cpu
        for name, of_layer, n_bytes, device in components:
            if of_layer is None:
                clock += machine.matrix_us(name, n_bytes, device)
        total_us += clock
    return total_us / len(tokens)
