"""The tagged lines on standard error: ``[load] [place] [tier] [threads] [cuda] [serve]``.

Standard output belongs to the model's answer.  ``COLI_LOG`` (quiet, info, debug) sets the level.
"""

from __future__ import annotations

import logging
import sys

_LEVELS = {"quiet": logging.ERROR, "info": logging.INFO, "debug": logging.DEBUG}


class _Stderr(logging.StreamHandler):
    """Writes to whatever ``sys.stderr`` is when a line is said, not to what it was at start."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):  # type: ignore[override]
        return sys.stderr


class _TagFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        tag = record.name.rpartition(".")[2]
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"[{tag}] {level}{record.getMessage()}"


def logger(tag: str) -> logging.Logger:
    """The logger behind one tag, e.g. ``logger("place").info("lmhead -> cuda0 ...")``."""
    return logging.getLogger(f"coli.{tag}")


def configure(level: str = "info") -> None:
    """Send the tagged lines to standard error.  Called by the command line, never by a library user."""
    root = logging.getLogger("coli")
    root.setLevel(_LEVELS[level])
    if not root.handlers:
        handler = _Stderr()
        handler.setFormatter(_TagFormatter())
        root.addHandler(handler)
        root.propagate = False
