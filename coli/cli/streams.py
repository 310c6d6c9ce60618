"""The standard streams as a verb may find them: closed by the shell, a pipe whose reader has left, a full disk.

A stream that the shell closed (``>&-``) is None in Python: writing to it is an error of ours, ``print`` sends what was
meant for it to another one, and the next file that is opened takes its number.  `fill_in` puts the null device there,
and `CLOSED` remembers it: who wants to read or write there asks.  What cannot be said on standard error is not said;
it never changes the status.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as in coli/__init__.py
if TYPE_CHECKING:
    from typing import TextIO

CLOSED: set[str] = set()
"""Which of "stdin", "stdout" and "stderr" this process was started without."""


def fill_in() -> None:
    """Put the null device where a stream is missing; to be called before anything is opened."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            CLOSED.add(name)
            file = os.open(os.devnull, os.O_RDONLY if name == "stdin" else os.O_WRONLY)
            if file == number:  # as every program that we start finds it
                os.set_inheritable(file, True)
            setattr(sys, name, os.fdopen(file, "r" if name == "stdin" else "w"))


def say(line: str) -> None:
    """A line on standard error, or nothing where that cannot be written."""
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        drop(sys.stderr)


def drop(stream: TextIO) -> None:
    """Point a stream at nothing, so that the interpreter's own flush at exit stays quiet and keeps the status."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    except (OSError, ValueError):  # the stream is no file, or is closed
        pass


def settle() -> None:
    """Before the process ends: what a full or broken stream still holds is forgotten."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            drop(stream)
