"""coli.cli.figures: verbs that plan without loading plan with the team that a load would have."""

from __future__ import annotations

import json
import os

import pytest

from coli.cli import figures
from coli.container.reader import Container
from coli.convert.resolve import find_model
from coli.devices.fake import FakeDevice
from coli.threads.limits import local_machine
from coli.threads.tuning import Profile, geometry_key, machine_fingerprint, save_profile


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: a profile can choose nothing")
def test_team_is_the_one_that_was_tuned(monkeypatch, tmp_path):
    """What `coli tune` found for a model counts here as it does when the model is loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("COLI_THREADS", "OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND"):
        monkeypatch.delenv(name, raising=False)
    teams = []
    monkeypatch.setattr("coli.probing.machine_figures", lambda devices, n, cpus, isa, **more: teams.append((n, cpus)))
    figures.figures_beside([FakeDevice(1 << 20)], "demo")
    with Container.open(find_model("demo")) as container:
        formats = container.manifest.trunk_format, container.manifest.expert_format
        key = geometry_key(container.config, formats)
    topology, limits = local_machine()
    cpu = sorted(limits.allowed)[-1]
    machine = machine_fingerprint(topology, limits)
    save_profile(Profile(machine, key, (cpu,), "one", 1.5, "by hand", {}, "a CPU", "2026-11-30"))
    figures.figures_beside([FakeDevice(1 << 20)], "demo")
    assert teams[0] != teams[1] == (1, [cpu])


def test_config_of_sizes_alone_is_planned_for_without_a_profile(tmp_path):
    """`coli plan config.json` needs less of it than a model does."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3_5_moe_text"}))
    assert figures.known_model(str(path)) is None
    path.write_text((find_model("demo") / "config.json").read_text())
    assert figures.known_model(str(path)) is not None
