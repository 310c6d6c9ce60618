"""``coli chat``: a conversation on the terminal, or piped in a turn a line.

The history is messages; each turn renders the whole of it.  A turn whose prompt goes on from what the session took in
computes only the rest; otherwise (the template dropped an old thought, a turn was cut off) it starts from scratch.
Both give the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coli.cli import common
from coli.errors import ColiError, ModelError, RequestError
from coli.log import logger

if TYPE_CHECKING:
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
    common.add_model(parser)
    parser.add_argument("--no-thinking", action="store_true", help="ask the template for no thinking")
    common.add_sampling(parser, max_tokens=None)
    common.add_loading(parser)


def run(args: argparse.Namespace) -> int:
    with common.load_model(args) as model:
        sampling = common.sampling_of(args, model.sampling_defaults)
        conversation = Conversation(model, sampling, enable_thinking=False if args.no_thinking else None)
        _ = model.template  # a model that cannot chat says so now, not after the first message
        reader = InputReader()
        if reader.is_terminal:
            logger("chat").info("%s; /help lists the commands", args.model)
        while (text := reader.read()) is not None:
            if text.strip() and not _turn(conversation, text, reader.is_terminal):
                break
    return 0


def _turn(conversation: Conversation, text: str, is_terminal: bool) -> bool:
    """One command or message; False to leave.  An error ends the turn, and a piped conversation."""
    try:
        if text.startswith("/"):
            return _command(conversation, text.strip())
        _say(conversation, text)
    except ColiError as error:
        if not is_terminal:
            raise
        print(f"coli: error: {error}", file=sys.stderr)
    return True


def _say(conversation: Conversation, text: str) -> None:
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


def _command(conversation: Conversation, text: str) -> bool:
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
    """The messages so far and the session that computed them.

    messages : in the form of the chat API, with ``reasoning_content`` where the model thought.
    """

    def __init__(self, model: Model, sampling: dict[str, Any], *, enable_thinking: bool | None = None) -> None:
        self._model = model
        self._sampling = sampling
        self._enable_thinking = enable_thinking
        self._session: Session | None = None
        self._last: Generation | None = None
        self.messages: list[dict[str, Any]] = []

    def answer(self, text: str) -> Generator[Delta, None, None]:
        """Add a user's message and give the answer as it comes.

        However the answer ends, what came of it joins the history; a turn without any answer is forgotten.
        """
        user = {"role": "user", "content": text}
        answer = self._model.chat(
            [*self.messages, user],
            enable_thinking=self._enable_thinking,
            session=self._session,
            **self._sampling,
        )
        self._last, self._session = answer.generation, answer.generation.session
        try:
            yield from answer.deltas()
        finally:
            if answer.content is not None or answer.reasoning is not None:
                reply = {"role": "assistant", "content": answer.content or ""}
                if answer.reasoning is not None:
                    reply["reasoning_content"] = answer.reasoning
                self.messages += [user, reply]

    def reset(self, messages: list[dict[str, Any]] | None = None) -> None:
        """Start again, with nothing or with a history."""
        self.messages = messages or []
        self._session = self._last = None

    def stats(self) -> Iterator[str]:
        """Lines about the last answer and the model."""
        if self._last is not None:
            yield common.speed_line(self._last)
            yield f"context: {len(self._last.session.ids)} of {self._model.context} tokens"
        for name, value in self._model.stats().items():
            yield f"{name}: {value}"


class InputReader:
    """Reads what a person says: a line, several joined by a backslash, or a block between lines of three quotes."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty()
        if self.is_terminal and sys.stdout.isatty():
            import readline  # noqa: F401  gives input() line editing and history

    def read(self) -> str | None:
        """The next message or command; None at the end of the input."""
        while True:
            try:
                return self._read()
            except KeyboardInterrupt:
                print("\n(/quit or Ctrl-D leaves)", file=sys.stderr)

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
        try:
            if self.is_terminal and sys.stdout.isatty():
                return input(prompt)
            if self.is_terminal:  # standard output is the answer's alone
                print(prompt, end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise RequestError(f"standard input: not UTF-8 at byte {error.start}") from None
        return line.removesuffix("\n") if line else None


def save_messages(path: Path, messages: list[dict[str, Any]]) -> None:
    """Write a conversation as JSON, whole or not at all."""
    text = json.dumps({"format": _FORMAT, "version": _VERSION, "messages": messages}, ensure_ascii=False, indent=1)
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            try:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
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
