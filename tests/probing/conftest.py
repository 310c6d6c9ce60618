"""Probes that take no time and leave nothing in the user's cache."""

from __future__ import annotations

import logging

import pytest

from coli.placement import CpuSpeeds, Speed
from coli.probing import figures, host


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Files go to a folder of this test; nothing that another test has measured is known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    figures._of_objects.clear()
    monkeypatch.setattr(logging.getLogger("coli"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("coli"), "propagate", True)
    return tmp_path / "cache" / "coli" / "probe"


@pytest.fixture
def measured_cpus(monkeypatch):
    """The teams whose CPU was measured, as numbers of threads; each gets the same figures."""
    teams = []

    def measure_cpu(beside):
        teams.append(beside.team.n_threads)
        return CpuSpeeds(Speed(40), Speed(30), 2.0, 5.0, 25.0), 45.0

    monkeypatch.setattr(host, "measure_cpu", measure_cpu)
    return teams
