"""coli/threads/trim.py: freed pages are the system's again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CODE = """
import numpy as np
from coli.threads.trim import return_free_pages


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
return_free_pages()
print(anonymous_mib() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps what is freed")
def test_freed_memory_below_a_small_block_is_the_systems_again():
    """In a process of its own: 96 MiB that were freed stay in its heap until they are given back."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    held, left = map(float, done.stdout.split())
    assert held > 48 and left < 16
