"""coli/tier/heatfile.py: heat from run to run, shared, checked to the last count (C49)."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from coli.errors import ColiError, RequestError
from coli.tier import heatfile
from coli.tier.heatfile import HISTORY_TOKENS, HeatFile, HeatShape, format_heat, parse_heat, read_heat

DATA = Path(__file__).parent.parent / "data"
SHAPE = HeatShape(layers=2, experts=3, top_k=2, model="tiny")
COUNTS = np.array([[4.0, 2.0, 0.0], [3.0, 3.0, 0.0]])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "heat.json"


def table(**changes):
    return {"layers": 2, "experts": 3, "top_k": 2, "counts": COUNTS.tolist()} | changes


def native(**changes):
    return {"format": "coli heat", "version": 1, "model": "tiny"} | table() | changes


# ---- reading -------------------------------------------------------------------------------------------------


def test_demo_heat_in_plain_json_is_read():
    """The form that other tools write is read as it is."""
    counts = read_heat(DATA / "heat_demo.json", HeatShape(8, 40, 4, model="anything"))
    expected = json.loads((DATA / "heat_demo.json").read_text())
    assert expected["counts"] == counts.tolist()
    assert 4 * expected["tokens"] == counts[0].sum()


def test_heat_of_all_zeros_is_no_heat(path):
    """Nothing counted is the same as nothing known; the file is valid all the same."""
    path.write_text(json.dumps(table(counts=[[0] * 3] * 2)))
    assert read_heat(path, SHAPE) is None
    file = HeatFile(path, SHAPE, by_hand=True)
    assert (file.counts, file.writable) == (None, True)


def test_other_conversion_of_the_same_model_shares_its_heat(path):
    """The model's name is compared only where both know it."""
    path.write_text(json.dumps(native()))
    assert read_heat(path, HeatShape(2, 3, 2)) is not None
    path.write_text(json.dumps(table()))
    assert read_heat(path, SHAPE) is not None


FAULTS = {
    "empty": (b"", "the file is empty"),
    "blank": (b"\n\n", "the file is empty"),
    "cut": (json.dumps(native()).encode()[:-20], "not JSON, or cut off"),
    "binary": (bytes(range(256)), "not JSON"),
    "deep": (b"[" * 5000, "not JSON"),
    "list": (b"[1, 2]", "the top level is no object"),
    "eight_experts": (json.dumps(table(experts=8, counts=[[1] * 8] * 2)).encode(), "experts is 8, the model has 3"),
    "layers": (json.dumps(table(layers=40)).encode(), "layers is 40, the model has 2: it is another model's heat"),
    "top_k": (json.dumps(table(top_k=8)).encode(), "top_k is 8"),
    "no_top_k": (json.dumps({"layers": 2, "experts": 3, "counts": []}).encode(), "top_k is None"),
    "true": (json.dumps(table(layers=True)).encode(), "layers is True"),
    "model": (json.dumps(native(model="other")).encode(), "it is the heat of model 'other', this is 'tiny'"),
    "model_number": (json.dumps(native(model=5)).encode(), "it is the heat of model 5"),
    "version": (json.dumps(native(version=2)).encode(), "format and version are \\('coli heat', 2\\); expected"),
    "format": (json.dumps(native(format="pickle")).encode(), "expected \\('coli heat', 1\\)"),
    "negative": (json.dumps(table(counts=[[1, 2, 3], [1, -2, 3]])).encode(), "layer 1, expert 1: the count is -2"),
    "nan": (json.dumps(table(counts=[[1, 2, float("nan")], [1, 2, 3]])).encode(), "layer 0, expert 2: .* nan"),
    "infinite": (json.dumps(table(counts=[[1, 2, float("inf")], [1, 2, 3]])).encode(), "the count is inf"),
    "huge": (json.dumps(table(counts=[[1e17, 2, 3], [1, 2, 3]])).encode(), "count is 1e\\+17; expected 0 to 2\\*\\*53"),
    "huger": (json.dumps(table(counts=[[10**400, 2, 3], [1, 2, 3]])).encode(), "layer 0, expert 0: the count is 1000"),
    "text": (json.dumps(table(counts=[["1", 2, 3], [1, 2, 3]])).encode(), "the count is '1'"),
    "truth": (json.dumps(table(counts=[[True, 2, 3], [1, 2, 3]])).encode(), "the count is True"),
    "ragged": (json.dumps(table(counts=[[1, 2], [1, 2, 3]])).encode(), "counts of layer 0 is 2 counts; expected 3"),
    "short": (json.dumps(table(counts=[[1, 2, 3]])).encode(), "counts is 1 rows; expected 2"),
    "flat": (json.dumps(table(counts=[1, 2])).encode(), "counts of layer 0 is 1; expected 3"),
    "missing": (json.dumps({"layers": 2, "experts": 3, "top_k": 2}).encode(), "counts is None"),
    "long": (b" " * 80_000 + b"{}", "more than 65,920 bytes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_heat_named_by_hand_is_one_error_and_stays(path, fault):
    """Who names a file gets its fault in one line, and the file untouched."""
    data, message = FAULTS[fault]
    path.write_bytes(data)
    with pytest.raises(RequestError, match=message) as error:
        HeatFile(path, SHAPE, by_hand=True)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert data == path.read_bytes()


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_heat_from_the_usual_place_is_one_warning_and_stays(path, fault, caplog):
    """The run starts cold, and what is not this model's heat is never overwritten."""
    data, message = FAULTS[fault]
    path.write_bytes(data)
    file = HeatFile(path, SHAPE, by_hand=False)
    assert file.counts is None
    assert [logging.WARNING] == [r.levelno for r in caplog.records]
    assert "going on without heat" in caplog.text
    file.merge(COUNTS)
    assert data == path.read_bytes()
    assert [path.name] == os.listdir(path.parent)


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "null"])
def test_what_is_no_file_is_refused_without_waiting(tmp_path, kind):
    """A folder, a pipe nobody writes to, a link in a circle, a name that cannot be: each is an error at once."""
    path = tmp_path / "heat"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    name = "a\0b" if kind == "null" else path
    with pytest.raises(RequestError, match="not a file|cannot be read"):
        read_heat(name, SHAPE)
    if kind != "null":
        with pytest.raises(RequestError):
            HeatFile(path, SHAPE, by_hand=True)


