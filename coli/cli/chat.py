"""``coli chat``: a conversation on the terminal, or piped in a turn a line.

The history is messages; each turn renders the whole of it and computes only what is new.  The last answer's state
serves where the prompt goes on from it.  Where it does not (the template dropped a thought, an answer was cut off), a
copy of the state from before that answer does: it was kept behind the turn's message, where the answer's part of the
prompt began.  Otherwise (/load) it starts from scratch.  All three give the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coli.cli import common
from coli.errors import ColiError, ModelError, RequestError
from coli.files import replace_file
from coli.log import logger

if TYPE_CHECKING:
    from coli.cli.remote import RemoteConversation
    from coli.engine.generate import Generation
    from coli.engine.session import Session
    from coli.model import Model
    from coli.text.channels import Delta

HELP = (
    "Talk with a model. Sampling is what the checkpoint's generation_config.json says unless a flag says otherwise. "
    "/help lists the commands; Ctrl-C ends an answer, Ctrl-D the conversation."
)

COMMANDS = """\
/reset       forget the conversation
/stats       speed of the last answer, what runs where
/save FILE   write the conversation to a file
/load FILE   go on from a file
/help        this list
/quit        leave; so does Ctrl-D
A line that ends in \\ goes on in the next one. A line of three double quotes opens a text of several lines, another
one closes it. Ctrl-C ends an answer and keeps what was said."""

_NAMES = ("/reset", "/stats", "/save", "/load", "/help", "/quit")
_NEED_FILE = ("/save", "/load")
_FORMAT, _VERSION = "coli-chat", 1
_FENCE = '"""'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help=common.MODEL_HELP
    )
    parser.add_argument(
        "--url", metavar="URL", help="talk with a running server (coli serve) instead of loading a model"
    )
    parser.add_argument("--no-thinking", action="store_true", help="ask the template for no thinking")
    parser.add_argument(
        "--preserve-thinking", action="store_true", help="ask the template to keep the thoughts of earlier turns"
    )
    common.add_sampling(parser, max_tokens=None)
    common.add_loading(parser)


def run(args: argparse.Namespace) -> int:
    thinking = {
        "enable_thinking": False if args.no_thinking else None,
        "preserve_thinking": True if args.preserve_thinking else None,
    }
    if args.url is not None:
        from coli.cli.remote import RemoteConversation, refuse_loading

        refuse_loading(args)
        remote = RemoteConversation(args.url, common.given_sampling(args), **thinking)
        return _talk(remote, remote.check())
    if args.model is None:
        raise RequestError("nobody to talk with: name a MODEL, or a running server by --url")
    common.check_sampling(args)
    with common.load_model(args) as model:
        sampling = common.sampling_of(args, model, model.sampling_defaults)
        conversation = Conversation(model, sampling, **thinking)
        _ = model.template  # a model that cannot chat says so now, not after the first message
        return _talk(conversation, args.model)


def _talk(conversation: Conversation | RemoteConversation, name: str) -> int:
    reader = InputReader()
    if reader.is_terminal:
        logger("chat").info("%s; /help lists the commands", name)
    while (text := reader.read()) is not None:
        if text.strip() and not _turn(conversation, text, reader.is_terminal):
            break
    return 0


def _turn(conversation: Conversation | RemoteConversation, text: str, is_terminal: bool) -> bool:
    """One command or message; False to leave.  An error ends the turn, and a piped conversation."""
    try:
        if text.startswith("/"):
            return _command(conversation, text.strip())
        _say(conversation, text)
    except KeyboardInterrupt:
        print("\n(interrupted)", file=sys.stderr)
    except ColiError as error:
        if not is_terminal:
            raise
        print(f"coli: error: {error}", file=sys.stderr)
    return True


