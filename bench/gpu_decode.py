"""Decode with a model of real size on a card: the CPU alone against automatic placement, bits compared.

    python bench/gpu_decode.py [--geometry qwen36-35b] [--vram 4720,6768,10864,14960,all] [--tokens 64] [--by-hand 6768]

The model is made in memory with random weights.  For each router (even, skewed) the CPU's logits are the reference;
every placement feeds the same ids, and every logit is compared as bits.  "cold" are the first tokens after loading,
"warm" as many after those, when experts have had time to change places.  "off" has all threads; beside a card the team
is as large as ``coli.load`` makes it, so that uploads and the driver have CPUs of their own.  "predicted" is what the
placer's cost model says of the warm stretch with the machine's probe and the experts that were chosen.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from coli import log  # noqa: E402
from coli.convert.synthetic import Synthetic, SyntheticContainer, geometry  # noqa: E402
from coli.devices.cuda import probe  # noqa: E402
from coli.engine.session import Engine  # noqa: E402
from coli.placement import ModelShape, Probe, predict_seen  # noqa: E402
from coli.placing import _Placing, cpus_to_leave  # noqa: E402
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


def run(engine: Engine, ids: np.ndarray, tokens: int) -> tuple[np.ndarray, list[float], float]:
    """Logits (T, vocabulary) and seconds of each decode step, and seconds of the prompt.

    Each step's array is copied and dropped, as a sampler would drop it: kept, every step would pay for fresh pages.
    """
    session = engine.session()
    start = time.perf_counter()
    session.prefill(ids[:PROMPT])
    prompt_s = time.perf_counter() - start
    logits, seconds = np.zeros((tokens, engine.vocab_size), np.float32), []
    for number, token in enumerate(ids[PROMPT : PROMPT + tokens].tolist()):
        start = time.perf_counter()
        step = session.step(token)
        seconds.append(time.perf_counter() - start)
        logits[number] = step
    session.close()
    return logits, seconds, prompt_s


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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="qwen36-35b")
    parser.add_argument("--vram", default="4720,6768,10864,14960,all", help="MiB of the card, comma-separated")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--skews", default="0,0.8", help="of the router; 0 is even")
    parser.add_argument("--by-hand", default="", metavar="MIB", help="with so much memory and the last router: lists, too")
    parser.add_argument("--parts", action="store_true", help="say where a token's time goes")
    args = parser.parse_args(argv)
    logging.getLogger("coli").setLevel(logging.WARNING)
    log.configure("quiet")
    devices = probe.list_devices()
    if not devices:
        print(f"no card: {probe.probe_cuda()}", file=sys.stderr)
        return 2
    config = geometry(args.geometry)
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
        row(router, "", f"off, {args.threads} threads", 0, cold, warm, "1.00", "", "", "", "")
        if args.parts:
            print("-", parts(engine, ids, args.tokens))
        n_free = len(os.sched_getaffinity(0)) - args.threads
        engine.leave_cpus(cpus_to_leave(args.threads, n_free, devices))
        if figures is None:
            cpu, _ = measure_cpu(engine.team.n_threads, engine.cpus, None)
            figures = Probe(cpu, (engine.on_thread(lambda: measure_card(probe.list_devices()[0]))[0],))
        cpu_program = engine.program
        shape = ModelShape.from_config(config)
        wishes = [(vram, "auto", "auto") for vram in args.vram.split(",") if vram]
        if skew == skews[-1]:
            wishes += [(vram, *wish) for vram in args.by_hand.split(",") if vram for wish in BY_HAND.items()]
        for budget, name, text in wishes:
            vram = "auto" if budget == "all" else int(budget) * MIB
            device = probe.list_devices()[0]
            placing = _Placing(container, engine, shape, [device], text, vram, None, figures)
            placed = engine.on_thread(lambda: placing.run(None))  # noqa: B023
            engine.program = placed.program
            found, seconds, _ = run(engine, ids, 2 * args.tokens)
            same = sum(bool((a.view(np.uint32) == b.view(np.uint32)).all()) for a, b in zip(wanted, found, strict=True))
            tier = placed.tier
            hit_rate = tier.stats()["hit_rate"] or 0.0
            warm = statistics.median(seconds[args.tokens :])
            predicted = predict_seen(
                placed.plan, figures, chosen=(tier.heat.recent / tier.heat.tokens).tolist(),
                resident=tier.residency.device.tolist(), position=PROMPT + 1.5 * args.tokens,
            ).ms_per_token / 1e3  # fmt: skip
            row(router, budget, name, placed.plan.slots[0], tok_s(seconds[: args.tokens]),
                tok_s(seconds[args.tokens :]), f"{base / warm:.2f}", f"{1 / predicted:.1f}", f"{warm / predicted:.2f}",
                f"{hit_rate:.2f}", f"{same} of {len(found)}")  # fmt: skip
            if args.parts:
                print("-", parts(engine, ids, args.tokens))
            engine.program = cpu_program
            engine.on_thread(placed.close)
        engine.close()
        container.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
