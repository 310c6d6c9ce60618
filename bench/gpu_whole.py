"""A model that lies on one card as a whole: decode at depth, prompts, and the memory it takes.

    python bench/gpu_whole.py [--geometry qwen36-35b] [--depth 4096] [--prompts 512,2048]

Random weights made in memory; the CPU's logits are the reference, and every logit that is shown as equal was compared
as bits.  With the experts in host memory the card computes part of a prompt's in passing; how much that gives stands
beside the CPU alone.  Loading from files is gpu_load.py's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

from gpu_decode import MIB, begin, make, row  # noqa: E402

from coli.convert.synthetic import geometry  # noqa: E402
from coli.devices.cuda import probe, stream  # noqa: E402
from coli.engine import streaming  # noqa: E402
from coli.engine.session import Engine, Session  # noqa: E402
from coli.placement import ModelShape  # noqa: E402
from coli.placing import Placed, _Placing, cpus_to_leave  # noqa: E402

TURN = 16  # tokens of one session, then of the other
TRUNK = "lmhead=0,dnproj=0,dnout=0,attnproj=0,shexp=0,experts=cpu"


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bits."""
    return bool((a.view(np.uint32) == b.view(np.uint32)).all())


def place(engine: Engine, container, shape: ModelShape, wanted: str) -> tuple[Placed, float]:
    """Put the model where ``wanted`` says, on the first card with all of its memory; and the seconds it took."""
    placing = _Placing(container, engine, shape, [probe.list_devices()[0]], wanted, "auto", None)
    start = time.perf_counter()
    placed = engine.on_thread(lambda: placing.run(None))
    engine.program = placed.program
    return placed, time.perf_counter() - start


def prompt(engine: Engine, ids: np.ndarray, repeats: int = 3) -> tuple[Session, np.ndarray, float]:
    """A session behind the prompt, the logits there, and the median seconds of taking it in."""
    seconds = []
    for _ in range(repeats):
        session = engine.session()
        start = time.perf_counter()
        logits = session.prefill(ids)
        seconds.append(time.perf_counter() - start)
    return session, logits, statistics.median(seconds)


def decode(session: Session, ids: list[int]) -> tuple[np.ndarray, list[float]]:
    """Logits (T, vocabulary) and seconds of each step; a step's array is dropped, as a sampler would drop it."""
    logits, seconds = np.zeros((len(ids), session.engine.vocab_size), np.float32), []
    for number, token in enumerate(ids):
        start = time.perf_counter()
        step = session.step(token)
        seconds.append(time.perf_counter() - start)
        logits[number] = step
    return logits, seconds