def test_missing_file_starts_cold_and_is_made(path):
    """The first run has no heat; its counts make the file."""
    for by_hand in (True, False):
        file = HeatFile(path, SHAPE, by_hand=by_hand)
        assert file.counts is None
        file.merge(COUNTS)
        assert COUNTS.tolist() == read_heat(path, SHAPE).tolist()
        path.unlink()
    with pytest.raises(RequestError, match="cannot be read: No such file"):
        read_heat(path, SHAPE)


def test_missing_folder_is_an_error_by_hand_and_made_in_the_usual_place(tmp_path):
    """A mistyped folder is said before the first token, not after the last."""
    path = tmp_path / "cache" / "coli" / "heat.json"
    with pytest.raises(RequestError, match="the folder .*coli does not exist"):
        HeatFile(path, SHAPE, by_hand=True)
    HeatFile(path, SHAPE, by_hand=False).merge(COUNTS)
    assert read_heat(path, SHAPE) is not None


# ---- writing -------------------------------------------------------------------------------------------------


def test_merge_adds_to_what_the_file_holds_by_then(path):
    """Another process's counts since our load are kept, and a plain file becomes one of ours."""
    path.write_text(json.dumps(table() | {"tokens": 3}))
    mine, theirs = (HeatFile(path, SHAPE, by_hand=True) for _ in range(2))
    mine.merge(np.ones((2, 3)))
    theirs.merge(2 * np.ones((2, 3)))
    mine.merge(4 * np.ones((2, 3)))
    assert (COUNTS + 7).tolist() == read_heat(path, SHAPE).tolist()
    assert native(counts=(COUNTS + 7).tolist()) == json.loads(path.read_text())


CHILD = """
import sys, numpy as np
from coli.tier.heatfile import HeatFile, HeatShape
file = HeatFile(sys.argv[1], HeatShape(2, 3, 2, "tiny"), by_hand=True)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(40):
    file.merge(np.eye(2, 3))
"""


def test_two_processes_on_one_file_lose_nothing(path):
    """Saves at the same moment wait for each other; every count arrives."""
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for child in children:
        assert "ready\n" == child.stdout.readline()
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    for child in children:
        child.communicate()
        assert 0 == child.returncode
    assert (80 * np.eye(2, 3)).tolist() == read_heat(path, SHAPE).tolist()


