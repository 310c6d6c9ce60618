"""coli run: one prompt, one answer."""

from __future__ import annotations

import io
import json
import logging
import shutil
import sys
from types import SimpleNamespace

import pytest
from scripted import TINY, ScriptedEngine, tiny_ids

from coli.cli import common
from coli.cli.main import main
from coli.model import Model


def piped(monkeypatch, data: bytes, *, is_terminal: bool = False) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
    stdin.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stdin", stdin)


def test_run_prints_the_answer_and_nothing_else(cli, capsys):
    """Standard output is the answer and a newline; the speeds go to standard error."""
    assert cli(["run", "m", "Go"], "a 😀\nb<|endoftext|>") == 0
    out, err = capsys.readouterr()
    assert out == "a 😀\nb\n"
    assert "prompt 2 tokens" in err and "tok/s" in err
    assert cli.engine.closed == 1


def test_run_takes_its_prompt_from_text_file_ids_or_standard_input(cli, capsys, monkeypatch, tmp_path):
    """Each source gives the same ids to the model, to the character."""
    text = "é\r\n<|im_start|>"
    (tmp_path / "p").write_bytes(text.encode())
    ids = ",".join(map(str, tiny_ids(text)))
    for argv in ([text], ["--file", str(tmp_path / "p")], ["--ids", ids], [], ["--file", "-"]):
        piped(monkeypatch, text.encode())
        assert cli(["run", "m", *argv], "ok") == 0
        assert cli.engine.calls[0] == ("prefill", len(tiny_ids(text)))
        assert capsys.readouterr().out == "ok\n"


def test_run_without_a_tokenizer_prints_ids(cli, capsys, tmp_path):
    """--ids on a container without tokenizer files gives ids; a text prompt is refused in one line."""
    shutil.copy(TINY / "generation_config.json", tmp_path)
    assert cli(["run", "m", "--ids", "1,2"], "ab", folder=tmp_path) == 0
    assert capsys.readouterr().out == "97,98,256\n"
    assert cli(["run", "m", "Go"], "ab", folder=tmp_path) == 2
    out, err = capsys.readouterr()
    assert out == "" and "no tokenizer.json" in err


def test_run_chat_uses_the_template_and_shows_content_only(cli, capsys):
    """--chat makes the prompt a user's message; the thought is not on standard output."""
    assert cli(["run", "m", "--chat", "2+2"], "hm\n</think>\n\nFour.<|im_end|>") == 0
    assert capsys.readouterr().out == "Four.\n"
    assert cli(["run", "m", "--chat", "--no-thinking", "2+2"], "Four.<|im_end|>") == 0
    assert capsys.readouterr().out == "Four.\n"


def test_run_stops_at_stop_strings_and_max_tokens(cli, capsys):
    """The flags of the answer reach it."""
    assert cli(["run", "m", "--stop", "\nUser:", "--stop", "END", "Go"], "Fine.\nUser: next") == 0
    assert capsys.readouterr().out == "Fine.\n"
    assert cli(["run", "m", "Go", "--max-tokens", "3"], "abcdef") == 0
    assert capsys.readouterr().out == "abc\n"


def test_run_sampling_flags_reach_the_sampler(cli, capsys):
    """A seed gives the same text twice and another seed another."""

    def text(*flags):
        assert cli(["run", "m", "Go", "--max-tokens", "20", *flags], script=lambda ids: 97) == 0
        return capsys.readouterr().out

    hot = ["--temperature", "100", "--top-k", "0", "--top-p", "1", "--min-p", "0"]
    assert text("--seed", "1", *hot) == text("--seed", "1", *hot) != text("--seed", "2", *hot)
    assert text() == "a" * 20 + "\n"
    assert text("--seed", "3", *hot, "--top-k", "1") == "a" * 20 + "\n"


