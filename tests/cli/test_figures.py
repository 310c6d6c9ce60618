"""coli.cli.figures: verbs that plan without loading plan with the team that a load would have."""

from __future__ import annotations

import json
import os

import pytest
from conftest import FIXTURES

from coli.cli import figures
from coli.container.reader import Container
from coli.convert.resolve import find_model
from coli.devices.fake import FakeDevice
from coli.threads.limits import local_machine
from coli.threads.tuning import Profile, geometry_key, machine_fingerprint, save_profile


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: a profile can choose nothing")
def test_team_is_the_one_that_was_tuned(monkeypatch, tmp_path):
    """What `coli tune` found for a model counts here as it does when the model is loaded."""
    for name in ("XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):  # no profile, and no engine of another test that holds CPUs
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
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


def test_gguf_file_is_planned_for_as_its_container_is(capsys, tmp_path):
    """The same table to the byte, what runs of layers take of a card included; no weight is read."""
    pytest.importorskip("gguf")
    from convert import gguf_writer

    from coli.cli.main import main

    file = gguf_writer.write(FIXTURES / "tiny-textonly", tmp_path / "tiny.gguf", "BF16")
    container = tmp_path / "tiny.coli"
    assert 0 == main(["convert", str(file), str(container)])
    capsys.readouterr()
    tables = []
    for model in (file, container):
        assert 0 == main(["plan", str(model), "--device", "A=32GiB", "--context", "2048", "--json"])
        tables.append(json.loads(capsys.readouterr().out)["devices"])
    assert tables[0] == tables[1]
    assert figures.known_model(str(file)).config.hidden_size