def _say(conversation: Conversation | RemoteConversation, text: str) -> None:
    thought = common.ThoughtWriter()
    try:
        with contextlib.closing(conversation.answer(text)) as deltas:
            for delta in deltas:
                if delta.channel == "reasoning":
                    thought.write(delta.text)
                    continue
                thought.end()
                sys.stdout.write(delta.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        thought.end()
        print("\n(interrupted)", file=sys.stderr)
    thought.end()
    sys.stdout.write("\n")
    sys.stdout.flush()
    if cut := conversation.cut_line():
        logger("chat").info("the answer was %s", cut)


def _command(conversation: Conversation | RemoteConversation, text: str) -> bool:
    name, _, argument = text.partition(" ")
    argument = argument.strip()
    if name not in _NAMES:
        raise RequestError(f"{name} is no command; /help lists them, and a space before the / makes it a message")
    if name in _NEED_FILE and not argument:
        raise RequestError(f"{name} needs a file: {name} FILE")
    if name not in _NEED_FILE and argument:
        raise RequestError(f"{name} takes nothing behind it; a space before the / makes it a message")
    if name == "/reset":
        conversation.reset()
    elif name == "/save":
        save_messages(Path(argument), conversation.messages)
    elif name == "/load":
        conversation.reset(load_messages(Path(argument)))
    elif name == "/stats":
        for line in conversation.stats():
            print(line, file=sys.stderr)
    elif name == "/help":
        print(COMMANDS, file=sys.stderr)
    return name != "/quit"


class Conversation:
    """The messages so far and the states that computed them.

    messages : in the form of the chat API, with ``reasoning_content`` where the model thought.
    """

    def __init__(
        self,
        model: Model,
        sampling: dict[str, Any],
        *,
        enable_thinking: bool | None = None,
        preserve_thinking: bool | None = None,
    ) -> None:
        self._model = model
        self._sampling = sampling
        self._thinking = {"enable_thinking": enable_thinking, "preserve_thinking": preserve_thinking}
        self._states: list[Session] = []  # of the last turn: behind its answer, and behind its message
        self._last: Generation | None = None
        self.messages: list[dict[str, Any]] = []

    def answer(self, text: str) -> Generator[Delta, None, None]:
        """Add a user's message and give the answer as it comes.

        However the answer ends, what came of it joins the history; a turn without any answer is forgotten.
        """
        user = {"role": "user", "content": text}
        turns = [*self.messages, user]
        shared = self._model.template.render(turns, add_generation_prompt=False, **self._thinking).ids
        state = next((state for state in self._states if shared[: len(state.ids)] == state.ids), None)
        answer = self._model.chat(turns, session=state, **self._thinking, **self._sampling)
        generation = self._last = answer.generation
        generation.keep_state_behind(shared)
        try:
            yield from answer.deltas()
        finally:
            self._states = [state for state in (generation.session, generation.kept) if state is not None]
            if answer.content is not None or answer.reasoning is not None:
                reply = {"role": "assistant", "content": answer.content or ""}
                if answer.reasoning is not None:
                    reply["reasoning_content"] = answer.reasoning
                self.messages += [user, reply]

    def cut_line(self) -> str | None:
        """What cut the last answer off, in words; None where it ended by itself."""
        if self._last is None:
            return None
        return common.cut_line(self._last, self._model, self._sampling["max_tokens"], chat=True)

    def reset(self, messages: list[dict[str, Any]] | None = None) -> None:
        """Start again, with nothing or with a history."""
        self.messages = messages or []
        self._states, self._last = [], None

    def stats(self) -> Iterator[str]:
        """Lines about the last answer, the model, and what lies where."""
        if self._last is not None:
            yield common.speed_line(self._last)
            yield f"context: {len(self._last.session.ids)} of {self._model.context} tokens"
        stats, placed = self._model.stats(), self._model.placed
        yield f"model: {stats['model']}"
        yield f"kernels: {stats['isa']}, threads: {stats['threads']}"
        if placed is None or placed.plan is None:
            yield "place: everything on the CPU"
            return
        from coli.placement import place_lines

        yield from (f"[place] {line}" for line in place_lines(placed.plan))
        for part, device, why in stats["fallen"]:
            yield f"[place] {part} on {device} failed, the CPU does it: {why}"
        yield from (f"[tier] {line}" for line in placed.summary())


class InputReader:
    """Reads what a person says: a line, several joined by a backslash, or a block between lines of three quotes."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty()
        self._lines = 0
        if self.is_terminal and sys.stdout.isatty():
            import readline  # noqa: F401  gives input() line editing and history

    def read(self) -> str | None:
        """The next message or command; None at the end of the input."""
        while True:
            try:
                return self._read()
            except KeyboardInterrupt:
                print("\n(/quit or Ctrl-D leaves)", file=sys.stderr)
            except RequestError as error:
                if not self.is_terminal:
                    raise
                print(f"coli: error: {error}", file=sys.stderr)

    def _read(self) -> str | None:
        line = self._line("> ")
        if line is None:
            return None
        lines = []
        if line.strip() == _FENCE:
            while (line := self._line(". ")) is not None and line.strip() != _FENCE:
                lines.append(line)
            return "\n".join(lines)
        while line is not None and line.endswith("\\"):
            lines.append(line[:-1])
            line = self._line(". ")
        return "\n".join(lines if line is None else [*lines, line])

    def _line(self, prompt: str) -> str | None:
        self._lines += 1
        try:
            if self.is_terminal and sys.stdout.isatty():
                line = input(prompt)
                line.encode()  # a locale other than UTF-8 lets odd bytes in as lone surrogates
                return line
            if self.is_terminal:  # standard output is the answer's alone
                print(prompt, end="", file=sys.stderr, flush=True)
            line = sys.stdin.buffer.readline().decode("utf-8")
        except EOFError:
            return None
        except UnicodeError:
            raise RequestError(f"standard input: line {self._lines} is not UTF-8") from None
        return line.removesuffix("\n").removesuffix("\r") if line else None


def save_messages(path: Path, messages: list[dict[str, Any]]) -> None:
    """Write a conversation as JSON, whole or not at all."""
    text = json.dumps({"format": _FORMAT, "version": _VERSION, "messages": messages}, ensure_ascii=False, indent=1)
    try:
        replace_file(path, (text + "\n").encode(), mode=0o600)  # nobody else's business
    except OSError as error:
        raise RequestError(f"{path}: cannot be written ({error.strerror})") from None


def load_messages(path: Path) -> list[dict[str, Any]]:
    """The messages that `save_messages` wrote; an error that names the file where it is something else."""
    from coli.config import read_json_object
    from coli.text.messages import normalise_messages

    saved = read_json_object(path)
    if saved.get("format") != _FORMAT or saved.get("version") != _VERSION:
        raise ModelError(f"{path}: not a conversation saved by this version of coli chat")
    messages = saved.get("messages")
    if messages != []:
        try:
            normalise_messages(messages)  # type: ignore[arg-type]  # this is the check
        except RequestError as error:
            raise RequestError(f"{path}: {error}") from None
    return list(messages)  # type: ignore[arg-type]
