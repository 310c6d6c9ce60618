"""coli chat: a conversation, its history and its commands."""

from __future__ import annotations

import io
import json
import sys

import pytest
from conftest import assert_same_bits
from scripted import TINY, ScriptedEngine, reciting, tiny_ids

import coli
from coli.cli import chat
from coli.errors import ColiError
from coli.model import Model

NO_THINKING = "</think>\n\n"


def stdin(typed: str | bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(typed.encode() if isinstance(typed, str) else typed))


def talk(cli, monkeypatch, typed: str | bytes, *answers: str, flags=("--temperature", "0")) -> int:
    monkeypatch.setattr(sys, "stdin", stdin(typed))
    return cli(["chat", "m", *flags], *(NO_THINKING + answer + "<|im_end|>" for answer in answers))


def conversation(*answers: str, **options) -> chat.Conversation:
    engine = ScriptedEngine(reciting(*(tiny_ids(answer) for answer in answers)))
    return chat.Conversation(Model(engine, TINY), {"max_tokens": 100}, **options)


def say(talked: chat.Conversation, text: str) -> str:
    return "".join(delta.text for delta in talked.answer(text) if delta.channel == "content")


def test_chat_answers_each_line_and_leaves_at_the_end_of_input(cli, capsys, monkeypatch):
    """Standard output holds the answers, one after the other, and nothing else."""
    assert talk(cli, monkeypatch, "Hi\n\nBye\n", "Hello.", "See you.") == 0
    assert capsys.readouterr().out == "Hello.\nSee you.\n"


@pytest.mark.parametrize(("n", "where"), [("3", "inside the thought "), ("9", "")])
def test_chat_says_that_an_answer_was_cut_off(cli, capsys, monkeypatch, n, where):
    """An answer that --max-tokens ended is said to be, once, on standard error; one that ended by itself is not."""
    monkeypatch.setattr(sys, "stdin", stdin("Hi\n"))
    assert cli(["chat", "m", "--temperature", "0", "--max-tokens", n], "hmm" + NO_THINKING + "Hello.<|im_end|>") == 0
    line = f"[chat] the answer was cut off {where}by --max-tokens {n} (a larger one gives more)\n"
    assert capsys.readouterr() == ("\n" if where else "Hel\n", line)
    assert talk(cli, monkeypatch, "Hi\n", "Hello.") == 0
    assert "cut off" not in capsys.readouterr().err


def test_chat_quit_leaves(cli, capsys, monkeypatch):
    """/quit leaves; what was typed behind it is not read."""
    assert talk(cli, monkeypatch, "Hi\n/quit\nmore\n", "Hello.") == 0
    assert capsys.readouterr().out == "Hello.\n"


def test_chat_input_over_several_lines_is_one_message(cli, monkeypatch, capsys):
    """A backslash joins lines, a fence holds a block; both are one message, to the character."""
    typed = 'a\\\nb\n"""\nfirst\n\n  second \\\n"""\n'
    assert talk(cli, monkeypatch, typed, "1", "2") == 0
    monkeypatch.setattr(sys, "stdin", stdin(typed))
    reader = chat.InputReader()
    assert [reader.read(), reader.read(), reader.read()] == ["a\nb", "first\n\n  second \\", None]


def test_chat_sampling_defaults_are_the_checkpoints(cli, monkeypatch, capsys):
    """Without flags generation_config.json speaks; a flag beats it; both reach the sampler."""
    seen = []
    generate = Model.generate
    monkeypatch.setattr(Model, "generate", lambda self, *a, **k: seen.append(k) or generate(self, *a, **k))
    assert talk(cli, monkeypatch, "Hi\n", "Hello.", flags=("--top-k", "1", "--seed", "4")) == 0
    assert (seen[0]["temperature"], seen[0]["top_p"], seen[0]["top_k"], seen[0]["seed"]) == (1.0, 0.95, 1, 4)
    assert seen[0]["max_tokens"] is None


def test_input_that_is_not_utf8_is_named_by_its_line(cli, monkeypatch, capsys):
    """The lines before it are answered, the bad one is one error with its number, whatever the locale."""
    assert talk(cli, monkeypatch, b"Hi\r\nb\xff\n", "Hello.") == 2
    out, err = capsys.readouterr()
    assert out == "Hello.\n"
    assert "standard input: line 2 is not UTF-8" in err and err.count("coli: error") == 1


