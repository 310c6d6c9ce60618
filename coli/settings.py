"""Every setting once: name, default, unit, environment variable, flag and the reason one would change it.

A value given by a flag (or as an argument of ``coli.load``) beats the environment, which beats the default.  This is
the only module that reads ``COLI_*`` variables; ``python -m coli.settings`` prints the reference page from the table.
It knows no machine and no model: whether a device exists or a context fits is judged where it is used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from coli.errors import RequestError

_UNITS = {
    "": 1, "B": 1,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_DEVICE_FORMS = "auto, none, or a list such as 0,2 or 0000:65:00.0 or GPU-1f2e3d4c or fake:8GiB"


def parse_bytes(text: str) -> int:
    """Bytes from ``"6442450944"``, ``"6GiB"`` or ``"6.5 GB"``; ValueError otherwise."""
    match = _BYTES.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError("bytes, such as 6442450944 or 6GiB")
    return (
        int(float(match[1]) * _UNITS[match[2].upper()]) if "." in match[1] else int(match[1]) * _UNITS[match[2].upper()]
    )


def parse_devices(text: str) -> str | list[int | str]:
    """``"auto"``, ``"none"``, or the items of a comma-separated list: an index as an int, any other name as it is."""
    if text.strip() in ("auto", "none"):
        return text.strip()
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise ValueError(_DEVICE_FORMS)
    return [int(item) if item.isdecimal() else item for item in items]


_LEAST_BARE_BYTES = 1 << 20


def _memory(text: str) -> int:
    """Bytes of memory, where a small number without a unit is one of GiB whose unit was forgotten."""
    n_bytes, bare = parse_bytes(text), text.strip()
    if bare[-1].isdigit() and 0 < float(bare) < _LEAST_BARE_BYTES:
        raise ValueError(f"bytes with their unit: this is {bare} bytes; write {bare}GiB, or {bare}B if it is meant")
    return n_bytes


def _vram(text: str) -> str | int:
    return "auto" if text.strip() == "auto" else _memory(text)


def _vram_gib(text: str) -> str | int:
    """The older variable: GiB as a number, where 0 meant auto."""
    if text.strip() in ("auto", "0"):
        return "auto"
    try:
        gib = float(text)
    except ValueError:
        gib = -1.0
    if not 0 < gib < float("inf"):
        raise ValueError("a number of GiB, or auto")
    return int(gib * (1 << 30))


def _count(what: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < 1:
            raise ValueError(f"a number of {what}, 1 or more")
        return int(text)

    return parse


def _number_up_to(largest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.strip().isdecimal() or int(text) > largest:
            raise ValueError(f"a number, 0 to {largest}")
        return int(text)

    return parse


def _list(text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise ValueError("a comma-separated list")
    return items


MAX_THREADS = 1024  # what the kernels' team is compiled for (_core/src/team.h)


def _threads(text: str) -> str | int:
    if text.strip() == "auto":
        return "auto"
    if not text.strip().isdecimal() or len(text.strip()) > 4 or not 1 <= int(text) <= MAX_THREADS:
        raise ValueError(f"a number of threads, 1 to {MAX_THREADS}, or auto")
    return int(text)


def _one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip() not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return text.strip()

    return parse


@dataclass(frozen=True)
class Setting:
    """One setting.

    name : the keyword of ``coli.load`` where there is one.   unit : of the value, in words.
    env : variables that set it, the present name first, then older ones that are still accepted.
    parse : text -> value; its ValueError says what is accepted.
    """

    name: str
    default: Any
    unit: str
    env: tuple[str, ...]
    flag: str | None
    reason: str
    parse: Callable[[str], Any] = str


SETTINGS: tuple[Setting, ...] = (
    Setting("place", "auto", "auto, auto:bytes, auto:time, off, or a list", ("COLI_PLACE",), "--place",
            "What lies on which device. A list such as lmhead=0,dnproj=0:20+1:20,experts=0 is obeyed as written; off "
            "leaves the trunk to the CPU, and experts fill the devices (--devices none: the CPU alone)."),
    Setting("devices", "auto", _DEVICE_FORMS, ("COLI_DEVICES", "COLI_GPUS"), "--devices",
            "Which devices may be used at all, and in which order they are numbered.", parse_devices),
    Setting("vram", "auto", "bytes of each device, or auto", ("COLI_VRAM", "CUDA_EXPERT_GB"), "--vram",
            "How much of each device's memory may be taken; auto is what is free less a reserve, 0 is none. "
            "CUDA_EXPERT_GB counts GiB and reads 0 as auto.", _vram),
    Setting("heat", None, "file", ("COLI_HEAT", "HEAT_FILE"), "--heat",
            "How often each expert was chosen: read at load to fill the devices hottest first, written back at close. "
            "Not set, it is a file of the model's own in the cache folder, where there are devices."),
    Setting("threads", "auto", "threads", ("COLI_THREADS",), "--threads",
            "Threads of the engine; auto is one for each fast physical core within the affinity mask and the quota.",
            _threads),
    Setting("context", 8192, "tokens", ("COLI_CONTEXT",), "--context",
            "The longest prompt plus answer. Memory for it grows as it is used; the model's own limit holds.",
            _count("tokens")),
    Setting("host", "127.0.0.1", "address", ("COLI_HOST",), "--host",
            "The address that coli serve listens on; 0.0.0.0 lets other machines in, and without COLI_API_KEY it asks "
            "none of them for a key."),
    Setting("port", 8080, "number", ("COLI_PORT",), "--port",
            "The port that coli serve listens on; 0 takes any free one.", _number_up_to(65535)),
    Setting("api_key", None, "text", ("COLI_API_KEY",), None,
            "What clients of coli serve must send as their bearer token, and what coli chat --url sends."),
    Setting("parallel", 8, "answers", ("COLI_PARALLEL",), "--parallel",
            "Answers that coli serve computes at once, in one pass over the weights; each holds a state of its own.",
            _count("answers")),
    Setting("queue", 64, "requests", ("COLI_QUEUE",), "--queue",
            "Requests that may wait for a place; what comes beyond is answered 429 with Retry-After.",
            _number_up_to(100_000)),
    Setting("prefix_cache", 1 << 30, "bytes", ("COLI_PREFIX_CACHE",), "--prefix-cache",
            "Memory for states of earlier prompts, so that a prompt that begins alike is not computed again; "
            "0 keeps none.",
            _memory),
    Setting("prefix_every", 512, "tokens", ("COLI_PREFIX_EVERY",), "--prefix-every",
            "A long prompt leaves a state each so many tokens, besides the one at its end.", _count("tokens")),
    Setting("cors", None, "origins, comma-separated, or *", ("COLI_CORS",), "--cors",
            "Web pages of these origins may use coli serve from a browser, such as https://example.org.", _list),
    Setting("allow_host", None, "host names, comma-separated, or *", ("COLI_ALLOW_HOST",), "--allow-host",
            "Names by which clients reach coli serve, besides addresses, localhost and this machine's own.", _list),
    Setting("max_body", 8 << 20, "bytes", ("COLI_MAX_BODY",), "--max-body",
            "The largest request that coli serve reads.", parse_bytes),
    Setting("isa", None, "instruction set", ("COLI_ISA",), None,
            "Forces one kernel path, to compare paths with each other; refused when the processor lacks it.",
            _one_of("scalar", "avx2", "avxvnni", "avx512vnni", "neon")),
    Setting("log", "info", "level", ("COLI_LOG",), None,
            "quiet shows errors only; debug adds detail and the traceback of an internal error.",
            _one_of("quiet", "info", "debug")),
    Setting("no_openmp", None, "any text", ("COLI_NO_OPENMP",), None,
            "Read by setup.py: build the serial CPU path even where OpenMP is found."),
    Setting("build_jobs", None, "processes", ("COLI_BUILD_JOBS",), None,
            "Read by setup.py: how many sources are compiled at once.", _count("processes")),
)  # fmt: skip

BY_NAME: Mapping[str, Setting] = {setting.name: setting for setting in SETTINGS}
_PARSERS = {"CUDA_EXPERT_GB": _vram_gib}  # an older variable whose values are written in another unit


class Value(NamedTuple):
    """A setting's value and where it came from: a flag, a variable's name, or ``"default"``."""

    value: Any
    source: str


def resolve(name: str, given: Any = None, environ: Mapping[str, str] | None = None) -> Value:
    """The value of setting ``name``: ``given`` if it is not None, else the environment's, else the default.

    given : the flag's text or the caller's value; text and numbers are parsed like the variable, other objects (a list
        of devices) are taken as they are.   An empty variable counts as unset.
    Raises RequestError naming the flag or variable, its value and what is accepted.
    """
    setting, source = BY_NAME[name], source_of(name, given, environ)
    if given is not None:
        if not isinstance(given, (str, int, float)):
            return Value(given, source)
        return Value(_parse(setting.parse, str(given), source, name), source)
    if source == "default":
        return Value(setting.default, source)
    environ = os.environ if environ is None else environ
    return Value(_parse(_PARSERS.get(source, setting.parse), environ[source], source, name), source)


def source_of(name: str, given: Any = None, environ: Mapping[str, str] | None = None) -> str:
    """Where the value of setting ``name`` comes from: its flag, the name of a variable, or "default"."""
    setting = BY_NAME[name]
    if given is not None:
        return setting.flag or setting.name
    environ = os.environ if environ is None else environ
    return next((variable for variable in setting.env if environ.get(variable, "").strip()), "default")


def as_given(message: str, given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> str:
    """A message that calls settings by their variables, with the names that the user set them by.

    given : settings by name, as for `resolve`; other keys are passed over.
    """
    for name in BY_NAME.keys() & given.keys():
        source = source_of(name, given[name], environ)
        if source != "default":
            message = re.sub(rf"\b{BY_NAME[name].env[0]}\b", source, message)
    return message


def get(name: str, given: Any = None, environ: Mapping[str, str] | None = None) -> Any:
    """`resolve` without the source."""
    return resolve(name, given, environ).value


def _parse(parse: Callable[[str], Any], text: str, source: str, name: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise RequestError(f"{source}={text!r} is not valid: expected {error}", param=name) from None


def complaints(environ: Mapping[str, str] | None = None) -> Iterator[str]:
    """One line for each ``COLI_*`` variable that no setting reads, and each older name beside a newer one."""
    environ = os.environ if environ is None else environ
    known = [variable for setting in SETTINGS for variable in setting.env]
    for variable in sorted(environ):
        if variable.startswith("COLI_") and variable not in known:
            import difflib  # only where something is wrong

            nearest = difflib.get_close_matches(variable, known, n=1, cutoff=0.0)[0]
            yield f"{variable} is not a setting of coli and has no effect; the nearest is {nearest}"
    for setting in SETTINGS:
        used = [variable for variable in setting.env if environ.get(variable, "").strip()]
        for ignored in used[1:]:
            yield f"{ignored} has no effect beside {used[0]}, which sets the same thing"


def reference_page() -> str:
    """The settings as a page of Markdown, ending in a newline; docs/settings.md is this text."""
    lines = [
        "# Settings",
        "",
        "Made by `python -m coli.settings` from the table in `coli/settings.py`; edit that one.",
        "",
        "A flag (or the keyword of the same name of `coli.load`) beats the environment, which beats the default. Where",
        "a setting has several variables, the first is its present name and wins. An empty variable counts as unset.",
        "An unknown `COLI_*` variable is named in a warning.",
        "",
        "| setting | flag | environment | default | value | why change it |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for s in SETTINGS:
        flag = f"`{s.flag}`" if s.flag else ""
        variables = ", ".join(f"`{variable}`" for variable in s.env)
        default = "" if s.default is None else f"`{s.default}`"
        lines.append(f"| {s.name} | {flag} | {variables} | {default} | {s.unit} | {s.reason} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference_page(), end="")
