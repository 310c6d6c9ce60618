"""What experts that change places beside the decode cost it on a card: stretches with and without, in one run.

    python bench/gpu_exchange.py [--geometry qwen36-35b] [--vram 6768] [--pairs 12] [--tokens 16]

The model is made in memory with random weights and an even router: one expert is as good as another, so the hit rate
stays what it is whoever changes places, and what is left is the price.  While one kind of stretch runs, every token
finds experts to exchange, as many as ``max_slowdown`` pays for; while the other runs, none.  Which comes first changes
from pair to pair.  All logits are compared with the CPU's as bits.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu_decode import MIB, PROMPT, begin, make, row, run  # noqa: E402

from coli.convert.synthetic import geometry  # noqa: E402
from coli.engine.session import Engine  # noqa: E402
from coli.placement import ModelShape, Probe  # noqa: E402
from coli.placing import Placed, _Placing, cpus_to_leave  # noqa: E402
from coli.probing.cards import measure_card  # noqa: E402
from coli.probing.host import measure_cpu  # noqa: E402
from coli.tier.promotion import Promotion  # noqa: E402

WARM = 32  # tokens ahead of the first stretch: the tier has to know what an upload takes
BETWEEN = 2  # tokens of a stretch that are not timed: uploads of the one before may still be on their way
AIM = 1.03
ALWAYS = Promotion(every_tokens=1, ratio=0.0, margin=-1e9)  # anybody may take anybody's place
NEVER = replace(ALWAYS, margin=1e9, max_slowdown=0.0)  # as many looks, which find nobody


def policies(pairs: int, tokens: int) -> list[Promotion]:
    """The policy of each token."""
    made = [ALWAYS] * WARM
    for pair in range(pairs):
        for policy in (NEVER, ALWAYS) if pair % 2 else (ALWAYS, NEVER):
            made += [policy] * (BETWEEN + tokens)
    return made


def decode(engine: Engine, ids: np.ndarray, before: Callable[[int], None]) -> tuple[np.ndarray, np.ndarray]:
    """Logits (T, vocabulary) and seconds of each decode step behind the prompt.   before : is told which is next."""
    session = engine.session()
    session.prefill(ids[:PROMPT])
    logits, seconds = np.zeros((len(ids) - PROMPT, engine.vocab_size), np.float32), []
    for number, token in enumerate(ids[PROMPT:].tolist()):
        before(number)
        start = time.perf_counter()
        step = session.step(token)
        seconds.append(time.perf_counter() - start)
        logits[number] = step
    session.close()
    return logits, np.array(seconds)


def compare(engine: Engine, placed: Placed, ids: np.ndarray, expected: np.ndarray, args: argparse.Namespace) -> None:
    """Decode the stretches and print what they took.   expected : the CPU's logits."""
    wanted = policies(args.pairs, args.tokens)
    tier, uploads = placed.tier, []  # those before each token, and behind the last
    residents, experts = (tier.stats()[name] for name in ("residents", "experts"))
    if residents in (0, experts):
        sys.exit(f"{residents} of {experts} experts are on the card: none can change places")

    def before(number: int) -> None:
        tier.exchange.policy = wanted[number]
        uploads.append(tier.stats()["uploads"])

    found, seconds = decode(engine, ids, before)
    stats = tier.stats()
    uploads.append(stats["uploads"])
    same = sum(bool((a.view(np.uint32) == b.view(np.uint32)).all()) for a, b in zip(expected, found, strict=True))

    step_s: dict[Promotion, list[float]] = {ALWAYS: [], NEVER: []}  # the mean of each stretch
    for first in range(WARM, len(wanted), BETWEEN + args.tokens):
        stretch = seconds[first + BETWEEN : first + BETWEEN + args.tokens]
        step_s[wanted[first]].append(float(stretch.mean()))
    n_exchanging = args.pairs * (BETWEEN + args.tokens)
    ratios = [busy / quiet for busy, quiet in zip(step_s[ALWAYS], step_s[NEVER], strict=True)]
    lower, _, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    busy, quiet = (statistics.median(step_s[policy]) for policy in (ALWAYS, NEVER))
    stall_s = stats["seconds"]["stall"]
    print(f"\n### Exchange, {args.geometry}, {placed.devices[0].name}, {time.strftime('%Y-%m-%d')}\n")
    row("VRAM MiB", "experts here", "hit rate", "ms a token, none", "ms a token, exchanging", "ratio",
        "quartiles of the pairs", f"within {AIM}", "uploads a token", "an upload stalls, us", "identical")  # fmt: skip
    row(*["---:"] * 11)
    row(args.vram, f"{residents} of {experts}", f"{stats['hit_rate']:.2f}", f"{1e3 * quiet:.3f}",
        f"{1e3 * busy:.3f}", f"{busy / quiet:.3f}", f"{lower:.3f} to {upper:.3f}",
        "yes" if busy / quiet <= AIM else "no",
        f"{(uploads[-1] - uploads[WARM]) / n_exchanging:.2f}", "-" if stall_s is None else f"{1e6 * stall_s:.0f}",
        f"{same} of {len(found)}")  # fmt: skip
    print(f"\n{args.pairs} pairs of stretches of {args.tokens} tokens; "
          f"{sum(ratio > 1 for ratio in ratios)} of them slower with exchange")  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="qwen36-35b")
    parser.add_argument("--vram", type=int, default=6768, help="MiB of the card")
    parser.add_argument("--pairs", type=int, default=12, help="of stretches, one with and one without")
    parser.add_argument("--tokens", type=int, default=16, help="of a stretch that are timed")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args, devices = begin(parser, argv)
    config = geometry(args.geometry)
    container = make(args.geometry, 0.0)
    n_tokens = len(policies(args.pairs, args.tokens))
    ids = np.random.default_rng(7).integers(0, config["vocab_size"], PROMPT + n_tokens)
    cpus = sorted(os.sched_getaffinity(0))
    engine = Engine(container, threads=args.threads, cpus=cpus[: args.threads], context=2048)
    expected, _, _ = run(engine, ids, n_tokens)
    engine.leave_cpus(cpus_to_leave(args.threads, engine.cpus, devices))
    cpu = measure_cpu(engine)[0]
    figures = Probe(cpu, (measure_card(devices[0], engine, cpu)[0],))
    shape = ModelShape.from_config(config)
    placing = _Placing(container, engine, shape, devices[:1], "auto", args.vram * MIB, None, figures)
    placed = engine.on_thread(lambda: placing.run(None))
    engine.program = placed.program
    try:
        compare(engine, placed, ids, expected, args)
    finally:
        engine.on_thread(placed.close)
        engine.close()
        container.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