@pytest.mark.parametrize(
    ("flags", "temperature", "line"),
    [
        (("--top-p", "0.9"), 1.0, "[run] temperature 1 (generation_config.json's): --top-p asks for a draw"),
        (("--seed", "3", "--min-p", "0.1"), 1.0, "--min-p asks for a draw"),
        (("--top-k", "0", "--top-p", "1"), 0.0, None),
        (("--temperature", "0.5", "--seed", "3"), 0.5, None),
        (("--temperature", "0", "--seed", "3", "--top-k", "5"), 0.0,
         "[run] warning: --top-k, --seed have no effect at --temperature 0"),
        (("--repetition-penalty", "1.1"), 0.0, None),
    ],
)  # fmt: skip
def test_run_sampling_flag_without_a_temperature_is_not_ignored(cli, capsys, monkeypatch, flags, temperature, line):
    """A flag that only a draw obeys brings the checkpoint's temperature; beside a temperature of 0 it is named."""
    seen = []
    generate = Model.generate
    monkeypatch.setattr(Model, "generate", lambda self, *a, **k: seen.append(k) or generate(self, *a, **k))
    assert cli(["run", "m", "Go", *flags], "ok") == 0
    assert seen[0].get("temperature", 0.0) == temperature
    said = [text for text in capsys.readouterr().err.splitlines() if "temperature" in text]
    assert (len(said) == 1 and line in said[0]) if line else not said


def test_run_sampling_flag_without_any_temperature_draws_at_1(cli, capsys, tmp_path):
    """A checkpoint that names no temperature, or is greedy by default, is drawn from as it is."""
    for config in ({}, {"do_sample": False, "temperature": 0.6}):
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
        assert cli(["run", "m", "--ids", "1", "--max-tokens", "1", "--seed", "1"], "ab", folder=tmp_path) == 0
        assert "temperature 1 (generation_config.json gives none to draw at)" in capsys.readouterr().err


def test_run_loading_flags_reach_the_loader(cli, capsys):
    """Place, devices, memory, heat, threads and context are handed on as they were given."""
    flags = "--place off --devices none --vram 0 --heat h.json --threads 1 --context 64".split()
    assert cli(["run", "m", *flags, "Go"], "ok") == 0
    assert [getattr(cli.args, name) for name in ("place", "devices", "vram", "heat", "threads", "context")] == [
        "off", "none", "0", "h.json", "1", "64",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["x", "--file", "y"], "given twice"),
        (["x", "--ids", "1"], "given twice"),
        (["--ids", "1,x"], "--ids holds 'x'"),
        (["--ids", "1,999"], "token id 999 at place 1"),
        (["--ids", "1", "--chat"], "takes no chat template"),
        (["--file", "/nonexistent/file"], "/nonexistent/file: cannot be read"),
        (["x", "--no-thinking"], "add --chat"),
        (["x", "--temperature", "-1"], "temperature is -1.0"),
        (["x", "--max-tokens", "-1"], "max_tokens is -1"),
        (["x", "--stop", ""], "stop holds an empty string"),
        ([""], "the prompt is empty"),
        (["x" * 5000], "5000 tokens and the context holds 4096"),
    ],
)
def test_run_bad_input_is_one_line_and_status_2(cli, capsys, argv, message):
    """Whatever is wrong with the request is said in one line, and nothing is printed as an answer."""
    assert cli(["run", "m", *argv], "ok") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err and err.startswith("coli: error: ") and err.count("\n") == 1


def test_run_without_a_prompt_on_a_terminal_says_how(cli, capsys, monkeypatch):
    """Waiting silently for standard input on a terminal would look like a hang."""
    piped(monkeypatch, b"", is_terminal=True)
    assert cli(["run", "m"], "ok") == 2
    assert "no prompt" in capsys.readouterr().err


def test_run_input_that_is_not_utf8_names_the_byte(cli, capsys, monkeypatch):
    """A prompt in another encoding is refused, not guessed at."""
    piped(monkeypatch, b"ab\xff")
    assert cli(["run", "m"], "ok") == 2
    assert "standard input: not UTF-8 at byte 2" in capsys.readouterr().err


