"""``coli synth``: a model of a real geometry with random weights, for benchmarks and for rehearsing a placement."""

from __future__ import annotations

import argparse

HELP = "write a random-weight model of a named geometry"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("geometry", metavar="GEOMETRY", help="small8 (8 layers, 64 experts) or qwen36-35b")
    parser.add_argument("out", metavar="OUT", help="folder to write, or file with --gguf")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--hf", action="store_true", help="a bf16 Hugging Face checkpoint instead of a container")
    form.add_argument("--gguf", action="store_true", help="a GGUF of the same geometry (experts Q4_0, the rest Q8_0)")
    parser.add_argument("--skew", type=float, default=0.0, metavar="S",
                        help="popularity of expert rank r is r**-S; 0: even")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    import sys

    from tqdm import tqdm

    from coli.convert.synth_files import write_gguf, write_hf, write_synthetic
    from coli.convert.synthetic import Synthetic, geometry
    from coli.errors import RequestError
    from coli.log import logger

    if not 0.0 <= args.skew <= 4.0:
        raise RequestError(f"--skew is {args.skew}; expected 0 (even) to 4", "--skew")
    if not 0 <= args.seed < 2**64:
        raise RequestError(f"--seed is {args.seed}; expected 0 to 2**64 - 1", "--seed")
    weights = Synthetic(geometry(args.geometry), seed=args.seed, skew=args.skew)
    with tqdm(unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        if args.hf:
            n_bytes = write_hf(weights, args.out, progress=bar.update)
        elif args.gguf:
            n_bytes = write_gguf(weights, args.out, progress=bar.update)
        else:
            n_bytes = write_synthetic(weights, args.geometry, args.out, progress=bar.update)
    logger("synth").info("%s: %s, %s bytes of weights", args.out, args.geometry, f"{n_bytes:,}")
    return 0
