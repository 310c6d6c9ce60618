"""``coli plan``: what would lie where, and why.  Needs no GPU and no weights.

Reads the files that a plan is made of (a config.json or a container, a heat file), asks ``coli.placement``, and shows
what it answers; decides nothing itself.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from coli import settings
from coli.cli import common
from coli.errors import ModelError, RequestError
from coli.log import logger
from coli.placement import (
    CpuFacts,
    DeviceFacts,
    ModelShape,
    Plan,
    Probe,
    budget_table,
    default_reserve_bytes,
    place_lines,
    plan,
    with_whole_layers,
)

HELP = "Show what would lie on which device, and why, with sums that add up. Needs no GPU and no weights."

_DEVICE_FORM = 'NAME=FREE[:GBPS[:LATENCY_US[:LAYER_US]]], such as "RTX 3070=7.5GiB:448:10:40"'
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a container folder, a Hugging Face folder, a GGUF file, a config.json, or demo"
    )
    parser.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="SPEC",
        help=f"plan for this card, and none of this machine's; may be repeated: {_DEVICE_FORM}; FREE as 8GiB or bytes; "
        "LAYER_US is what a layer that it takes whole costs besides its bytes",
    )
    parser.add_argument(
        "--cpu",
        metavar="GBPS",
        help="what the CPU's memory bus gives, in GB/s: with all speeds known, times are predicted",
    )
    for name in ("place", "devices", "vram", "heat", "context"):
        setting = settings.BY_NAME[name]
        parser.add_argument(setting.flag, metavar=name.upper(), help=setting.reason.replace("%", "%%"))
    common.add_reprobe(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON instead of its table")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw what lies where, and a token's milliseconds, as FILE.png (or .svg, .pdf)"
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="a line for each component, and each alternative with its speed"
    )


def run(args: argparse.Namespace) -> int:
    """The ``[place]`` lines go to standard error, the table (or JSON) to standard output."""
    if args.plot is not None:
        from coli.cli.plan_plot import check

        check(args.plot)  # before anything is measured
    shape = read_shape(args.model)
    cpu = None if args.cpu is None else CpuFacts(_number("--cpu", args.cpu, "GB/s, such as 40"))
    place, context = settings.get("place", args.place), _context(args.context, shape)
    devices, probe = _machine(args, place, cpu)
    made = plan(
        shape,
        [
            with_whole_layers(facts, shape, place, context, i, span_bytes).facts
            for i, (facts, span_bytes) in enumerate(devices)
        ],
        place=place,
        heat=read_heat(args.heat, shape),
        probe=probe,
        cpu=cpu,
        context=context,
    )
    log = logger("place")
    for line in place_lines(made, each=args.verbose):
        log.info(line)
    if made.prediction is None and devices:
        log.info("no times: they need the speed of the CPU (--cpu GBPS) and of each card (its GBPS in --device)")
    if args.plot is not None:
        from coli.cli.plan_plot import draw

        draw(made, args.model, args.plot)
        log.info("drawn: %s", args.plot)
    print(json.dumps({"model": args.model} | made.to_dict(), indent=1) if args.json else _text(made))
    return 0


def read_shape(model: str) -> ModelShape:
    """The shape of what MODEL names, from its small files: a checkpoint's is that of its container in default formats.

    Raises ModelError naming the file and the field.
    """
    from coli.config import read_json_object
    from coli.container.reader import Container
    from coli.convert.gguf_file import is_gguf
    from coli.convert.resolve import find_model, is_container

    path = Path(model).expanduser()
    if is_gguf(path):
        from coli.convert.gguf import GgufCheckpoint

        with GgufCheckpoint(find_model(model)) as checkpoint:
            return ModelShape.from_config(json.loads(checkpoint.extra_files()["config.json"]))
    if not path.is_file():
        path = find_model(model)
        if is_container(path):
            with Container.open(path) as container:
                return ModelShape.from_container(container)
        path = path / "config.json"
    try:
        return ModelShape.from_config(read_json_object(path))
    except ModelError as error:
        # The shape knows no file: its messages begin with what it calls every one of them.
        raise ModelError(str(error).replace("config.json: ", f"{path}: ", 1)) from None


def read_heat(flag: str | None, shape: ModelShape) -> list[list[float]] | None:
    """Counts [layer][expert]; None for no heat.

    A file that is named by the flag has to be this model's heat; one from the environment is warned about.
    """
    name = settings.get("heat", flag)
    if name is None:
        return None
    from coli.tier import heatfile

    wanted = heatfile.HeatShape(shape.layers, shape.n_experts, shape.topk)
    by_hand = flag is not None
    counts = heatfile.read_heat(name, wanted) if by_hand else heatfile.HeatFile(name, wanted, by_hand=False).counts
    return None if counts is None else counts.tolist()


def parse_device(text: str) -> DeviceFacts:
    """One ``--device``, with the default reserve.  The name may hold anything, ``=`` and ``:`` too."""
    name, equals, spec = text.rpartition("=")
    free, *speeds = spec.split(":")
    if not equals or not name or len(speeds) > 3:
        raise RequestError(f"--device {text!r}: expected {_DEVICE_FORM}", param="device")
    try:
        free_bytes = settings.parse_bytes(free)
    except ValueError as error:
        raise RequestError(f"--device {text!r}: FREE is {free!r}; expected {error}", param="device") from None
    what = {"gb_s": "GBPS, such as 448", "latency_us": "LATENCY_US, such as 10", "layer_us": "LAYER_US, such as 40"}
    numbers = {
        field: _number(f"--device {text!r}", speed, expected)
        for (field, expected), speed in zip(what.items(), speeds, strict=False)
    }
    return DeviceFacts(name, free_bytes, reserve_bytes=default_reserve_bytes(free_bytes), **numbers)


def _machine(
    args: argparse.Namespace, place: str, cpu: CpuFacts | None
) -> tuple[list[tuple[DeviceFacts, int | None]], Probe | None]:
    """The cards to plan for, those that are described or else this machine's, each with what runs of layers take of it;
    and these ones' figures, if any."""
    from coli.cli.figures import known_model

    known = known_model(args.model)

    def span_bytes(device: Any) -> int | None:
        from coli.placing import span_bytes_of

        return 0 if known is None else span_bytes_of(device, known.config, known.kv_dtype)

    if args.device:
        for flag in ("devices", "vram"):
            if getattr(args, flag) is not None:
                raise RequestError(
                    f"--{flag} is about this machine's cards, --device describes others: use one of them"
                )
        if args.reprobe:
            raise RequestError("--reprobe measures this machine's cards, --device describes others: use one of them")
        described = [parse_device(text) for text in args.device]
        if known is None:
            return [(facts, 0) for facts in described], None
        from coli.devices.cuda.device import CudaDevice

        return [(facts, span_bytes(CudaDevice)) for facts in described], None
    from coli.devices.choose import choose_devices

    allowed = settings.get("vram", args.vram)
    chosen = choose_devices(settings.get("devices", args.devices))
    try:
        probe = None
        if chosen and cpu is None:  # a speed that is given is what to plan with
            from coli.cli.figures import figures_beside

            if args.reprobe:
                from coli.probing import forget

                forget()
            probe = figures_beside(chosen, args.model, anyway=args.reprobe or place == "auto:time")
        facts = [DeviceFacts.from_device(device, allowed, speeds=cpu is not None) for device in chosen]
        return [(one, span_bytes(device)) for one, device in zip(facts, chosen, strict=True)], probe
    finally:
        for device in chosen:
            device.close()


def _context(flag: str | None, shape: ModelShape) -> int:
    """The context as ``coli run`` has it: the default, but not what is asked for, ends at the model's own limit."""
    context = settings.resolve("context", flag)
    if context.source == "default" and shape.max_context is not None:
        return min(context.value, shape.max_context)
    return context.value


def _number(source: str, text: str, expected: str) -> float:
    if not _NUMBER.fullmatch(text) or not float(text) < 1e9:
        raise RequestError(f"{source}: {text!r} is not a number; expected {expected}")
    return float(text)


def _text(made: Plan) -> str:
    sides = [f"cpu {made.cpu_bytes_per_token / 1e6:,.1f} MB"]
    sides += [f"device {i} {n_bytes / 1e6:,.1f} MB" for i, n_bytes in enumerate(made.device_bytes_per_token)]
    lines = [str(budget_table(made)), f"read for a token: {', '.join(sides)}"]
    if made.predicted_ms_per_token is not None:
        ms = made.predicted_ms_per_token
        lines.append(f"predicted: {ms:.2f} ms a token, {1e3 / ms:.1f} tok/s")
    return "\n".join(lines)