def test_run_says_what_cut_an_answer_off(cli, capsys):
    """The line of the speeds names the flag that moves the end; an answer that ended by itself has none of it."""
    assert cli(["run", "m", "Go", "--max-tokens", "3"], "abcdef") == 0
    out, err = capsys.readouterr()
    assert out == "abc\n"
    assert err.count("\n") == 1 and err.rstrip().endswith("; cut off by --max-tokens 3 (a larger one gives more)")
    assert cli(["run", "m", "Go", "--max-tokens", "4"], "abc<|endoftext|>") == 0
    assert "cut off" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "n", "where"),
    [
        ("hm, let me", 4, "cut off inside the thought by --max-tokens 4"),
        ("\n\n\n", 2, "cut off inside the thought by"),  # nothing of the thought is there yet
        ("hm</think>\n\nFour.", 3, "; cut off by --max-tokens 3"),  # behind it, before the answer
        ("hm</think>\n\nFour.", 6, "; cut off by --max-tokens 6"),
    ],
)
def test_run_chat_says_that_a_thought_was_cut_off(cli, capsys, answer, n, where):
    """An empty answer has its reason on standard error."""
    assert cli(["run", "m", "--chat", "2+2", "--max-tokens", str(n)], answer) == 0
    assert where in capsys.readouterr().err


@pytest.mark.parametrize(("largest", "how"), [(16, "raise --context for more"), (8, "the model takes no more")])
def test_run_says_that_the_context_is_full(largest, how):
    """--max-tokens was not reached: --context is the flag to raise, where the model can have more."""

    engine = ScriptedEngine(lambda ids: 97, context=8)
    engine.config.max_position_embeddings = largest
    model = Model(engine, TINY)
    generation = model.generate("Go", max_tokens=100)
    assert "".join(generation) == "a" * 6
    line = common.cut_line(generation, model, 100, chat=False)
    assert line == f"cut off: the context of 8 tokens is full ({how})"


@pytest.mark.parametrize("flags", [("--temperature", "-1"), ("--max-tokens", "-1"), ("--stop", ""), ("--top-p", "2")])
@pytest.mark.parametrize("verb", ["run", "chat"])
def test_sampling_flags_are_checked_before_anything_is_loaded(capsys, monkeypatch, verb, flags):
    """A model that cannot be loaded is never asked for: the flag's line is the only one."""
    monkeypatch.setattr(common, "load_model", lambda args: pytest.fail("loaded"))
    piped(monkeypatch, b"Go\n")
    assert main([verb, "demo", *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith("coli: error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "flags", "status", "says"),
    [
        ("demo", ("--devices", "none"), 0, "nothing to measure, since no card is in use"),
        ("demo", ("--devices", "fake:8MiB", "--vram", "0"), 0, "nothing to measure, since no card is in use"),
        ("demo", ("--devices", "fake:8MiB"), 0, "nothing to measure, since fake0 has no identity"),
        ("nowhere", ("--devices", "fake:8MiB", "--place", "auto:time"), 2, "nowhere: no such folder"),
    ],
)
def test_reprobe_that_measures_nothing_throws_nothing_away(
    capsys, monkeypatch, tmp_path, model, flags, status, says
):
    """No card, one without an identity, no such model: what was measured before is still there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(logging.getLogger("coli"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("coli"), "propagate", True)
    kept = tmp_path / "coli" / "probe" / "card-1.json"
    kept.parent.mkdir(parents=True)
    kept.write_text('{"of": {"kind": "card"}}')
    assert main(["run", model, "Once", "--max-tokens", "1", "--reprobe", *flags]) == status
    assert says in capsys.readouterr().err
    assert kept.exists()


def test_reprobe_that_measures_forgets_first(monkeypatch):
    """A device that is measured anew: what was kept goes."""
    forgotten = []
    monkeypatch.setattr("coli.probing.forget", lambda: forgotten.append(1))
    monkeypatch.setattr("coli.model.load", lambda model, **given: model)
    args = SimpleNamespace(
        model="demo", reprobe=True, place="auto:time", devices="fake:8MiB", vram=None, heat=None, threads=None,
        context=None,
    )  # fmt: skip
    assert common.load_model(args).name == "demo"
    assert forgotten == [1]


def test_run_help_says_that_a_prompt_is_taken_as_it_is(capsys):
    """The newline of echo is a part of the prompt; who wonders about another answer finds it in the help."""
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert "the newline at the end of a file, or of what echo prints, is a part of the prompt" in " ".join(
        capsys.readouterr().out.split()
    )