def test_conversation_second_turn_reuses_the_first_ones_state():
    """The template drops what it opened the answer with: turn two goes on from behind turn one's message."""
    talked = conversation("Hello.<|im_end|>", "Fine.<|im_end|>", "Bye.<|im_end|>", enable_thinking=False)
    engine = talked._model.engine
    assert [say(talked, text) for text in ("Hi", "How are you?", "Bye")] == ["Hello.", "Fine.", "Bye."]
    lengths = [
        len(talked._model.template.render(talked.messages[:n], add_generation_prompt=False).ids) for n in (1, 3, 5)
    ]
    opening = len(tiny_ids("<|im_start|>assistant\n<think>\n\n</think>\n\n"))
    prompts = [n for kind, n in engine.calls if kind == "prefill"]
    assert prompts == [lengths[0], opening, lengths[1] - lengths[0], opening, lengths[2] - lengths[1], opening]
    assert talked._last.reused_tokens == lengths[1]


@pytest.mark.parametrize("thinking", [None, False])
def test_conversation_on_the_demo_model_is_bit_for_bit_a_fresh_one(thinking):
    """C24, C26: at each turn the logits of the warm session are those of the whole prompt computed afresh."""
    with coli.load("demo", threads=2) as model:
        talked = chat.Conversation(model, {"max_tokens": 24}, enable_thinking=thinking)
        for text in ("Hello, who are you?", 'Define "house".', "And a ship?"):
            say(talked, text)
            generation = talked._last
            warm, next_id = generation.session.copy(), generation.ids[-1]
            assert_same_bits(warm.step(next_id), model.session().prefill(warm.ids), text)
            fresh = model.generate(warm.ids[: generation.prompt_tokens], max_tokens=24)
            assert "".join(fresh) and fresh.ids == generation.ids


def test_conversation_keeps_thoughts_where_it_is_asked_to():
    """--preserve-thinking: the prompt of turn two holds turn one's thought, and goes on from turn one's answer."""
    answers = ("I add.\n</think>\n\nFour.<|im_end|>", "Yes.\n</think>\n\nIndeed.<|im_end|>")
    dropped, kept = conversation(*answers), conversation(*answers, preserve_thinking=True)
    for talked in (dropped, kept):
        assert [say(talked, text) for text in ("2+2", "Sure?")] == ["Four.", "Indeed."]
    first = len(tiny_ids("<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n<think>\n" + answers[0])) - 1
    assert kept._last.reused_tokens == first
    assert "I add." not in dropped._model.tokenizer.decode(dropped._last.session.ids)


def test_conversation_reuse_where_the_prompt_goes_on_is_bit_for_bit(tmp_path):
    """With a template that keeps its turns, turn two takes in only the new ids and gives a fresh run's answer."""
    source = (
        "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor -%}"
    )
    source += "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
    for file in TINY.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(source)
    answers = [tiny_ids("Hello.<|im_end|>"), tiny_ids("Fine.<|im_end|>")]

    def made() -> chat.Conversation:
        return chat.Conversation(Model(ScriptedEngine(reciting(*answers)), tmp_path), {"max_tokens": 100})

    warm = made()
    assert [say(warm, "Hi"), say(warm, "How are you?")] == ["Hello.", "Fine."]
    first = len(tiny_ids("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello."))
    assert warm._last.reused_tokens == first
    cold = made()
    cold.reset(warm.messages[:2])
    assert say(cold, "How are you?") == "Fine."
    assert cold._last.reused_tokens == 0
    assert cold._last.session.ids == warm._last.session.ids


def test_conversation_keeps_thoughts_beside_the_content():
    """History carries reasoning_content, which the template may keep or drop."""
    talked = conversation("I add.\n</think>\n\nFour.<|im_end|>")
    assert say(talked, "2+2") == "Four."
    assert talked.messages == [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "Four.", "reasoning_content": "I add."},
    ]


def test_interrupted_answer_joins_the_history_and_the_session_goes_on(capsys):
    """Ctrl-C ends the answer: what was said is kept, the next turn works."""
    talked = conversation("</think>One two<|im_end|>", "</think>Yes.<|im_end|>")
    for delta in talked.answer("Count"):
        if delta.text == "w":
            break
    assert talked.messages[1] == {"role": "assistant", "content": "One tw"}
    assert say(talked, "Go on?") == "Yes."


