"""The demo model that ships with the package: what it says, and how well it predicts text it never saw."""

from __future__ import annotations

import json
import subprocess
import sys

import coli
from conftest import DATA


def run(*args: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "coli", *args], capture_output=True, text=True, **options)


def test_demo_continues_the_sentence_of_the_readme():
    """`coli run demo` answers offline, on standard output, with the same text each time."""
    prompt = "It is a truth universally acknowledged, that"
    first, second = (run("run", "demo", prompt, "--max-tokens", "24") for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert len(first.stdout.split()) > 10 and first.stdout == second.stdout
    assert "[threads]" in first.stderr and "[threads]" not in first.stdout


def test_demo_perplexity_is_within_0_7_percent_of_float32():
    """int8 trunk and int4 experts cost at most 0.7 % of the recorded float32 perplexity, 24.0894."""
    result = run("eval", "demo", "--text", str(DATA / "heldout.txt"), "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["tokens"] == 19931
    assert abs(found["perplexity"] / 24.0894 - 1) < 0.007


def test_demo_answers_a_chat():
    """The template ships with the container, and an answer comes as content."""
    with coli.load("demo") as model:
        answer = model.chat([{"role": "user", "content": "Say hello."}], max_tokens=48)
        text = "".join(answer)
    assert text == answer.content and answer.finish_reason in ("stop", "length")