def in_turns(sessions: Sequence[Session], ids: Sequence[list[int]]) -> list[tuple[np.ndarray, list[float]]]:
    """`decode` of several sessions, some tokens of one and as many of the next, so that they see the same machine.

    The first step of a turn is not timed: it is the one that begins another list on the card.
    """
    found: list[tuple[list[np.ndarray], list[float]]] = [([], []) for _ in sessions]
    for at in range(0, len(ids[0]), TURN):
        for (logits, seconds), session, mine in zip(found, sessions, ids, strict=True):
            some, took = decode(session, mine[at : at + TURN])
            logits.append(some)
            seconds += took[1:]
    return [(np.concatenate(logits), seconds) for logits, seconds in found]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="qwen36-35b")
    parser.add_argument("--prompts", default="512,2048", help="tokens")
    parser.add_argument("--depth", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=128, help="of decode at each depth, in turns")
    args, devices = begin(parser, argv)
    config = geometry(args.geometry)
    shape = ModelShape.from_config(config)
    prompts = [int(n) for n in args.prompts.split(",")]
    container = make(args.geometry, 0.0)
    cpus = sorted(os.sched_getaffinity(0))
    engine = Engine(container, threads=len(cpus), cpus=cpus, context=max(args.depth, *prompts) + 256)
    rng = np.random.default_rng(11)
    ids = rng.integers(0, config["vocab_size"], max(args.depth, *prompts) + args.tokens)
    print(f"\n### Whole model on a card, {args.geometry}, {devices[0].name}, {time.strftime('%Y-%m-%d')}\n")

    cpu_program = engine.program
    wanted, cpu_s = {}, {}
    for n in prompts:
        session, wanted[n], cpu_s[n] = prompt(engine, ids[:n], repeats=1)
        session.close()
    session, deep, _ = prompt(engine, ids[: args.depth], repeats=1)
    deep_steps, _ = decode(session, ids[args.depth : args.depth + args.tokens].tolist())
    session.close()
    shallow = engine.session()
    shallow_steps, shallow_s = decode(shallow, ids[: args.tokens].tolist())
    shallow.close()
    engine.leave_cpus(cpus_to_leave(len(cpus), cpus, devices))

    device = devices[0]
    free_before = device.free_bytes()
    placed, load_s = place(engine, container, shape, "auto")
    used = free_before - placed.devices[0].free_bytes()
    n_slots = placed.tier.n_slots(0)  # no more than there are experts
    facts = placed.plan.devices[0]
    planned = placed.plan.placed_bytes[0] + facts.staging_bytes + facts.layer_bytes + n_slots * shape.expert_bytes
    row("what", "figure", "bits")
    row("---", "---:", "---")
    row("decode, CPU alone", f"{1 / statistics.median(shallow_s):.1f} tok/s", "reference")
    shallow = engine.session()
    session, logits, _ = prompt(engine, ids[: args.depth], repeats=1)
    (first_steps, first_s), (steps, seconds) = in_turns(
        [shallow, session], [ids[: args.tokens].tolist(), ids[args.depth : args.depth + args.tokens].tolist()]
    )
    shallow.close()
    empty = 1 / statistics.median(first_s)
    row("decode, empty context", f"{empty:.1f} tok/s", same(first_steps, shallow_steps))
    copied = session.copy()
    again = same(copied.step(7), session.step(7))
    session.close()
    copied.close()
    at_depth = 1 / statistics.median(seconds)
    row(f"decode at {args.depth} tokens", f"{at_depth:.1f} tok/s ({at_depth / empty:.2f})",
        same(logits, deep) and same(steps, deep_steps) and again)  # fmt: skip
    for n in prompts:
        session, logits, s = prompt(engine, ids[:n])
        row(f"prompt of {n}", f"{n / s:.0f} tok/s, first token after {s * 1e3:.0f} ms; CPU alone {n / cpu_s[n]:.0f}",
            same(logits, wanted[n]))  # fmt: skip
        session.close()
    row("weights from memory to the card", f"{load_s:.1f} s", "")
    row("card memory: charged by the plan", f"{planned / MIB:,.0f} MiB", "")
    row("card memory: taken in all", f"{used / MIB:,.0f} MiB", "")
    engine.program = cpu_program
    engine.on_thread(placed.close)

    in_host_memory(engine, container, shape, ids, {n: wanted[n] for n in prompts})
    engine.program = cpu_program
    engine.close()
    container.close()
    return 0


def in_host_memory(
    engine: Engine, container, shape: ModelShape, ids: np.ndarray, wanted: dict[int, np.ndarray]
) -> None:
    """The trunk on the card and no expert: prompts with the CPU alone for experts, and with part of them in passing.

    wanted : logits behind the first n ids, by n.
    """
    stream_rows, stream_threads = streaming.STREAM_ROWS, stream._THREADS
    for threads in (0, stream_threads, 2 * stream_threads):  # 0: nothing is streamed
        streaming.STREAM_ROWS = stream_rows if threads else 1 << 30
        stream._THREADS = threads or stream_threads
        cpu_program = engine.program
        placed, _ = place(engine, container, shape, TRUNK)
        how = f"in passing by {threads} threads" if threads else "none in passing"
        for n, expected in wanted.items():
            session, logits, s = prompt(engine, ids[:n])
            row(f"prompt of {n}, experts in host memory, {how}", f"{n / s:.0f} tok/s", same(logits, expected))
            session.close()
        if threads:
            found = placed.program.spans[0].streaming
            speeds, share = found.figures.speeds, found.streamed / max(found.missing, 1)
            row("what was measured there", f"{share:.0%} in passing; stream {speeds.stream_gb_s:.1f} GB/s; CPU "
                f"{speeds.cpu_gb_s:.0f} GB/s and {speeds.cpu_row_us:.1f} us a row", "")  # fmt: skip
        else:
            session = engine.session()
            _, seconds = decode(session, ids[:32].tolist())
            session.close()
            row("decode, experts in host memory", f"{1 / statistics.median(seconds):.1f} tok/s", "")
        engine.program = cpu_program
        engine.on_thread(placed.close)
    streaming.STREAM_ROWS, stream._THREADS = stream_rows, stream_threads


if __name__ == "__main__":
    sys.exit(main())
