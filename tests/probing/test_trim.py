"""coli/probing/trim.py: what measuring has taken is nobody's any more when it is over."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

CODE = """
from coli.devices.fake import FakeDevice
from coli.probing import cards, host, machine_figures


def anonymous_mib():
    with open("/proc/self/status") as status:
        (kib,) = (line.split()[1] for line in status if line.startswith("RssAnon"))
    return int(kib) / 1024


before = anonymous_mib()
assert machine_figures([FakeDevice(256 << 20)], 1, anyway=True) is not None
print(anonymous_mib() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps what is freed")
def test_memory_of_the_samples_is_the_systems_again(tmp_path):
    """In a process of its own: samples are 100 to 200 MB that would stay in the heap for as long as it runs."""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 40
