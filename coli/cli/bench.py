"""``coli bench``: tokens a second of a model, or GB/s of the kernels beside what the memory gives."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from coli.cli.common import LOADING, MODEL_HELP, add_loading, load_model
from coli.errors import RequestError

HELP = "measure a model's speed, or the kernels' beside the memory's; compare two records"

_SIZES = {"prompt_tokens": (512, 16), "decode_tokens": (64, 48), "repeats": (5, 2)}  # plain, and with --calibrate

_BEYOND_CACHES = 4  # times the last caches: so many bytes, read again and again, come from memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL", help=f"{MODEL_HELP}, the default")
    parser.add_argument("--kernels", action="store_true", help="the products of a 35B token instead of a model")
    parser.add_argument("--compare", nargs=2, metavar=("OLD", "NEW"), help="two records of --json; measures nothing")
    parser.add_argument(
        "--calibrate", action="store_true",
        help="off, auto and lists in several allowances (--vram A,B,...), predicted beside measured, bits compared",
    )  # fmt: skip
    for flag, what, default, calibrating in (
        ("--prompt-tokens", "length of the prompt", *_SIZES["prompt_tokens"]),
        ("--decode-tokens", "tokens decoded a repeat", *_SIZES["decode_tokens"]),
        ("--repeats", "repeats; figures are medians", *_SIZES["repeats"]),
    ):
        parser.add_argument(
            flag, type=int, metavar="N", help=f"{what} ({default}; {calibrating} with --calibrate)"
        )
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    add_loading(parser)


def run(args: argparse.Namespace) -> int:
    from coli.cli.bench_record import compare, model_record, read_record

    if args.compare:
        print(compare(*(read_record(path) for path in args.compare)))
        return 0
    for flag, sizes in _SIZES.items():
        if getattr(args, flag) is None:
            setattr(args, flag, sizes[args.calibrate])
        if getattr(args, flag) < 1:
            raise RequestError(f"--{flag.replace('_', '-')} is {getattr(args, flag)}; expected at least 1", flag)
    if args.kernels:
        return _kernels(args)
    if args.calibrate:
        from coli.cli import calibrate

        return calibrate.run(args)
    with load_model(args) as model:
        least = 2 * max(args.repeats, 5) + 4
        if model.context < least:
            raise RequestError(
                f"the context of {model.context} is too short to measure in; {least} are needed", "context"
            )
        if args.prompt_tokens + args.decode_tokens > model.context:
            raise RequestError(
                f"{args.prompt_tokens} + {args.decode_tokens} tokens do not fit the context of {model.context}; "
                "ask for fewer or raise --context",
                "prompt_tokens",
            )
        given = {name: getattr(args, name) for name in LOADING}
        record = model_record(model, args.prompt_tokens, args.decode_tokens, args.repeats, given)
    if args.json:
        print(json.dumps(record, indent=1))
        return 0
    for name, row in record["results"].items():
        print(f"{name:<10} {row['tok_s']:10.1f} tok/s   {row['tokens']} tokens, median of {row['repeats']}")
    print(_read_line(record["results"]["decode"], record["threads"]))
    return 0


def _read_line(decode: dict[str, Any], threads: int) -> str:
    """What decode reads beside the ruler, which goes over the same weights: of small ones it measures caches."""
    held = decode["n_bytes"] < _BEYOND_CACHES * decode["last_caches_bytes"]
    line = (
        f"{'weights' if held else 'memory':<10} {decode['gb_s']:10.1f} GB/s    {100 * decode['ratio']:.0f} % of the "
        f"{decode['read_gb_s']:.1f} GB/s that {threads} thread{'s' if threads != 1 else ''} read"
    )
    if not held:
        return line
    mb, caches_mb = decode["n_bytes"] / 1e6, decode["last_caches_bytes"] / 1e6
    return f"{line} of these {mb:,.1f} MB; with {caches_mb:,.1f} MB of caches that is not the memory's speed"


def _kernels(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from coli import settings
    from coli._core import step
    from coli.engine.benchmarks import kernel_benches
    from coli.threads.claims import claim_threads

    claim = claim_threads(args.threads, openmp_built=step.has_openmp())
    rows: list[dict[str, Any]] = []
    try:
        benches = kernel_benches(claim.binding.threads, list(claim.binding.cpus) or None, settings.get("isa"))
        for bench in tqdm(benches, total=6, disable=not sys.stderr.isatty()):
            rows.append(bench.measure(max(args.repeats, 5)).to_dict())
    finally:
        claim.release()
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    print(f"{'kernel':<28} {'threads':>7} {'GB/s':>8} {'read GB/s':>10} {'ratio':>6}")
    for row in rows:
        print(
            f"{row['name']:<28} {row['threads']:>7} {row['gb_s']:>8.1f} {row['read_gb_s']:>10.1f} {row['ratio']:>6.2f}"
        )
    return 0
