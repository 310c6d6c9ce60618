"""coli eval: the perplexity of a text."""

from __future__ import annotations

import json
import math

import numpy as np


def test_eval_prints_tokens_nll_and_perplexity(cli, capsys, tmp_path):
    """The JSON has the three numbers; windows do not overlap and their first token is not scored."""
    (tmp_path / "t").write_bytes(b"aaaaaaaaaa")
    script = lambda ids: np.zeros(272, np.float32)  # noqa: E731  every id as likely as any other
    assert cli(["eval", "m", "--text", str(tmp_path / "t"), "--window", "4", "--json"], script=script) == 0
    out, err = capsys.readouterr()
    score = json.loads(out)
    assert set(score) == {"tokens", "nll", "perplexity"}
    assert score["tokens"] == 3 + 3 + 1
    assert math.isclose(score["nll"], math.log(272)) and math.isclose(score["perplexity"], 272)
    assert "10 tokens" in err


def test_eval_without_json_is_a_sentence(cli, capsys, tmp_path):
    """A person gets a sentence with the same numbers."""
    (tmp_path / "t").write_bytes(b"ab")
    assert cli(["eval", "m", "--text", str(tmp_path / "t")], script=lambda ids: np.zeros(272, np.float32)) == 0
    assert capsys.readouterr().out == "perplexity 272.0000 (nll 5.605802, 1 scored tokens)\n"


def test_eval_bad_input_is_one_line(cli, capsys, tmp_path):
    """No file, no text to score, a window that cannot be: one line each."""
    (tmp_path / "t").write_bytes(b"a")
    for argv, message in (
        (["--text", "/nonexistent/t"], "/nonexistent/t: cannot be read"),
        (["--text", str(tmp_path / "t")], "nothing to score"),
        (["--text", str(tmp_path / "t"), "--window", "1"], "window is 1"),
    ):
        assert cli(["eval", "m", *argv], script=lambda ids: 97) == 2
        out, err = capsys.readouterr()
        assert out == "" and message in err
