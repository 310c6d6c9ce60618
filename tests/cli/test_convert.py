"""``coli convert``: statuses, streams, one line for every fault."""

from __future__ import annotations

import json
import logging

import checkpoints
import pytest

from coli.cli.main import main
from coli.container.reader import Container


@pytest.fixture(autouse=True)
def fresh_log(monkeypatch):
    """The tagged lines go to this test's standard error, not to the one that the first test of the process had."""
    monkeypatch.setattr(logging.getLogger("coli"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("coli"), "propagate", True)


def test_convert_prints_the_container_and_says_the_rest_on_standard_error(tmp_path, capsys):
    """Standard output is the path; counts, bytes read, peak memory and the report are tagged lines."""
    src = checkpoints.write(tmp_path / "hf", "with_mtp_visual")
    assert main(["convert", str(src), str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'out'}\n"
    for said in (
        "left out: 3 mtp tensors, 82,048 bytes",
        "left out: 1 visual tensors",
        "(100.0 %)",
        "peak memory",
        "worst: ",
    ):
        assert said in err
    assert all(line.startswith("[load] ") for line in err.splitlines())
    with Container.open(tmp_path / "out"):
        pass


def test_convert_json_is_one_object(tmp_path, capsys):
    """What was done, for scripts."""
    src = checkpoints.write(tmp_path / "hf")
    assert (
        main(["convert", str(src), str(tmp_path / "out"), "--expert-bits", "4", "--expert-scales", "row", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert (found["trunk_format"], found["expert_format"]) == ("i8_row", "i4_row")
    assert found["source_bytes_read"] == found["source_bytes"] and found["peak_rss_bytes"] > 1 << 20
    assert found["report"]["formats"]["i4_row"]["rows"] == 4 * 8 * (32 + 32 + 64)


@pytest.mark.parametrize(
    ("variant", "flags", "expected"),
    [
        ("nan_norm", [], "norm.weight holds a value that is NaN or infinite"),
        ("truncated_shard", [], "is cut off: its header says"),
        ("unknown_tensor", [], "mystery.weight is unknown"),
        ("nested", ["--trunk-bits", "16"], "16 bits is the unquantised reference path"),
        ("nested", ["--expert-bits", "3"], "invalid choice"),
        ("nested", ["--expert-scales", "row", "--expert-bits", "8"], "only for --expert-bits 4"),
    ],
)
def test_convert_that_cannot_be_is_status_2_and_one_line(tmp_path, capsys, variant, flags, expected):
    """One line that names the fault, no traceback, nothing written."""
    src = checkpoints.write(tmp_path / "hf", variant)
    try:
        status = main(["convert", str(src), str(tmp_path / "out"), *flags])
    except SystemExit as exit:
        status = exit.code
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("[load]")]
    assert status == 2 and out == "" and len(lines) == 1 and expected in lines[0]
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_convert_of_a_container_is_refused(make_container, tmp_path, capsys):
    """A container is no source: weights are quantised once."""
    assert main(["convert", str(make_container("tiny-random")), str(tmp_path / "out")]) == 2
    assert "a container already" in capsys.readouterr().err
