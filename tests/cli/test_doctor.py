"""coli/cli/doctor.py: what limits, what is advised; the acceptance cases on described machines."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
from devices.cuda.fakes import FakeDriver, FakeNvml, install

from coli.cli import doctor
from coli.cli.doctor import examine
from coli.cli.doctor_cards import card_findings
from coli.cli.main import main
from coli.devices.cuda.probe import Card, Reason, Survey, list_devices
from coli.errors import ColiError
from coli.threads.memory import Memory

DATA = Path(__file__).parent.parent / "data"
CASES = json.loads((DATA / "swapped_cards.json").read_text())
ONE = CASES["runtime_order"][:1]
OLD = [{**ONE[0], "compute": "6.1"}]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the tester's own."""
    for name in ("COLI_THREADS", "COLI_ISA", "OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY"):
        monkeypatch.delenv(name, raising=False)


def findings(report: doctor.Report) -> str:
    return "\n".join(f"{text} -> {advice}" for text, advice in report.findings)


# --- the cases


def test_doctor_prints_visible_allowed_and_quota_cpus_and_what_limits():
    """C08: 8 visible, 8 allowed, quota 4, default 4 threads, and the file that limits."""
    report = examine(machine=DATA / "cgroup" / "v2_quota_4_of_8")
    assert "CPUs: 8 visible, 8 allowed (0-7), quota 4 CPUs" == report.lines["limits"][0]
    assert 4 == report.facts["threads"]["threads"]
    assert "limited by the quota 4 CPUs (cpu.max 400000/100000)" in findings(report)


def test_doctor_warns_once_about_more_threads_than_the_quota():
    """C08: a count above the quota is obeyed with one warning."""
    report = examine(machine=DATA / "cgroup" / "v2_quota_4_of_8", threads="8")
    assert 8 == report.facts["threads"]["threads"]
    assert 1 == findings(report).count("--threads=8 is above the quota")


@pytest.mark.parametrize(
    ("name", "cpus", "chosen"),
    [
        ("smt_adjacent_4c", "0-3", [0, 2]),
        ("smt_split_12c", "0-11", list(range(12))),
        ("smt_split_12c", "0-23", list(range(12))),
    ],
)
def test_doctor_counts_physical_cores_of_the_mask(name, cpus, chosen):
    """C09: 2, 12 and 12 threads on distinct cores."""
    report = examine(machine=DATA / "topo" / f"{name}.csv", cpus=cpus)
    assert chosen == list(report.facts["threads"]["cpus"])


def test_doctor_warns_about_proc_bind_without_places(monkeypatch):
    """C09: with OMP_PROC_BIND=close alone the map that it would make is shown, and OMP_PLACES=cores advised."""
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    report = examine(machine=DATA / "topo" / "smt_adjacent_4c.csv", cpus="0-3")
    assert "would put 2 threads on 1 of 2 cores (CPUs 0-1)" in findings(report)
    assert "-> set OMP_PLACES=cores" in findings(report)


def test_doctor_names_both_core_classes():
    """C10: both classes are named, with their numbers, and coli tune is advised."""
    report = examine(machine=DATA / "topo" / "hybrid_8p16e.csv")
    assert "8 cores at 5600 MHz, 16 cores at 4300 MHz" == report.lines["cpu"][1]
    assert 8 == report.facts["threads"]["threads"]
    assert "coli tune" in findings(report)


def test_doctor_reports_nodes(tmp_path):
    """C12: both memory nodes are listed with their CPUs, and what coli does about them."""
    path = tmp_path / "two.csv"
    path.write_text("0,0,0,0,\n1,1,0,0,\n2,2,1,1,\n3,3,1,1,\n")
    report = examine(machine=path)
    assert ["node 0: CPUs 0-1, memory unknown", "node 1: CPUs 2-3, memory unknown"] == report.lines["nodes"]
    assert "2 memory nodes -> coli interleaves" in findings(report)


# --- the rest


