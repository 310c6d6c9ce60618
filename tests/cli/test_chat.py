"""coli chat: a conversation, its history and its commands."""

from __future__ import annotations

import io
import json
import sys

import pytest
from scripted import TINY, ScriptedEngine, reciting, tiny_ids

from coli.cli import chat
from coli.errors import ColiError
from coli.model import Model

NO_THINKING = "</think>\n\n"


def talk(cli, monkeypatch, typed: str, *answers: str, flags=("--temperature", "0")) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
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


def test_chat_quit_leaves(cli, capsys, monkeypatch):
    """/quit leaves; what was typed behind it is not read."""
    assert talk(cli, monkeypatch, "Hi\n/quit\nmore\n", "Hello.") == 0
    assert capsys.readouterr().out == "Hello.\n"


def test_chat_input_over_several_lines_is_one_message(cli, monkeypatch, capsys):
    """A backslash joins lines, a fence holds a block; both are one message, to the character."""
    typed = 'a\\\nb\n"""\nfirst\n\n  second \\\n"""\n'
    assert talk(cli, monkeypatch, typed, "1", "2") == 0
    reader_input = io.StringIO(typed)
    monkeypatch.setattr(sys, "stdin", reader_input)
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


def test_conversation_second_turn_reuses_the_first_ones_state():
    """With no thought to drop, turn two computes only what is new; the prompt is that of the whole history."""
    talked = conversation("Hello.<|im_end|>", "Fine.<|im_end|>", enable_thinking=False)
    engine = talked._model.engine
    # the template of the tiny model writes <think>\n\n</think>\n\n into the generation prompt only, so turn two
    # differs there from what turn one took in: it must start from scratch, and does
    assert say(talked, "Hi") == "Hello."
    assert say(talked, "How are you?") == "Fine."
    prompts = [n for kind, n in engine.calls if kind == "prefill"]
    assert prompts[1] == len(talked._model.template.render(talked.messages[:3], enable_thinking=False).ids)


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

    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\nAnd?\n"))
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
    assert "decode" in err and "isa: scripted" in err and "/save FILE" in err


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
