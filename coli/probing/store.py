"""Where figures are kept: one JSON file for the CPU of a machine and one for each card, in the cache folder.

A file says what it is of, in full; its name is a hash of that.  One that is damaged, or of something else than its name
says, is one warning and counts as none: what it should have held is measured anew.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coli.errors import ColiError, PlacementError
from coli.files import cache_dir, replace_file
from coli.log import logger
from coli.placement import CpuSpeeds, Speeds, speeds_from_dict

VERSION = 4  # of what the figures mean

_UNREADABLE = (OSError, ValueError, TypeError, KeyError, RecursionError)  # of a file that is no record of figures

Subject = dict[str, Any]  # what figures are of: JSON types, the same every time

_log = logger("probe")


def folder() -> Path:
    """Where figures are kept.  Raises ColiError where there is no such place: they are measured each time then."""
    return cache_dir() / "probe"


def path_of(subject: Subject) -> Path:
    """The file of what is to be measured."""
    name = hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()[:12]
    return folder() / f"{subject['kind']}-{name}.json"


def load(subject: Subject) -> Speeds | CpuSpeeds | None:
    """What was measured of it before, if anything."""
    try:
        path = path_of(subject)
    except ColiError:
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields["version"] != VERSION:
            _log.info("%s: of version %s of the figures; measured anew", path, fields["version"])
            return None
        if fields["of"] != subject:
            raise ValueError(f"it is of {fields['of']}")
        figures = speeds_from_dict(fields["figures"])
        if _names(asdict(figures)) != _names(fields["figures"]):
            raise ValueError("figures of another kind")
        if isinstance(figures, CpuSpeeds) != (subject["kind"] == "cpu"):
            raise ValueError("figures of another kind")
        return figures
    except FileNotFoundError:
        return None
    except (*_UNREADABLE, OverflowError, AttributeError, PlacementError) as error:
        _log.warning("%s: not what was measured here (%s); measured anew", path, error)
        return None


def _names(figures: Any) -> Any:
    """The names of figures, and of theirs."""
    return {name: _names(value) for name, value in figures.items()} if isinstance(figures, dict) else None


def save(subject: Subject, figures: Speeds | CpuSpeeds) -> None:
    """Keep figures; a reader sees the old file or the new one.  Where nothing can be written that is one warning."""
    fields = {"version": VERSION, "of": subject, "figures": asdict(figures), "date": datetime.date.today().isoformat()}
    try:
        path = path_of(subject)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(fields, indent=1).encode())
    except ColiError as error:
        _log.warning("%s; what was measured is not kept", error)
    except OSError as error:
        _log.warning("%s: cannot be written (%s); measured again next time", path, error.strerror)


def forget(machine: str) -> None:
    """Remove what was measured of this machine's CPU, whatever the team, and of all cards."""
    try:
        kept = list(folder().glob("*.json"))
    except ColiError:
        return
    for path in kept:
        try:
            subject = json.loads(path.read_text(encoding="utf-8"))["of"]
            if subject["kind"] == "cpu" and subject["machine"] != machine:
                continue
        except _UNREADABLE:
            pass  # nobody can use it
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s: cannot be removed (%s)", path, error.strerror)