def test_doctor_on_this_machine_prints_json_and_no_more(capsys):
    """The whole verb: exit status 0, one JSON object on standard output with every section that needs no model."""
    assert 0 == main(["doctor", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert {
        "version",
        "cpu",
        "kernels",
        "limits",
        "threads",
        "memory",
        "nodes",
        "read",
        "cards",
        "settings",
        "findings",
    } == set(facts)
    assert facts["read"]["read_gb_s"] > 0.1
    assert facts["threads"]["threads"] == len(facts["threads"]["map"])


def test_doctor_text_has_a_line_for_each_section(capsys):
    """For a person: each section once, then the findings with their advice."""
    assert 0 == main(["doctor", "--machine", str(DATA / "topo" / "hybrid_8p16e.csv")])
    lines = capsys.readouterr().out.splitlines()
    assert ["cpu", "kernels", "limits", "threads", "nodes", "settings"] == [
        line.split()[0] for line in lines[1:] if line[:1].isalpha() and not line.startswith("node ")
    ]
    assert "1 finding" in lines
    assert lines[-1].startswith("  -> ")


def test_doctor_names_unknown_and_malformed_settings(monkeypatch):
    """Every setting with value and source; an unknown COLI_* variable and a malformed one are findings."""
    monkeypatch.setenv("COLI_THREAD", "4")
    monkeypatch.setenv("COLI_CONTEXT", "many")
    monkeypatch.setenv("COLI_VRAM", "6GiB")
    report = examine(machine=DATA / "topo" / "smt_adjacent_4c.csv")
    assert "COLI_THREAD is not a setting" in findings(report)
    assert "COLI_CONTEXT='many'" in findings(report)
    by_name = {row["name"]: (row["value"], row["source"]) for row in report.facts["settings"]}
    assert (6 << 30, "COLI_VRAM") == by_name["vram"]
    assert (None, "malformed") == by_name["context"]
    assert "vram=6442450944 (COLI_VRAM)" in report.lines["settings"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cpus": "0"}, "--cpus goes with --machine"),
        ({"machine": Path("/nonexistent/table.csv")}, "no such file"),
        ({"machine": DATA / "topo" / "smt_adjacent_4c.csv", "cpus": "a"}, "CPU list"),
        ({"machine": DATA / "topo" / "smt_adjacent_4c.csv", "cpus": "99"}, "none of these"),
        ({"machine": DATA / "topo" / "smt_adjacent_4c.csv", "threads": "0"}, "--threads"),
    ],
)
def test_doctor_wrong_usage_is_one_error(arguments, message):
    """Arguments that make no sense are errors that name them."""
    with pytest.raises(ColiError, match=message):
        examine(**arguments)


def test_doctor_memory_of_a_described_machine_names_the_cgroup_limit(tmp_path):
    """A cgroup's memory limit and swap in use are findings; file pages do not count as used."""
    files = {
        "sys/devices/system/cpu/online": "0-1",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        "sys/fs/cgroup/a/memory.max": str(8 << 30),
        "sys/fs/cgroup/a/memory.current": str(6 << 30),
        "sys/fs/cgroup/a/memory.stat": f"anon 1\nfile {4 << 30}",
        "proc/self/cgroup": "0::/a",
        "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
        "proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 10485760 kB\nSwapTotal: 4194304 kB\nSwapFree: 2097152 kB",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    report = examine(machine=tmp_path)
    assert (6 << 30, "madvise") == (report.facts["memory"]["usable_bytes"], report.facts["memory"]["thp"])
    assert "limits memory to 8.0 GiB of 16.0 GiB" in findings(report)
    assert "2.0 GiB are swapped out" in findings(report)


def test_doctor_adds_up_the_caches_of_a_level_and_kind(tmp_path):
    """Two sockets, and cores of two kinds: what all caches of a level hold, not what the last one does."""
    caches = {
        (0, 0): (2, "Unified", "2048K", "0"), (1, 0): (2, "Unified", "4096K", "1"),
        (0, 1): (3, "Unified", "32768K", "0"), (1, 1): (3, "Unified", "32768K", "1"),
    }  # fmt: skip
    folder = tmp_path / "sys/devices/system/cpu"
    for (cpu, index), texts in caches.items():
        here = folder / f"cpu{cpu}/cache/index{index}"
        here.mkdir(parents=True)
        for name, text in zip(("level", "type", "size", "shared_cpu_list"), texts, strict=True):
            (here / name).write_text(f"{text}\n")
    (folder / "online").write_text("0-1\n")
    found = examine(machine=tmp_path).facts["cpu"]["cache_bytes"]
    assert {"L2 Unified": 6 << 20, "L3 Unified": 64 << 20} == found


# --- cards


def card(**changes) -> Card:
    facts = {"index": 0, "cuda_ordinal": 0, "name": "Card", "uuid": "GPU-0", "pci_bus_id": "0000:01:00.0",
             "total_bytes": 8 << 30, "free_bytes": 7 << 30, "capability": (8, 6), "driver": "580.1"}  # fmt: skip
    return Card(**{**facts, **changes})


@pytest.mark.parametrize(
    ("cards", "nvml_reason", "text"),
    [
        ([card()], None, ""),
        ([card(reason=Reason("old"))], None, "not used: Card (0000:01:00.0): old"),
        ([card(reason=Reason("old")), card(index=1, cuda_ordinal=1, reason=Reason("old"))], None, "00.0): old"),
        ([card(cuda_ordinal=1), card(index=1, cuda_ordinal=0)], None, "number the cards differently"),
        ([card(), card(index=1, cuda_ordinal=None, name="Hidden", reason=Reason("not shown"))], None, "Hidden"),
        ([card(free_bytes=None)], Reason("nvidia-ml-py is not installed"), "cards have CUDA's numbers"),
        ([], Reason("nvidia-ml-py is not installed"), ""),
    ],
)
def test_card_fault_is_one_finding(cards, nvml_reason, text):
    """Each thing that keeps cards from being used is one finding, and a good card none."""
    found = card_findings(Survey(tuple(cards), None, nvml_reason))
    assert (len(found) == 1 and text in found[0][0]) if text else not found


def test_card_reason_carries_its_advice():
    """What stands behind "; " is the advice, and what has none says that coli goes on."""
    found = [card(reason=Reason("no compiler; pip install one")), card(reason=Reason("too old"))]
    assert [
        ("not used: Card (0000:01:00.0): no compiler", "pip install one"),
        ("not used: Card (0000:01:00.0): too old", "coli goes on without it"),
    ] == card_findings(Survey(tuple(found), found[0].reason, None))


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch):
    """``nvidia(driver, nvml)`` puts stand-ins in the place of the NVIDIA packages, None: not installed."""
    pytest.importorskip("cuda.bindings")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")  # so that what coli sets is taken back
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda driver, nvml: install(monkeypatch, driver, nvml)


def cards_report() -> doctor.Report:
    """The section of the cards alone."""
    report = doctor.Report()
    doctor._cards(report)
    json.dumps(report.facts)
    return report


def test_cards_are_listed_in_both_orders_joined_by_uuid(monkeypatch, nvidia):
    """C07: name, free bytes and both numbers of a line belong to one card."""
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    nvidia(FakeDriver(CASES["runtime_order"]), FakeNvml(CASES["management_order"], release=b"580.159"))
    report = cards_report()
    for found in report.facts["cards"]["cards"]:
        assert CASES["expect"][f"management {found['index']}"] == found["uuid"]
        assert CASES["expect"][f"runtime {found['cuda_ordinal']}"] == found["uuid"]
        told = next(one for one in CASES["management_order"] if one["uuid"] == found["uuid"])
        assert (told["name"], told["free"], told["pci"]) == (found["name"], found["free_bytes"], found["pci_bus_id"])
    assert (
        "0 (CUDA 1): Card B (slow, 8 GiB), GPU-bbbbbbbb-0000-0000-0000-000000000002, 0000:21:00.0, 5.1 of 8.0 GiB "
        "free, driver 580.159, capability 7.5; usable"
    ) == report.lines["cards"][0]
    assert "number the cards differently" in findings(report)


def test_cards_are_numbered_as_coli_will_number_them(nvidia):
    """Without an order of the user's, doctor sees the one that coli sets: no finding about it, and the same numbers."""

    class Ordered(FakeDriver):
        def cuInit(self, flags):
            self.cards = CASES["management_order" if os.environ.get("CUDA_DEVICE_ORDER") else "runtime_order"]
            return super().cuInit(flags)

    nvidia(Ordered(), FakeNvml(CASES["management_order"]))
    report = cards_report()
    told = [(one["cuda_ordinal"], one["uuid"]) for one in report.facts["cards"]["cards"]]
    assert [(device.card.cuda_ordinal, device.uuid) for device in list_devices()] == told
    assert [] == report.findings


@pytest.mark.parametrize(
    ("driver", "nvml", "line", "finding"),
    [
        (None, None, "none: cuda-python is not installed", ""),
        (None, FakeNvml(ONE), "cuda-python is not installed", "-> pip install 'coli[cuda]'"),
        (FakeDriver(init=100), FakeNvml(broken=True), "none: no card", ""),
        (FakeDriver(init=100), None, "none: no card", ""),
        (FakeDriver(ONE, version=12080), FakeNvml(ONE), "offers CUDA 12.8; driver 580", "-> driver 580 or newer is"),
        (FakeDriver(ONE, version=12080), None, "none: the NVIDIA driver offers CUDA 12.8", ""),
        (FakeDriver(OLD), FakeNvml(OLD), "compute capability 6.1, 7.5 is the least that works", "goes on without it"),
        (FakeDriver(ONE), None, "? of 8.0 GiB free, driver CUDA 13.0, capability 8.6; usable", "have CUDA's numbers"),
        (FakeDriver(ONE), FakeNvml(broken=True), "capability 8.6; usable", "NVML does not answer (Driver Not Loaded)"),
    ],
)
def test_cards_that_cannot_be_used_say_why(nvidia, driver, nvml, line, finding):
    """No package or driver, too old a driver or card, no NVML: a line says so, and a finding where there is a card."""
    nvidia(driver, nvml)
    report = cards_report()
    assert line in report.lines["cards"][0]
    assert finding in findings(report) if finding else not report.findings


# --- a model


def test_doctor_on_a_model_checks_it_and_lets_it_decode(make_container):
    """Files, formats, bytes per token, where its pages lie, and its decode beside the read bandwidth."""
    folder = make_container("tiny-textonly")
    report = examine(str(folder))
    assert str(folder) == report.facts["model"]["path"]
    assert 0 < report.facts["model"]["bytes_per_token"] < report.facts["model"]["bytes"]
    assert report.facts["read"]["decode_tok_s"] > 0
    assert "the model's pages that are in memory" in report.lines["nodes"][-1]


def test_doctor_says_what_was_checked_of_a_model(make_container, tmp_path):
    """A flipped bit is beyond sizes and shapes: the line says so, and what finds it."""
    folder = Path(shutil.copytree(make_container("tiny-random"), tmp_path / "a model"))
    path = folder / "model-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    report = doctor.Report()
    container = doctor._model(report, str(folder), Memory(0, 0, 0, 0))
    container.close()
    assert "every file has its size and every tensor its shape" in report.lines["model"][1]
    assert f"coli inspect --verify '{folder}' reads every byte" in report.lines["model"][1]
    assert "whole" not in " ".join(report.lines["model"])


def test_doctor_lets_a_model_choose_its_team_itself(make_container, caplog, monkeypatch):
    """Nobody asked for a number of threads, so no line says that somebody did; who asked is told so."""
    monkeypatch.setattr(logging.getLogger("coli"), "propagate", True)
    caplog.set_level("INFO", "coli.threads")
    folder = str(make_container("tiny-random"))
    report = examine(folder)
    assert "(default: " in caplog.text and "as asked" not in caplog.text
    assert report.facts["read"]["threads"] == report.facts["threads"]["threads"]
    assert examine(folder, threads="1").facts["read"]["threads"] == 1
    assert "1 thread (--threads: as asked)" in caplog.text


def test_doctor_advises_only_what_the_model_can_do(make_container):
    """Without a tokenizer there is no text for --raw."""
    report = model_report(make_container("tiny-random"), Memory(0, 0, 0, 0))
    assert "coli run --ids works" in findings(report) and "--raw" not in findings(report)


def test_doctor_says_when_the_two_templates_differ(tmp_path):
    """C16: both places hold a template, one wins, and the finding says which."""
    from coli.convert.convert import convert

    checkpoint = Path(shutil.copytree(DATA / "fixtures" / "tiny-textonly", tmp_path / "checkpoint"))
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{{ messages[0] }}"}))
    convert(checkpoint, tmp_path / "model")
    found = findings(model_report(tmp_path / "model", Memory(0, 0, 0, 0)))
    assert "hold different templates; chat_template.jinja wins" in found


def test_doctor_says_what_a_model_lacks(make_container):
    """No tokenizer and no template are findings, and so is a memory that is too small."""
    found = findings(model_report(make_container("tiny-random"), Memory(1 << 30, 1 << 12, 0, 0)))
    for text in ("no chat template", "no tokenizer.json", "of memory can be had"):
        assert text in found


def model_report(folder: Path, memory: Memory) -> doctor.Report:
    """The section of a model alone."""
    report = doctor.Report()
    container = doctor._model(report, str(folder), memory)
    assert container is not None
    container.close()
    return report


def test_doctor_names_the_fault_of_a_damaged_container(make_container, tmp_path):
    """A short file is a finding with the file's name, and the rest of the report goes on."""
    folder = Path(shutil.copytree(make_container("tiny-random"), tmp_path / "model"))
    path = folder / "model-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    report = examine(str(folder))
    assert "model-00001.safetensors" in findings(report)
    assert "read_gb_s" in report.facts["read"]


def test_doctor_on_no_model_is_bad_input(tmp_path):
    """A MODEL that is nothing is an error, not a finding."""
    assert 2 == main(["doctor", str(tmp_path / "nothing")])
