"""coli/cli/tune.py: measures through coli.load, keeps, shows, forgets; with a model that only pretends."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

import coli
from conftest import FIXTURES
from coli.cli import tune
from coli.cli.main import main
from coli.config import ModelConfig
from coli.errors import ColiError
from coli.threads import limits, tuning
from coli.threads.limits import Limits
from coli.threads.topology import flat_topology, parse_lscpu

SHAPE = tune._shape

CONFIG = SimpleNamespace(
    num_hidden_layers=2, hidden_size=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
    shared_expert_intermediate_size=8, vocab_size=32,
)  # fmt: skip


class PretendModel:
    """Decodes at a speed that depends on its threads; ``loaded`` counts those that were not closed."""

    loaded = 0
    speeds = {}

    def __init__(self, threads: int) -> None:
        self.threads, self.context, self.config = threads, 64, CONFIG
        PretendModel.loaded += 1

    def __enter__(self) -> PretendModel:
        return self

    def __exit__(self, *exc: object) -> None:
        PretendModel.loaded -= 1


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict]:
    """A machine of two cores, whatever this one has, a cache folder, a model; returns the calls of coli.load."""
    calls: list[dict] = []
    topology = flat_topology(2)

    def load(path, **kwargs):
        calls.append(kwargs)
        return PretendModel(kwargs["threads"])

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "COLI_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(coli, "load", load, raising=False)
    monkeypatch.setattr(limits, "local_machine", lambda: (topology, Limits((0, 1), (0, 1))))
    monkeypatch.setattr(tune, "_mask", lambda cpus: tune.contextmanager(lambda: iter([None]))())
    monkeypatch.setattr(tuning, "decode_tok_s", lambda model: PretendModel.speeds[model.threads])
    manifest = SimpleNamespace(trunk_format="i8_group", expert_format="i4_group")
    container = SimpleNamespace(config=CONFIG, manifest=manifest, path=tmp_path, close=lambda: None)
    monkeypatch.setattr(tune, "_open", lambda model: container)
    monkeypatch.setattr(tune, "_shape", lambda model: (CONFIG, ("i8_group", "i4_group")))
    PretendModel.speeds = {1: 15.0, 2: 10.0}
    return calls


def test_tune_keeps_the_faster_team_and_shows_it(world, capsys):
    """A team clearly faster than the default is stored for this machine and geometry; --show prints it unmeasured."""
    assert 0 == main(["tune", "m"])
    assert "1 thread on 0        15.00 tok/s  (15.00 to 15.00)  kept" in capsys.readouterr().out
    assert 1 + 2 * tuning.ROUNDS == len(world)  # the first run is not counted
    assert all("none" == call["devices"] for call in world)
    assert 0 == PretendModel.loaded
    assert 0 == main(["tune", "m", "--show", "--json"])
    (profile,) = json.loads(capsys.readouterr().out)
    assert ([0], 0.5) == (profile["cpus"], round(profile["gain"], 6))
    assert 1 + 2 * tuning.ROUNDS == len(world)


def test_tune_keeps_the_default_where_nothing_is_faster(capsys):
    """Equal teams leave the default."""
    PretendModel.speeds = {1: 10.0, 2: 10.1}
    assert 0 == main(["tune", "m"])
    assert "2 threads on 0-1     10.10 tok/s  (10.10 to 10.10)  kept" in capsys.readouterr().out


def test_tune_prints_an_environment_that_a_shell_takes(world, capsys):
    """--print-env measures once, then prints what is stored; the line is NAME=VALUE words without quotes."""
    assert 0 == main(["tune", "m", "--print-env"])
    line = capsys.readouterr().out
    assert "COLI_THREADS=1 OMP_PLACES={0} OMP_PROC_BIND=close\n" == line
    assert line.split() == shlex.split(line)
    n_loads = len(world)
    assert 0 == main(["tune", "m", "--print-env"])
    assert n_loads == len(world)
    assert line == capsys.readouterr().out


def test_tune_forgets(capsys):
    """--forget removes the profile of the model, or all of the machine."""
    for arguments in (["m", "--forget"], ["--forget"]):
        main(["tune", "m"])
        assert 0 == main(["tune", *arguments])
        capsys.readouterr()
        assert 0 == main(["tune", "--show", "--json"])
        assert [] == json.loads(capsys.readouterr().out)


def test_tune_show_and_forget_convert_nothing(monkeypatch, capsys, tmp_path):
    """A Hugging Face folder is known by its configuration: what is stored for its container is shown and forgotten."""
    monkeypatch.setattr(tune, "_shape", SHAPE)
    checkpoint = FIXTURES / "tiny-random"
    key = tuning.geometry_key(ModelConfig.from_folder(checkpoint), ("i8_row", "i4_group"))
    machine = tuning.machine_fingerprint(*limits.local_machine())
    tuning.save_profile(tuning.Profile(machine, key, (0,), "1 thread on 0", 0.5, "faster", {}, "a CPU", "2026-01-01"))
    before = sorted(tmp_path.rglob("*"))
    assert 0 == main(["tune", str(checkpoint), "--show", "--json"])
    assert [key] == [profile["geometry"] for profile in json.loads(capsys.readouterr().out)]
    assert before == sorted(tmp_path.rglob("*"))
    assert 0 == main(["tune", str(checkpoint), "--forget"])
    assert 0 == main(["tune", str(checkpoint), "--show", "--json"])
    assert [] == json.loads(capsys.readouterr().out)


def test_tune_shape_of_a_checkpoint_is_that_of_its_container(make_container):
    """The profile that a load of the converted model looks for is the one that --show shows of the checkpoint."""
    assert SHAPE(str(FIXTURES / "tiny-random")) == SHAPE(str(make_container("tiny-random")))


def test_tune_stored_team_is_taken_by_the_next_load(tmp_path):
    """What tune keeps is what the next claim of that geometry gets."""
    from coli.threads.claims import claim_threads

    main(["tune", "m"])
    machine = limits.local_machine()
    geometry = tuning.geometry_key(CONFIG, ("i8_group", "i4_group"))
    with claim_threads(geometry=geometry, machine=machine, folder=tmp_path) as claim:
        assert ((0,), "profile") == (claim.binding.cpus, claim.binding.source)
    with claim_threads(machine=machine, folder=tmp_path) as claim:
        assert "default" == claim.binding.source


def test_tune_on_two_nodes_tries_one_node_and_both_and_keeps_the_faster(monkeypatch, capsys):
    """C12: one node alone and interleaving over both are tried, the page cache dropped between; the faster is kept."""
    rows = [(cpu, cpu // 2, cpu // 4, cpu // 4) for cpu in range(8)]  # two nodes of two cores, two siblings each
    topology = parse_lscpu("\n".join(",".join(map(str, row)) + "," for row in rows))
    monkeypatch.setattr(limits, "local_machine", lambda: (topology, Limits(topology.online, topology.online)))
    dropped = []
    monkeypatch.setattr(tune, "_drop_from_cache", dropped.append)
    PretendModel.speeds = {8: 9.0, 4: 10.0, 3: 10.0, 2: 14.0}
    assert 0 == main(["tune", "m"])
    out = capsys.readouterr().out
    assert "2 threads on 0,2" in out
    assert "2 threads on 4,6" in out
    kept = [line for line in out.splitlines() if line.endswith("kept")]
    assert ["2 threads on 0,2"] == [line.split("  ")[0] for line in kept]
    assert dropped


def test_tune_without_model_is_wrong_usage():
    """There is nothing to measure without a model."""
    with pytest.raises(ColiError, match="needs a MODEL"):
        tune.run(SimpleNamespace(model=None, show=False, forget=False, print_env=False, json=False))


def test_tune_under_the_users_places_is_refused(monkeypatch):
    """With OMP_PLACES set no place could be tried."""
    monkeypatch.setenv("OMP_PLACES", "cores")
    assert 2 == main(["tune", "m"])


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity mask")
def test_tune_mask_is_given_back_after_a_failure(monkeypatch):
    """Whatever a run does, the main thread keeps its mask."""
    monkeypatch.undo()
    before = os.sched_getaffinity(0)
    with pytest.raises(ValueError), tune._mask([min(before)]):
        assert {min(before)} == os.sched_getaffinity(0)
        raise ValueError
    assert before == os.sched_getaffinity(0)
