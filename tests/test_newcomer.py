"""What a newcomer tripped over: each of these crashed, hung, or went on in silence."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import coli
from coli.errors import RequestError


def run(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "coli", *args], capture_output=True, text=True, timeout=60)


def test_plan_by_time_that_ends_with_off_prints_a_plan():
    """A card too small for anything leaves auto:time with off, which is a plan like another."""
    result = run("plan", "demo", "--device", "a=1MiB:448:10", "--cpu", "40")
    assert result.returncode == 0, result.stderr
    assert "ms/token" in result.stderr


@pytest.mark.parametrize("threads", ["1025", "2000", "99999999999999999999", "0", "-1", "x"])
def test_threads_beyond_the_team_are_refused_at_once(threads):
    """A number of threads that no team has is one line naming the flag and the range."""
    result = run("run", "demo", "Once", f"--threads={threads}")
    assert result.returncode == 2
    assert "--threads" in result.stderr and "1 to 1024" in result.stderr and "Traceback" not in result.stderr


def test_heat_named_by_hand_and_unreadable_is_an_error(tmp_path):
    """--heat with a file that is no heat ends with status 2; a folder that is missing is not made."""
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    for path in (bad, tmp_path / "missing" / "heat.json"):
        result = run("run", "demo", "Once", "--max-tokens", "1", "--devices", "fake:4MiB", "--heat", str(path))
        assert result.returncode == 2, (path, result.stderr)
        assert path.name in result.stderr
    assert not (tmp_path / "missing").exists()


def test_prompt_of_the_wrong_type_and_session_of_another_model_are_refused():
    """Bytes are no prompt, and a session goes with the model that made it."""
    with coli.load("demo", devices="none", threads=1) as a, coli.load("demo", devices="none", threads=1) as b:
        for prompt in (b"hi", None, 5, {"a": 1}):
            with pytest.raises(RequestError, match="prompt"):
                a.generate(prompt, max_tokens=1)
        with pytest.raises(RequestError, match="another model"):
            a.generate("hi", max_tokens=1, session=b.session())


def test_dir_shows_what_the_package_offers():
    """Completion in a shell finds load and Model before they are imported."""
    assert {"load", "Model", "ColiError"} <= set(dir(coli))


def test_tune_show_and_forget_contradict():
    """--show must never delete."""
    result = run("tune", "--show", "--forget")
    assert result.returncode == 2 and "--forget" in result.stderr


def test_checkout_that_was_not_built_says_so(tmp_path):
    """Beside an installed coli the folder's own comes first: one line, and not a circular import."""
    without_binaries = shutil.ignore_patterns("*.so", "__pycache__", "data")
    shutil.copytree(Path(coli.__file__).parent, tmp_path / "coli", ignore=without_binaries)
    done = subprocess.run([sys.executable, "-c", "import coli._core"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: coli is not built in {tmp_path}: pip install -e .")
