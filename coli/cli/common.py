"""What several verbs share: the flags of loading and of sampling, reading a text, showing an answer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from coli import settings
from coli.cli import streams
from coli.errors import RequestError
from coli.log import logger

if TYPE_CHECKING:
    from coli.devices.base import Device
    from coli.engine.generate import Generation
    from coli.model import Model

LOADING = ("place", "devices", "vram", "heat", "threads", "context")  # names of settings and of load()'s keywords
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_DRAWING: dict[str, tuple[float, ...]] = {"top_k": (0, -1), "top_p": (1.0,), "min_p": (0.0,), "seed": ()}
"""What acts on a draw alone, and the values with which it does nothing."""
MODEL_HELP = (
    "a container folder, a Hugging Face folder, a GGUF file, the id of a model on the Hugging Face hub (owner/name, "
    "downloaded once), or demo"
)
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def add_model(parser: argparse.ArgumentParser) -> None:
    """The MODEL argument."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)


def add_loading(parser: argparse.ArgumentParser) -> None:
    """The flags of the settings that loading a model reads; their help is the settings' own."""
    group = parser.add_argument_group("loading")
    for name in LOADING:
        setting = settings.BY_NAME[name]
        assert setting.flag is not None
        default = "" if setting.default is None else f" (default {setting.default}"
        default = f"{default}; environment {setting.env[0]})" if default else f" (environment {setting.env[0]})"
        group.add_argument(setting.flag, metavar=name.upper(), help=(setting.reason + default).replace("%", "%%"))
    add_reprobe(group)


def add_reprobe(group: Any) -> None:
    """--reprobe, for the verbs that place something."""
    group.add_argument(
        "--reprobe", action="store_true", help="measure the CPU and the cards anew; else what was measured once is used"
    )


def add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """The flags of an answer's length and sampling."""
    group = parser.add_argument_group("answer")
    shown = "until the context is full" if max_tokens is None else max_tokens
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help=f"at most N tokens ({shown})")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="only the K most probable tokens; 0 is all")
    group.add_argument("--top-p", type=float, metavar="P", help="only the most probable tokens that make P together")
    group.add_argument("--min-p", type=float, metavar="P", help="only tokens P times as probable as the best one")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="divides what the text already holds")
    group.add_argument("--presence-penalty", type=float, metavar="X", help="subtracted once from what the answer holds")
    group.add_argument(
        "--frequency-penalty", type=float, metavar="X", help="subtracted for each time the answer holds it"
    )
    group.add_argument("--seed", type=int, metavar="N", help="any 64-bit number; the same seed gives the same text")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the answer; may be repeated")


def load_model(args: argparse.Namespace) -> Model:
    """The model that the arguments of `add_model` and `add_loading` name."""
    from coli.model import load

    model = args.model
    if args.reprobe:
        from coli.convert.resolve import resolve_model

        model = resolve_model(model)  # first: what was measured is not thrown away for a mistyped name
        _forget_what_is_measured_again(args)
    return load(model, **{name: getattr(args, name) for name in LOADING})


def _forget_what_is_measured_again(args: argparse.Namespace) -> None:
    """Drop the kept figures where loading measures new ones; else say that there is nothing to measure."""
    from coli.devices.choose import choose_devices
    from coli.probing import forget

    devices = choose_devices(settings.get("devices", args.devices)) if settings.get("vram", args.vram) != 0 else []
    try:
        reason = _why_nothing_is_measured(devices, settings.get("place", args.place))
    finally:
        for device in devices:
            device.close()
    if reason is None:
        forget()
    else:
        logger("probe").info("--reprobe: nothing to measure, %s; what was measured before is kept", reason)


def _why_nothing_is_measured(devices: Sequence[Device], place: str) -> str | None:
    """As `coli.placing` has it: figures are for devices, and without an identity for auto:time alone."""
    if not devices:
        return "since no card is in use"
    nameless = [device.name for device in devices if device.uuid is None]
    if nameless and place != "auto:time":
        return f"since {nameless[0]} has no identity to keep figures under (--place auto:time measures it each time)"
    return None


