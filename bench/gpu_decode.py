"""Decode with a model of real size on a card: the CPU alone against automatic placement, bits compared.

    python bench/gpu_decode.py [--geometry qwen36-35b] [--vram 4720,6768,10864,14960,all] [--tokens 64] [--by-hand 6768]

The model is made in memory with random weights.  For each router (even, skewed) the CPU's logits are the reference;
every placement feeds the same ids, and every logit is compared as bits.  "cold" are the first tokens after loading,
"warm" as many after those, when experts have had time to change places.  "off" has all threads; beside a card the team
is as large as ``coli.load`` makes it, so that uploads and the driver have CPUs of their own.  "predicted" is what the
placer's cost model says of the warm stretch with the machine's probe and the experts that were chosen.  With --rounds
every figure is the median of so many interleaved runs.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from coli import log  # noqa: E402
from coli.convert.synthetic import Synthetic, SyntheticContainer, geometry  # noqa: E402
from coli.devices.cuda import probe  # noqa: E402
from coli.devices.cuda.device import CudaDevice  # noqa: E402
from coli.engine.session import Engine  # noqa: E402
from coli.placement import ModelShape, Probe, plan, predict_seen  # noqa: E402
from coli.placing import Placed, _Placing, cpus_to_leave  # noqa: E402
from coli.probing.cards import measure_card  # noqa: E402
from coli.probing.host import measure_cpu  # noqa: E402

MIB = 1 << 20
PROMPT = 16
TRUNK = ("lmhead", "dnproj", "dnout", "attnproj", "shexp")
BY_HAND = {
    "trunk, experts": ",".join(f"{name}=0" for name in TRUNK) + ",experts=0",
    "trunk alone": ",".join(f"{name}=0" for name in TRUNK) + ",experts=cpu",
    "experts alone": ",".join(f"{name}=cpu" for name in TRUNK) + ",experts=0",
    "trunk without the head, experts": "lmhead=cpu," + ",".join(f"{name}=0" for name in TRUNK[1:]) + ",experts=0",
    "trunk without shared experts, experts": ",".join(f"{name}=0" for name in TRUNK[:-1]) + ",shexp=cpu,experts=0",
    "half the layers, experts": "lmhead=0,dnproj=0:20,dnout=0:20,attnproj=0:20,shexp=0:20,experts=0",
}


def row(*cells: object) -> None:
    """One line of a Markdown table."""
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def make(name: str, skew: float) -> SyntheticContainer:
    """The container with all of its weights, made by as many threads as there are CPUs."""
    container = SyntheticContainer(Synthetic(geometry(name), skew=skew))
    layers = range(container.config.num_hidden_layers)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda layer: container.slabs(f"layers.{layer}.mlp.experts"), layers))
    return container


def run(
    engine: Engine, ids: np.ndarray, tokens: int, halfway: Callable[[], None] = lambda: None
) -> tuple[np.ndarray, list[float], float]:
    """Logits (T, vocabulary) and seconds of each decode step, and seconds of the prompt.   halfway : called there.

    Each step's array is copied and dropped, as a sampler would drop it: kept, every step would pay for fresh pages.
    """
    session = engine.session()
    start = time.perf_counter()
    session.prefill(ids[:PROMPT])
    prompt_s = time.perf_counter() - start
    logits, seconds = np.zeros((tokens, engine.vocab_size), np.float32), []
    for number, token in enumerate(ids[PROMPT : PROMPT + tokens].tolist()):
        if number == tokens // 2:
            halfway()
        start = time.perf_counter()
        step = session.step(token)
        seconds.append(time.perf_counter() - start)
        logits[number] = step
    session.close()
    return logits, seconds, prompt_s


class Run(NamedTuple):
    """One placement's decode.   cold_s, warm_s : of each step.   predicted_s : of a step of the warm stretch.
    same : of ``n`` logits, those with the CPU's bits."""

    slots: int
    cold_s: list[float]
    warm_s: list[float]
    predicted_s: float
    hit_rate: float
    same: int
    n: int


def decode(engine: Engine, placed: Placed, figures: Probe, ids: np.ndarray, tokens: int, wanted: np.ndarray) -> Run:
    """Decode with what was placed, cold and then warm, and predict the warm stretch by what was seen of it."""
    tier, seen = placed.tier, []

    def look() -> None:
        seen.append((tier.heat.recent.copy(), tier.residency.device.tolist()))

    found, seconds, _ = run(engine, ids, 2 * tokens, lambda: engine.on_thread(look))
    engine.on_thread(look)
    same = sum(bool((a.view(np.uint32) == b.view(np.uint32)).all()) for a, b in zip(wanted, found, strict=True))
    (before, first), (after, last) = seen
    chosen = ((after - before) / tokens).tolist()
    predicted = predict_seen(
        placed.plan, figures, chosen=chosen, residents=[first, last], position=PROMPT + 1.5 * tokens
    )
    hit_rate = tier.stats()["hit_rate"] or 0.0
    return Run(
        tier.n_slots(0), seconds[:tokens], seconds[tokens:], predicted.ms_per_token / 1e3, hit_rate, same, len(found)
    )


def print_row(router: str, budget: str, name: str, runs: Sequence[Run], base_s: float) -> None:
    """The medians of a placement's runs; with several, the slowest and the fastest warm one behind."""
    warm = sorted(statistics.median(one.warm_s) for one in runs)
    middle, predicted = statistics.median(warm), statistics.median(one.predicted_s for one in runs)
    spread = f", {1 / warm[-1]:.1f} to {1 / warm[0]:.1f}" if len(warm) > 1 else ""
    row(router, budget, name, runs[0].slots, tok_s([s for one in runs for s in one.cold_s]),
        tok_s([s for one in runs for s in one.warm_s]) + spread, f"{base_s / middle:.2f}", f"{1 / predicted:.1f}",
        f"{middle / predicted:.2f}", f"{statistics.median(one.hit_rate for one in runs):.2f}",
        f"{sum(one.same for one in runs)} of {sum(one.n for one in runs)}")  # fmt: skip