def test_threads_on_one_file_lose_nothing(path):
    """Two models in one process are two writers as well."""
    files = [HeatFile(path, SHAPE, by_hand=True) for _ in range(3)]
    threads = [threading.Thread(target=lambda f=f: [f.merge(np.eye(2, 3)) for _ in range(10)]) for f in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (30 * np.eye(2, 3)).tolist() == read_heat(path, SHAPE).tolist()


def test_crash_in_the_middle_of_a_save_leaves_the_old_file(path, monkeypatch):
    """The file is replaced whole: whatever breaks before that changes nothing."""
    file = HeatFile(path, SHAPE, by_hand=True)
    file.merge(COUNTS)
    before = path.read_bytes()
    for name in ("fsync", "replace", "fchmod"):
        with monkeypatch.context() as broken:
            broken.setattr(os, name, lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(RequestError, match="cannot be written: No space left on device"):
                file.merge(COUNTS)
        assert before == path.read_bytes()
        assert {path.name, f".{path.name}.lock"} == set(os.listdir(path.parent))
    file.merge(COUNTS)
    assert (2 * COUNTS).tolist() == read_heat(path, SHAPE).tolist()


def test_file_that_became_something_else_is_not_overwritten(path):
    """A save looks before it writes: a file that is no longer this model's heat stays."""
    file = HeatFile(path, SHAPE, by_hand=True)
    file.merge(COUNTS)
    other = json.dumps(native(model="other")).encode()
    path.write_bytes(other)
    with pytest.raises(RequestError, match="heat of model 'other'"):
        file.merge(COUNTS)
    assert other == path.read_bytes()


def test_stuck_process_does_not_hold_us_for_ever(path, monkeypatch):
    """A lock that is not given back is an error after a while, and the counts are not lost."""
    monkeypatch.setattr(heatfile, "_TURN_S", 0.05)
    file = HeatFile(path, SHAPE, by_hand=True)
    with heatfile._locked(path.with_name(f".{path.name}.lock"), path):
        with pytest.raises(RequestError, match="another process has held"):
            file.merge(COUNTS)
    file.merge(COUNTS)


def test_link_stays_a_link_and_mode_stays(path, tmp_path):
    """Saving through a link writes the file it points to, with the rights it had."""
    real = tmp_path / "elsewhere" / "real.json"
    real.parent.mkdir()
    real.write_text(json.dumps(native()))
    real.chmod(0o640)
    path.symlink_to(real)
    HeatFile(path, SHAPE, by_hand=True).merge(COUNTS)
    assert path.is_symlink()
    assert (2 * COUNTS).tolist() == read_heat(real, SHAPE).tolist()
    assert 0o640 == real.stat().st_mode & 0o777


def test_long_history_is_kept_in_proportion(path):
    """A file remembers so many tokens and no more; below that every count is exact."""
    file = HeatFile(path, SHAPE, by_hand=True)
    few = np.array([[HISTORY_TOKENS - 1.0, HISTORY_TOKENS - 1.0, 0], [HISTORY_TOKENS - 1.0, HISTORY_TOKENS - 1.0, 0]])
    file.merge(few)
    assert few.tolist() == read_heat(path, SHAPE).tolist()
    file.merge(few)
    assert np.allclose(few / (HISTORY_TOKENS - 1) * HISTORY_TOKENS, read_heat(path, SHAPE), atol=1e-3)


@given(st.lists(st.lists(st.integers(0, 2**53), min_size=3, max_size=3), min_size=2, max_size=2))
def test_format_reads_back(rows):
    """What is written is what is read."""
    counts = np.array(rows, np.float64)
    assert counts.tolist() == parse_heat(format_heat(counts, SHAPE), SHAPE, "x").tolist()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*native(), "x"]), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(json.dumps(native()).encode())
@given(
    st.binary(max_size=64)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.tuples(st.sampled_from(sorted(native())), JSON).map(lambda pair: json.dumps(native() | dict([pair])).encode())
)
def test_any_bytes_are_heat_or_a_coli_error(data):
    """Fuzz: every outcome is finite counts of the model's shape, or one clear line."""
    try:
        counts = parse_heat(data, SHAPE, "x")
    except ColiError as error:
        assert "\n" not in str(error)
    else:
        assert (2, 3) == counts.shape and np.isfinite(counts).all() and (counts >= 0).all()