def check_sampling(args: argparse.Namespace) -> None:
    """RequestError for a flag of `add_sampling` out of its range: said before a model is loaded."""
    from coli.engine.generate import check_max_tokens
    from coli.engine.sampler import SamplingParams
    from coli.text.stops import check_stops

    given = given_sampling(args)
    check_max_tokens(given.pop("max_tokens"))
    check_stops(given.pop("stop"))
    SamplingParams(**given)


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `Model.generate` from the flags of `add_sampling`, those that were given."""
    given = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}
    return {**given, "max_tokens": args.max_tokens, "seed": args.seed, "stop": args.stop}


def sampling_of(args: argparse.Namespace, model: Model, defaults: dict[str, Any] | None = None) -> dict[str, Any]:
    """`given_sampling` over ``defaults``, with a temperature where the flags ask for a draw.

    A draw needs a temperature: without --temperature, or a default above 0, it is the one of the checkpoint's
    generation_config.json, else 1.  What has no effect beside --temperature 0 is named.
    """
    sampling = {**(defaults or {}), **given_sampling(args)}
    drawing = [
        f"--{name.replace('_', '-')}" for name, idle in _DRAWING.items() if getattr(args, name) not in (None, *idle)
    ]
    if not drawing or sampling.get("temperature"):
        return sampling
    if args.temperature is not None:
        verb = "has" if len(drawing) == 1 else "have"
        logger("run").warning("%s %s no effect at --temperature 0, which is greedy", ", ".join(drawing), verb)
        return sampling
    checkpoints = model.sampling_defaults.get("temperature")
    sampling["temperature"] = checkpoints or 1.0
    whose = "generation_config.json's" if checkpoints else "generation_config.json gives none to draw at"
    logger("run").info(
        "temperature %g (%s): %s asks for a draw; --temperature 0 is greedy",
        sampling["temperature"], whose, drawing[0],
    )  # fmt: skip
    return sampling


def read_text(path: str) -> str:
    """The text of a file, or of standard input for ``-``, to the character; RequestError where it is not UTF-8."""
    source = "standard input" if path == "-" else path
    if path == "-" and "stdin" in streams.CLOSED:
        raise RequestError("standard input is closed, and the text was to be read from it; name a file or pipe it in")
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{source}: not UTF-8 at byte {error.start}; convert it to UTF-8") from None
    except OSError as error:
        raise RequestError(f"{source}: cannot be read ({error.strerror})") from None


def speed_line(generation: Generation) -> str:
    """The speeds of one answer in words; a phase that took no time has no speed."""
    computed = generation.prompt_tokens - generation.reused_tokens if generation.prefill_s else 0
    steps = len(generation.ids) - 1 if generation.decode_s else 0
    parts = []
    for name, tokens, seconds in (("prompt", computed, generation.prefill_s), ("decode", steps, generation.decode_s)):
        speed = f"{tokens / seconds:.1f} tok/s" if tokens and seconds else "no speed"
        parts.append(f"{name} {tokens} tokens in {seconds:.2f} s, {speed}")
    if generation.reused_tokens:
        parts.append(f"{generation.reused_tokens} prompt tokens reused")
    return "; ".join(parts)


def cut_line(generation: Generation, model: Model, max_tokens: int | None, *, chat: bool) -> str | None:
    """What cut an answer off, in words, and the flag that moves it; None for one that ended by itself.

    max_tokens : as it was asked for.   chat : the answer has channels, and may have been cut inside the thought.
    """
    if generation.finish_reason != "length":
        return None
    where = "cut off inside the thought" if chat and _ends_in_thought(generation, model) else "cut off"
    if max_tokens is not None and len(generation.ids) >= max_tokens:
        return f"{where} by --max-tokens {max_tokens} (a larger one gives more)"
    largest = model.config.max_position_embeddings
    how = "raise --context for more" if model.context < largest else "the model takes no more"
    return f"{where}: the context of {model.context} tokens is full ({how})"


def _ends_in_thought(generation: Generation, model: Model) -> bool:
    """Whether the last token of a conversation's answer belongs to its thought."""
    from coli.text.thinking import ThinkingSplitter, thinking_of_prompt

    prompt = model.tokenizer.decode(generation.session.ids[: generation.prompt_tokens])
    splitter = ThinkingSplitter(thinking_of_prompt(prompt))
    splitter.feed(model.tokenizer.decode(generation.ids))
    return splitter.in_reasoning


class ThoughtWriter:
    """Shows a model's reasoning on standard error, dimmed, where that is a terminal; nowhere else."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._open = False

    def write(self, text: str) -> None:
        if self._is_terminal:
            self._stream.write(text if self._open else _DIM + text)
            self._stream.flush()
            self._open = True

    def end(self) -> None:
        """Back to plain text, on a line of its own."""
        if self._open:
            self._stream.write(_PLAIN + "\n\n")
            self._stream.flush()
            self._open = False