def parts(engine: Engine, ids: np.ndarray, tokens: int) -> str:
    """Milliseconds of a token by kind of step, from a run of its own."""
    spent: dict[str, float] = {}

    class Timed:
        def __init__(self, step) -> None:
            self.step, self.kind = step, type(step).__name__

        def run(self, runner) -> None:
            start = time.perf_counter()
            self.step.run(runner)
            spent[self.kind] = spent.get(self.kind, 0.0) + time.perf_counter() - start

    program = engine.program
    plain, program.steps = program.steps, [Timed(step) for step in program.steps]
    session = engine.session()
    session.prefill(ids[:PROMPT])
    spent.clear()
    start = time.perf_counter()
    for token in ids[PROMPT : PROMPT + tokens].tolist():
        session.step(token)
    total = time.perf_counter() - start
    program.steps = plain
    spent["rest (head)"] = total - sum(spent.values())
    return ", ".join(f"{kind} {s / tokens * 1e3:.2f} ms" for kind, s in spent.items())


def tok_s(seconds: list[float]) -> str:
    """Tokens a second over a stretch, and by its median step."""
    return f"{len(seconds) / sum(seconds):.1f} ({1 / statistics.median(seconds):.1f})"


def begin(parser: argparse.ArgumentParser, argv: list[str] | None) -> tuple[argparse.Namespace, list[CudaDevice]]:
    """The arguments and the cards, quietly; ends the program where there is no card."""
    args = parser.parse_args(argv)
    logging.getLogger("coli").setLevel(logging.WARNING)
    log.configure("quiet")
    devices = probe.list_devices()
    if not devices:
        parser.exit(2, f"no card: {probe.probe_cuda()}\n")
    return args, devices


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="qwen36-35b")
    parser.add_argument("--vram", default="4720,6768,10864,14960,all", help="MiB of the card, comma-separated")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--skews", default="0,0.8", help="of the router; 0 is even")
    parser.add_argument("--by-hand", default="", metavar="MIB",
                        help="with so much memory and the last router: lists, too")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=1, help="of all placements, the order turned around each time")
    parser.add_argument("--parts", action="store_true", help="say where a token's time goes")
    args, devices = begin(parser, argv)
    config = geometry(args.geometry)
    shape = ModelShape.from_config(config)
    print(f"\n### Decode, {args.geometry}, {devices[0].name}, {time.strftime('%Y-%m-%d')}\n")
    row("router", "VRAM MiB", "placement", "slots", "cold tok/s (median)", "warm tok/s (median)", "of off", "predicted",
        "over measured", "hit rate", "identical")  # fmt: skip
    row("---", "---:", "---", *["---:"] * 8)
    figures = None
    skews = [float(skew) for skew in args.skews.split(",")]
    for skew in skews:
        container = make(args.geometry, skew)
        router = f"skew {skew:g}" if skew else "even"
        ids = np.random.default_rng(7).integers(0, config["vocab_size"], PROMPT + 2 * args.tokens)
        engine = Engine(
            container, threads=args.threads, cpus=sorted(os.sched_getaffinity(0))[: args.threads], context=2048
        )
        wanted, seconds, _ = run(engine, ids, 2 * args.tokens)
        base = statistics.median(seconds[args.tokens :])
        cold, warm = tok_s(seconds[: args.tokens]), tok_s(seconds[args.tokens :])
        cpu, _ = measure_cpu(engine)
        alone = plan(shape, [], probe=Probe(cpu, ()), context=2048, position=PROMPT + 1.5 * args.tokens)
        alone_s = alone.predicted_ms_per_token / 1e3
        row(router, "", f"CPU alone, {args.threads} threads", 0, cold, warm, "1.00", f"{1 / alone_s:.1f}",
            f"{base / alone_s:.2f}", "", "")  # fmt: skip
        if args.parts:
            print("-", parts(engine, ids, args.tokens))
        engine.leave_cpus(cpus_to_leave(args.threads, engine.cpus, devices))
        if figures is None:
            cpu, _ = measure_cpu(engine)
            figures = Probe(cpu, (measure_card(probe.list_devices()[0], engine, cpu)[0],))
        cpu_program = engine.program
        wishes = [(vram, "auto", "auto") for vram in args.vram.split(",") if vram]
        if skew == skews[-1]:
            wishes += [(vram, *wish) for vram in args.by_hand.split(",") if vram for wish in BY_HAND.items()]
        runs: dict[tuple[str, str, str], list[Run]] = {wish: [] for wish in wishes}
        for number in range(args.rounds):
            for wish in wishes if number % 2 == 0 else wishes[::-1]:
                budget, _, text = wish
                vram = "auto" if budget == "all" else int(budget) * MIB
                device = probe.list_devices()[0]
                placing = _Placing(container, engine, shape, [device], text, vram, None, figures)
                placed = engine.on_thread(lambda: placing.run(None))  # noqa: B023
                engine.program = placed.program
                runs[wish].append(decode(engine, placed, figures, ids, args.tokens, wanted))
                if args.parts:
                    print("-", parts(engine, ids, args.tokens))
                engine.program = cpu_program
                engine.on_thread(placed.close)
        for (budget, name, _), found in runs.items():
            print_row(router, budget, name, found, base)
        engine.close()
        container.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
