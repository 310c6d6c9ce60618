"""``coli bench --calibrate``: predicted beside measured, every run's bits compared."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from coli.cli import calibrate
from coli.cli.main import main
from coli.engine.session import Engine

FAST = ("bench", "demo", "--calibrate", "--threads", "1", "--decode-tokens", "3", "--repeats", "1")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder for what is measured of the CPU here, once for all of these tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache, monkeypatch):
    """Figures go to these tests' own folder; lines to this test's standard error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(logging.getLogger("coli"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("coli"), "propagate", True)


def test_calibrate_prints_a_table_that_ends_with_the_runs_that_were_identical(capsys):
    """The CPU, then off, auto and the list for each allowance, cold and warm; the list in full below."""
    status = main([*FAST, "--devices", "fake:16MiB", "--vram", "6MiB,2MiB", "--place", "dnproj=0,dnout=0,experts=0"])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert lines[-1] == "identical: 7 of 7"
    assert lines[-2] == "list 1: dnproj=0,dnout=0,experts=0"
    assert "predicted tok/s" in lines[0] and "measured tok/s" in lines[0] and "predicted/measured" in lines[0]
    rows = [line.split() for line in lines[1:-2]]
    assert 14 == len(rows)
    assert ["cpu", "cold"] == rows[0][:2] and ["off", "6", "warm"] == rows[3][:3]
    for row in rows:
        predicted, measured, ratio = map(float, row[-6:-3])
        assert predicted > 0 and measured > 0 and ratio == pytest.approx(predicted / measured, abs=0.02)


def test_calibrate_shows_the_memory_that_there_was(capsys):
    """An allowance larger than the device is the device's, once, and a line says so."""
    status = main([*FAST, "--devices", "fake:16MiB", "--vram", "64MiB,32MiB,16MiB", "--place", "lmhead=0"])
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()[1:-2]]
    assert status == 0
    assert {row[1] for row in rows[2:] if row[0] == "off"} == {"16"}
    assert len([row for row in rows if row[0] == "off"]) == 2  # cold and warm
    assert "[calibrate] warning: --vram 64 MiB is more than any device has free; the rows are of 16 MiB" in err


def test_calibrate_json_is_the_whole_record(capsys):
    """Every step's time, the figures that predicted it, and what was compared."""
    status = main([*FAST, "--devices", "fake:16MiB", "--vram", "6MiB", "--place", "lmhead=0", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert status == 0
    assert (4, 4, 1) == (record["runs"], record["identical"], record["calibration"])
    assert {"cpu", "off", "auto", "lmhead=0"} == {row["place"] for row in record["rows"]}
    for row in record["rows"]:
        for stretch in calibrate.STRETCHES:
            assert 3 == len(row[stretch]["step_s"])
            assert row[stretch]["ratio"] == pytest.approx(row[stretch]["predicted_tok_s"] / row[stretch]["tok_s"])
    assert record["probe"]["cpu"]["matrix"]["gb_s"] > 0


def test_calibrate_of_a_run_with_another_bit_says_so(capsys, monkeypatch):
    """One logit of one run that differs in its last bit: that run is not identical, and the status is 1."""
    feed, calls = Engine.feed, []

    def disturbed(self, session, ids, *, every):
        logits = feed(self, session, ids, every=every)
        if self.container.path is not None:  # else it is the probe's
            calls.append(1)
        if len(calls) == 20:  # in the third run
            logits.view(np.uint32)[0, 7] ^= 1
        return logits

    monkeypatch.setattr(Engine, "feed", disturbed)
    status = main([*FAST, "--devices", "fake:16MiB", "--vram", "6MiB", "--place", "lmhead=0"])
    assert (1, "identical: 3 of 4") == (status, capsys.readouterr().out.splitlines()[-1])


def test_calibrate_leaves_out_a_list_that_does_not_fit(capsys):
    """An allowance too small for a list is a line, and the others go on."""
    place = "lmhead=0,dnproj=0,dnout=0,attnproj=0,shexp=0"
    assert 0 == main([*FAST, "--devices", "fake:16MiB", "--vram", "2MiB", "--place", place])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("list 1") and line.endswith("left out: it does not fit") for line in lines)
    assert lines[-1] == "identical: 3 of 3"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--devices", "none"), "there is no card here"),
        (("--devices", "fake:16MiB", "--vram", "6MiB,x"), "--vram"),
        (("--devices", "fake:1MiB"), "could not be measured"),
        (("--devices", "fake:16MiB", "--context", "16"), "do not fit the context of 16"),
        (("--devices", "fake:16MiB", "--place", "dnprj=0"), "dnprj"),
        (("--devices", "fake:16MiB", "--decode-tokens", "600"), "at most 512"),
    ],
)
def test_calibrate_that_cannot_be_is_one_line(capsys, more, says):
    """Exit 2 and what to do."""
    assert 2 == main([*FAST, *more])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("coli: error: ") and says in last
