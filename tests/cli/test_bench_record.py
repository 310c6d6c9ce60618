"""coli/cli/bench_record.py: the machine of a record is the one that doctor and the probe know."""

from __future__ import annotations

from dataclasses import replace

import coli
from coli.cli.bench_record import model_record
from coli.threads import limits


def test_record_names_the_cpu_as_everybody_does(monkeypatch):
    """The topology's name, which boards without "model name" in /proc/cpuinfo have too."""
    topology, found = limits.local_machine()
    with coli.load("demo", threads=1, devices="none") as model:
        monkeypatch.setattr(limits, "local_machine", lambda: (replace(topology, model_name="Test Board 5"), found))
        record = model_record(model, prompt_tokens=4, decode_tokens=1, repeats=1)
    assert record["machine"]["cpu"] == "Test Board 5"
