"""``coli eval``: how well a model predicts a text."""

from __future__ import annotations

import argparse
import json
import time

from coli.cli import common
from coli.log import logger

HELP = (
    "Measure the perplexity of a text. It is cut into windows without overlap, each scored from an empty state; the "
    "first token of a window is not scored. nll is the mean over scored tokens, in nats."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)
    parser.add_argument("--text", required=True, metavar="FILE", help="the text, UTF-8 (- is standard input)")
    parser.add_argument("--window", type=int, default=512, metavar="N", help="tokens of a window (512)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a sentence")
    common.add_loading(parser)


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    text = common.read_text(args.text)
    with common.load_model(args) as model:
        ids = model.prompt_ids(text)
        start = time.perf_counter()
        with tqdm(total=len(ids), unit="tok", disable=None, leave=False) as bar:  # None: only on a terminal
            score = model.score(ids, window=args.window, progress=bar.update)
        elapsed_s = time.perf_counter() - start
    logger("eval").info("%d tokens in %.2f s, %.1f tok/s", len(ids), elapsed_s, len(ids) / elapsed_s)
    if args.json:
        print(json.dumps(score._asdict()))
    else:
        print(f"perplexity {score.perplexity:.4f} (nll {score.nll:.6f}, {score.tokens} scored tokens)")
    return 0
