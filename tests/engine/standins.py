"""Stand-ins for cards that more than one of these tests places a model on, and what is said of a placement."""

from __future__ import annotations

import logging

from coli.devices.fake import FakeDevice

MiB = 1 << 20
CONTEXT = 512  # of the models that `cpu` and `load` of conftest.py make


class ByLayer(FakeDevice):
    """A device that takes layers, but no runs of them."""

    span_bytes = None


def said(caplog, level: int = logging.WARNING) -> list[str]:
    """The [place] lines of this level and above."""
    return [r.getMessage() for r in caplog.records if r.name == "coli.place" and r.levelno >= level]