def test_ctrl_c_in_an_answer_keeps_the_conversation(cli, capsys, monkeypatch):
    """An interrupt during an answer is said on standard error; the loop goes on."""
    script = reciting(*(tiny_ids(NO_THINKING + answer + "<|im_end|>") for answer in ("Hello.", "Fine.")))
    raised = []

    def interrupting(ids):
        if ids[-2:] == [*b"el"] and not raised:
            raised.append(True)
            raise KeyboardInterrupt
        return script(ids)

    monkeypatch.setattr(sys, "stdin", stdin("Hi\nAnd?\n"))
    assert cli(["chat", "m", "--temperature", "0"], script=interrupting) == 0
    out, err = capsys.readouterr()
    assert out == "Hel\nFine.\n"
    assert "(interrupted)" in err


def test_turn_that_fails_leaves_the_history_as_it_was():
    """A message too long for the context is refused and forgotten."""
    talked = conversation("</think>Hello.<|im_end|>", "</think>Fine.<|im_end|>")
    say(talked, "Hi")
    with pytest.raises(ColiError, match="the context holds"):
        say(talked, "x" * 5000)
    assert len(talked.messages) == 2
    assert say(talked, "Still there?") == "Fine."


def test_commands_save_and_load_a_conversation(tmp_path):
    """What was saved is what is loaded, whole; the file is JSON that a person can read."""
    talked = conversation("</think>Grüße 😀<|im_end|>", "</think>Fine.<|im_end|>")
    say(talked, "Hi")
    path = tmp_path / "talk.json"
    assert chat._command(talked, f"/save {path}")
    assert "Grüße 😀" in path.read_text(encoding="utf-8")
    assert [p.name for p in tmp_path.iterdir()] == ["talk.json"]
    other = conversation("</think>Grüße 😀<|im_end|>", "</think>Fine.<|im_end|>")
    assert chat._command(other, f"/load {path}")
    assert other.messages == talked.messages
    assert say(other, "And?") == "Fine."


def test_command_reset_forgets_history_and_state():
    """After /reset the next message is the first."""
    talked = conversation("</think>Hello.<|im_end|>")
    say(talked, "Hi")
    assert chat._command(talked, "/reset")
    assert talked.messages == []
    assert say(talked, "Hi") == "Hello."
    assert talked._last.reused_tokens == 0


def test_command_stats_and_help_go_to_standard_error(capsys):
    """They are not answers."""
    talked = conversation("</think>Hello.<|im_end|>")
    say(talked, "Hi")
    assert chat._command(talked, "/stats") and chat._command(talked, "/help")
    out, err = capsys.readouterr()
    assert out == ""
    assert "decode" in err and "kernels: scripted" in err and "/save FILE" in err


@pytest.mark.parametrize("text", ["/sav x", "/save", "/reset now", "/etc/passwd is a file"])
def test_command_that_is_none_is_refused(text):
    """A misspelt command is not sent to the model as a message."""
    with pytest.raises(ColiError, match="/"):
        chat._command(conversation("x"), text)


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"messages": []}', '{"format": "coli-chat", "version": 9, "messages": []}',
     '{"format": "coli-chat", "version": 1}', '{"format": "coli-chat", "version": 1, "messages": [{"role": "x"}]}'],
)  # fmt: skip
def test_load_of_something_else_names_the_file_and_changes_nothing(tmp_path, content):
    """A file that is no saved conversation is refused; the present one stays."""
    path = tmp_path / "talk.json"
    path.write_text(content)
    talked = conversation("</think>Hello.<|im_end|>")
    say(talked, "Hi")
    with pytest.raises(ColiError, match="talk.json"):
        chat._command(talked, f"/load {path}")
    assert len(talked.messages) == 2


def test_save_where_it_cannot_be_written_names_the_file(tmp_path):
    """A failed save says so and leaves no scrap."""
    with pytest.raises(ColiError, match="cannot be written"):
        chat.save_messages(tmp_path / "no" / "talk.json", [])
    (tmp_path / "folder").mkdir()
    with pytest.raises(ColiError, match="cannot be written"):
        chat.save_messages(tmp_path / "folder", [])
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_thinking_is_shown_dimmed_on_a_terminal_only():
    """On a terminal the thought is dim and set apart; elsewhere it is not shown."""
    from coli.cli.common import ThoughtWriter

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, shown in ((Terminal(), "\x1b[2mI add.\x1b[0m\n\n"), (io.StringIO(), "")):
        thought = ThoughtWriter(stream)
        thought.write("I ")
        thought.write("add.")
        thought.end()
        thought.end()
        assert stream.getvalue() == shown


def test_saved_file_has_a_format_and_version(tmp_path):
    """So that a later version can tell what it reads."""
    chat.save_messages(tmp_path / "t", [{"role": "user", "content": "x"}])
    saved = json.loads((tmp_path / "t").read_text())
    assert (saved["format"], saved["version"]) == ("coli-chat", 1)
