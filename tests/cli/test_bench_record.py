"""coli/cli/bench_record.py: the machine of a record is the one that doctor and the probe know."""

from __future__ import annotations

from dataclasses import replace

import pytest

import coli
from coli.cli.bench import _read_line
from coli.cli.bench_record import compare, model_record
from coli.threads import limits


def test_record_names_the_cpu_as_everybody_does(monkeypatch):
    """The topology's name, which boards without "model name" in /proc/cpuinfo have too."""
    topology, found = limits.local_machine()
    with coli.load("demo", threads=1, devices="none") as model:
        monkeypatch.setattr(limits, "local_machine", lambda: (replace(topology, model_name="Test Board 5"), found))
        record = model_record(model, prompt_tokens=4, decode_tokens=1, repeats=1)
    assert record["machine"]["cpu"] == "Test Board 5"
    assert record["results"]["decode"]["last_caches_bytes"] == topology.last_caches_bytes
    assert record["results"]["decode"]["n_bytes"] > 1 << 20


@pytest.mark.parametrize(
    ("caches", "expected"),
    [
        (2_000_000, "memory           30.0 GB/s    60 % of the 50.0 GB/s that 2 threads read"),
        (0, "memory           30.0 GB/s    60 % of the 50.0 GB/s that 2 threads read"),  # not known
        (
            4_000_000,
            "weights          30.0 GB/s    60 % of the 50.0 GB/s that 2 threads read of these 8.0 MB; "
            "with 4.0 MB of caches that is not the memory's speed",
        ),
    ],
)
def test_row_of_weights_that_caches_hold_is_not_called_memory(caches, expected):
    """The ruler reads the same bytes again and again; under a few times the caches that measures caches."""
    decode = {"gb_s": 30.0, "read_gb_s": 50.0, "ratio": 0.6, "n_bytes": 8_000_000, "last_caches_bytes": caches}
    assert _read_line(decode, 2) == expected


def record_of(*seconds: float) -> dict:
    return {"record": 1, "results": {"decode": {"tok_s": 10 / seconds[0], "seconds": list(seconds)}}}


def test_compare_of_single_repeats_says_that_they_have_no_spread():
    """A change of 50 % beside "a spread of 0 %" looked certain; with repeats on both sides the spread is given."""
    assert "one repeat has no spread, so noise cannot be told from a change" in compare(record_of(1), record_of(2, 2))
    assert "+100.0 %; repeats spread by 10 %)" in compare(record_of(1, 1.05, 0.95), record_of(0.5, 0.5, 0.5))
