"""The command line's front door: finds the verb, loads its module and no other, turns errors into lines and statuses.

A verb is a module of `coli.cli` with ``HELP``, ``add_arguments(parser)`` and ``run(args) -> int``.  Exit status:
0 done, 2 wrong usage or bad input (one clear line), 130 interrupted, 141 whoever read our output has left (quietly; the
statuses that shells give a program that SIGINT or SIGPIPE ended), 1 anything else.  Nothing heavy is imported here.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys

import coli
from coli.cli import streams
from coli.errors import ColiError

TYPE_CHECKING = False  # as in coli/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType
    from typing import NoReturn

VERBS = {
    "run": "continue a prompt",
    "chat": "talk with a model",
    "serve": "answer the OpenAI API over HTTP",
    "convert": "make a container of a Hugging Face checkpoint",
    "inspect": "say what a container holds",
    "plan": "say what would lie on which device, and why",
    "bench": "measure speed",
    "eval": "measure the perplexity of a text",
    "synth": "make a model of random weights",
    "tune": "find the best threads for this machine",
    "doctor": "say what this machine offers and what limits it",
}

_NO_STDOUT = ("serve",)  # verbs that need no standard output: a service manager may close it

_OWN_SIGNALS = ("serve",)  # verbs whose event loop looks for Python's own handler

_BAD_INPUT, _INTERRUPTED, _BROKEN_PIPE = 2, 130, 141


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one line."""

    def error(self, message: str) -> NoReturn:
        streams.say(f"coli: error: {message} ({self.prog} --help shows the usage)")
        raise SystemExit(_BAD_INPUT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    streams.fill_in()
    argv = list(sys.argv[1:] if argv is None else argv)
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        signal.default_int_handler(number, frame)

    verb = argv[0] if argv else None
    has_handler = verb not in _OWN_SIGNALS and _replace_handler(signal.default_int_handler, note)
    try:
        return _guarded(argv, noted)
    finally:
        if has_handler:
            _replace_handler(note, signal.default_int_handler)
        streams.settle()


def _replace_handler(old: Callable[..., None], new: Callable[..., None]) -> bool:
    """Put a handler of SIGINT in another's place; False where that one is not there, or this is not the main thread."""
    if signal.getsignal(signal.SIGINT) is not old:
        return False
    try:
        signal.signal(signal.SIGINT, new)
    except ValueError:
        return False
    return True


def _guarded(argv: list[str], noted: list[int]) -> int:
    """What `_main` returns, with every error as a line and a status.   noted : the interrupts that came."""
    try:
        try:
            status = _main(argv)
        except SystemExit:  # argparse has printed a help, or complained
            sys.stdout.flush()
            raise
        sys.stdout.flush()  # a broken pipe shows here, not in the interpreter's last breath
        return status
    except ColiError as error:
        streams.say(f"coli: error: {error}")
        return _BAD_INPUT
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # whoever read our output has seen enough
        streams.drop(sys.stdout)
        return _BROKEN_PIPE
    except OSError as error:  # a full disk behind standard output, a file that went away
        _trace_if_debugging()
        streams.drop(sys.stdout)
        streams.say(f"coli: error: {error.filename or 'standard output'}: {error.strerror or error}")
        return 1
    except Exception as error:
        if _is_interrupt(error, noted):
            return _INTERRUPTED
        _trace_if_debugging()
        streams.say(f"coli: {type(error).__name__}: {error} (COLI_LOG=debug shows where)")
        return 1


def _is_interrupt(error: BaseException, noted: list[int]) -> bool:
    """Whether an error is what an import made of Ctrl-C: of C code a bare ImportError, of a class body one from it.

    Not any error with Ctrl-C in its context: what goes wrong while one is handled has to be told.
    """
    if isinstance(error.__cause__, KeyboardInterrupt):
        return True
    return bool(noted) and isinstance(error, (ImportError, SystemError))


def _main(argv: list[str]) -> int:
    verb = argv[0] if argv else None
    if "stdout" in streams.CLOSED and verb is not None and verb not in _NO_STDOUT:
        raise ColiError("standard output is closed, where the answer belongs; give it a file, or /dev/null to drop it")
    if verb is None or verb.startswith("-") or not _exists(verb):
        parser = _top_parser()
        if verb is None:
            streams.say(parser.format_help().rstrip())
            return _BAD_INPUT
        parser.parse_args(argv)  # --help and --version leave here, anything else is an error
        return 0
    module = importlib.import_module(f"coli.cli.{verb}")
    parser = Parser(prog=f"coli {verb}", description=module.HELP, allow_abbrev=False)
    module.add_arguments(parser)
    args = _parse(parser, argv[1:])
    _set_up_streams()
    try:
        return module.run(args)
    except ColiError as error:  # who found it does not know whether a flag or the environment had set it
        from coli import settings

        error.args = (settings.as_given(str(error), vars(args)), *error.args[1:])
        raise


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Arguments with flags before, between and behind the positional ones: ``run demo --max-tokens 8 "Once"``."""
    try:
        return parser.parse_intermixed_args(argv)
    except TypeError:  # a verb with verbs of its own, whose positionals cannot be mixed with flags
        return parser.parse_args(argv)


def _top_parser() -> argparse.ArgumentParser:
    known = [verb for verb in VERBS if _exists(verb)]
    lines = "\n".join(f"  {verb:<9} {VERBS[verb]}" for verb in known)
    parser = Parser(
        prog="coli",
        usage="coli VERB ...",
        description=coli.__doc__.partition("\n")[0] if coli.__doc__ else None,
        epilog=f"verbs:\n{lines}\n\ncoli VERB --help shows a verb's arguments.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"coli {coli.__version__}")
    parser.add_argument("verb", choices=known, help=argparse.SUPPRESS)
    return parser


def _exists(verb: str) -> bool:
    return verb in VERBS and os.path.exists(os.path.join(os.path.dirname(__file__), f"{verb}.py"))


def _set_up_streams() -> None:
    """Tagged lines to standard error, UTF-8 to standard output; warnings about the environment, once."""
    from coli import log, settings

    log.configure(settings.get("log"))
    for line in settings.complaints():
        log.logger("settings").warning(line)
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:  # a model's text is UTF-8 whatever the locale says
        reconfigure(encoding="utf-8", errors="replace")


def _trace_if_debugging() -> None:
    from coli import settings

    try:
        debugging = settings.get("log") == "debug"
    except ColiError:  # a bad COLI_LOG has been complained of already
        return
    if debugging:
        import traceback

        streams.say(traceback.format_exc().rstrip())
