"""The error tree.  Every message says what was asked, what was found, where, and what to do.

A ``ColiError`` reaches a person as one line and exit status 2; anything else is a bug of ours.
"""

from __future__ import annotations


class ColiError(Exception):
    """Base of every error that coli raises on purpose."""


class ModelError(ColiError):
    """A checkpoint, container, configuration or tokenizer that cannot be used as it is."""


class PlacementError(ColiError):
    """A placement that cannot be: a malformed list, or one that does not fit."""


class BackendError(ColiError):
    """A device or kernel path that is missing or failed.

    kind : "missing", "out of memory", "launch" or "lost".
    """

    def __init__(self, message: str, kind: str = "missing") -> None:
        super().__init__(message)
        self.kind = kind


class RequestError(ColiError):
    """A prompt or a parameter out of its range.  ``param`` names the field where there is one."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
