"""``coli convert``: a Hugging Face checkpoint or a GGUF file becomes a container."""

from __future__ import annotations

import argparse
import json

HELP = (
    "Convert a Hugging Face checkpoint, or a GGUF file (pip install 'coli[gguf]'), into a container. It is read once, "
    "piece by piece, and checked at the end; after an interruption the same command goes on where it was (its work "
    "lies in DST.partial). A full disk ends it with status 2 and keeps what is done. 16 bits, for both, keeps every "
    "weight as stored: the reference path."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "src", metavar="SRC", help="a Hugging Face folder, the id of one on the hub (owner/name), or a GGUF file"
    )
    parser.add_argument("dst", metavar="DST", help="the container's folder; it must not exist, or be empty")
    parser.add_argument("--trunk-bits", type=int, choices=(4, 8, 16), default=8, help="projections and lm_head (8)")
    parser.add_argument("--expert-bits", type=int, choices=(4, 8, 16), default=4, help="routed experts (4)")
    parser.add_argument(
        "--expert-scales",
        choices=("group", "row"),
        help="scales of 4-bit experts: of 128 columns each, or of a row (group)",
    )
    parser.add_argument("--json", action="store_true", help="print what was done as one JSON object")


def run(args: argparse.Namespace) -> int:
    from coli.container.writer import check_destination
    from coli.convert.convert import Options, convert
    from coli.convert.resolve import find_model, is_container
    from coli.errors import ModelError

    # Before a download that may take an hour.
    Options.checked(args.trunk_bits, args.expert_bits, args.expert_scales)
    check_destination(args.dst)
    src = find_model(args.src)
    if is_container(src):
        raise ModelError(f"{src}: a container already; SRC is a Hugging Face folder or a GGUF file")
    done = convert(
        src, args.dst, trunk_bits=args.trunk_bits, expert_bits=args.expert_bits, expert_scales=args.expert_scales
    )
    print(json.dumps(done.to_dict()) if args.json else done.path)
    return 0
