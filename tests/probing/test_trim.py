"""coli/probing/trim.py: what measuring has taken is nobody's any more when it is over."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
from probing.timed import TimedCard

from coli.devices.base import DeviceError
from coli.placement import CpuSpeeds, Speed, Speeds
from coli.probing import cards, figures, host, machine_figures

CODE = """
import numpy as np
from coli.probing.trim import give_memory_back


def anonymous_mib():
    with open("/proc/self/status") as status:
        (kib,) = (line.split()[1] for line in status if line.startswith("RssAnon"))
    return int(kib) / 1024


def block(kib):
    return np.ones(kib << 10, np.uint8)


before = anonymous_mib()
block(16 << 10)  # when it is freed, blocks of its size and less are the heap's from then on
samples = [(block(8 << 10), block(256)) for _ in range(12)]
kept = [small for _, small in samples]
del samples
print(anonymous_mib() - before)
give_memory_back()
print(anonymous_mib() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps what is freed")
def test_freed_memory_below_a_small_block_is_the_systems_again():
    """In a process of its own: 96 MiB that were freed stay in its heap until they are given back."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    held, left = map(float, done.stdout.split())
    assert held > 48 and left < 16


@pytest.mark.parametrize("fails", [False, True])
def test_memory_is_given_back_behind_every_measurement(monkeypatch, fails):
    """Once behind the CPU's samples and once behind a card's, also where that card did not answer."""
    order = []

    def measure_cpu(beside):
        order.append("cpu")
        return CpuSpeeds(Speed(40), Speed(30)), 45.0

    def measure_card(device, beside, cpu):
        order.append("card")
        if fails:
            raise DeviceError("gone", "lost")
        return Speeds(Speed(900, 9), Speed(500, 12)), 8.0, 0.5

    monkeypatch.setattr(host, "measure_cpu", measure_cpu)
    monkeypatch.setattr(cards, "measure_card", measure_card)
    monkeypatch.setattr(figures, "give_memory_back", lambda: order.append("given back"))
    found = machine_figures([TimedCard()], 1, anyway=True)
    assert (found is None) == fails
    assert order == ["cpu", "given back", "card", "given back"]
