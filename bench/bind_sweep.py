"""What OMP_PLACES and OMP_PROC_BIND do to decode: every combination in its own process, beside coli's default.

    python bench/bind_sweep.py MODEL [--threads 8,16] [--rounds 3] [--seconds 1] [--json FILE] [--plot FILE.png]

OpenMP reads its variables once, when it is loaded, so each run is a child process.  Rounds are interleaved: all
combinations once, then all again in the other direction.  The map is read back from the kernel, and compared with what
coli.threads.openmp says that it would be.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tqdm import tqdm

from coli.threads import openmp
from coli.threads.limits import local_machine
from coli.threads.topology import Topology

PLACES = (None, "cores", "threads", "sockets")
BINDS = (None, "close", "spread", "false")
VARIABLES = ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "OMP_NUM_THREADS", "COLI_THREADS")

CHILD = """
import json, sys
import coli
from coli.threads.tuning import decode_tok_s
threads = int(sys.argv[2]) or None
with coli.load(sys.argv[1], devices="none", threads=threads) as model:
    tok_s = decode_tok_s(model, float(sys.argv[3]))
    stats = model.stats()
print(json.dumps({"tok_s": tok_s, "threads": stats["threads"], "map": stats["thread_map"]}))
"""


@dataclass
class Row:
    """One combination.  ``threads`` 0 is coli's own count; ``map`` is (CPU, CPUs in the mask) by worker."""

    places: str | None
    bind: str | None
    threads: int
    tok_s: list[float] = field(default_factory=list)
    map: list[list[int]] = field(default_factory=list)
    error: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.tok_s) if self.tok_s else 0.0


def environment(row: Row) -> dict[str, str]:
    """This environment with the row's two variables and none of the others."""
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    for name, value in (("OMP_PLACES", row.places), ("OMP_PROC_BIND", row.bind)):
        if value is not None:
            env[name] = value
    return env


def run(row: Row, model: str, seconds: float) -> None:
    """Measure a row once, in a child."""
    command = [sys.executable, "-c", CHILD, model, str(row.threads), str(seconds)]
    done = subprocess.run(command, env={**environment(row), "COLI_LOG": "quiet"}, capture_output=True, text=True)
    if done.returncode:
        row.error = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return
    answer = json.loads(done.stdout)
    row.tok_s.append(answer["tok_s"])
    row.map = answer["map"]


def expected(row: Row, topology: Topology, allowed: Iterable[int]) -> str:
    """Whether the map is what openmp.py says: "yes", "no", or "-" where coli placed the workers or nobody did."""
    if row.bind == "false" or row.places is None or not row.map:
        return "-"
    places = openmp.places_of({"OMP_PLACES": row.places}, topology, allowed)
    wanted = openmp.assign(row.bind or "close", places, len(row.map))
    same = all(cpu in place and width == len(place) for (cpu, width), place in zip(row.map, wanted, strict=True))
    return "yes" if same else "no"


def table(rows: list[Row], topology: Topology, allowed: Iterable[int]) -> str:
    """The rows as text, best last column relative to the best median."""
    best = max(row.median for row in rows) or 1.0
    core_of = {cpu.index: cpu.core for cpu in topology.cpus}
    lines = [
        f"{'OMP_PLACES':11}{'PROC_BIND':10}{'threads':>8}{'cores':>6}{'tok/s':>9}{'min':>8}{'max':>8}{'of best':>8}"
        "  as predicted"
    ]
    for row in rows:
        threads = str(row.threads) if row.threads else f"auto {len(row.map)}"
        head = f"{row.places or 'unset':11}{row.bind or 'unset':10}{threads:>8}"
        if row.error or not row.tok_s:
            lines.append(f"{head}  {row.error}")
            continue
        # Where a worker may move, the core it was seen on is a sample.
        cores = len({core_of[cpu] for cpu, _ in row.map})
        lines.append(
            f"{head}{cores:>6}{row.median:>9.2f}{min(row.tok_s):>8.2f}{max(row.tok_s):>8.2f}{row.median / best:>8.1%}"
            f"  {expected(row, topology, allowed)}"
        )
    return "\n".join(lines)


def unbiased_share(rows: list[Row], *, draws: int = 1000) -> float:
    """The first row against the one that looks best, without the luck that made it look so.

    The best of many noisy rows is above its own truth.  So the winner is chosen by half of the rounds, at random, and
    compared in the other half: the median over many draws.  Needs at least two rounds of every row.
    """
    measured = [row.tok_s for row in rows if len(row.tok_s) == len(rows[0].tok_s)]
    rounds = list(range(len(rows[0].tok_s)))
    dice, shares = random.Random(0), []
    for _ in range(draws):
        dice.shuffle(rounds)
        half = len(rounds) // 2
        choosing, judging = rounds[:half], rounds[half:]
        best = max(measured, key=lambda tok_s: statistics.median(tok_s[i] for i in choosing))
        ours, theirs = (statistics.median(tok_s[i] for i in judging) for tok_s in (rows[0].tok_s, best))
        shares.append(ours / theirs)
    return statistics.median(shares)


def plot(rows: list[Row], path: Path) -> None:
    """Bars by combination, grouped by thread count."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(f"{row.places or 'unset'}\n{row.bind or 'unset'}" for row in rows))
    counts = sorted({row.threads for row in rows})
    figure, axes = pyplot.subplots(figsize=(12, 5), layout="constrained")
    for number, threads in enumerate(counts):
        mine = {f"{row.places or 'unset'}\n{row.bind or 'unset'}": row for row in rows if row.threads == threads}
        at = [names.index(name) + (number + 0.5) * 0.8 / len(counts) - 0.4 for name in mine]
        heights = [row.median for row in mine.values()]
        spans = [[row.median - min(row.tok_s, default=0) for row in mine.values()],
                 [max(row.tok_s, default=0) - row.median for row in mine.values()]]  # fmt: skip
        label = f"{threads} threads" if threads else "coli's own count"
        axes.bar(at, heights, 0.8 / len(counts), yerr=spans, capsize=2, label=label)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_xlabel("OMP_PLACES / OMP_PROC_BIND")
    axes.set_ylabel("decode, tok/s")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument(
        "--threads", metavar="LIST", help="thread counts, such as 8,16 (half the cores, the cores, the CPUs)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of decode in each run (1)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="needs coli[plot]")
    args = parser.parse_args()

    topology, found = local_machine()
    n_cores, n_cpus = len(topology.cores(found.allowed)), len(found.allowed)
    counts = [int(n) for n in args.threads.split(",")] if args.threads else [max(1, n_cores // 2), n_cores, n_cpus]
    rows = [Row(None, None, 0)]
    rows += [Row(places, bind, n) for n in dict.fromkeys(counts) for places in PLACES for bind in BINDS]
    with tqdm(total=len(rows) * args.rounds, unit="run", disable=not sys.stderr.isatty()) as bar:
        for number in range(args.rounds):
            for row in rows if number % 2 == 0 else rows[::-1]:
                if not row.error:
                    run(row, args.model, args.seconds)
                bar.update()

    best = max(rows, key=lambda row: row.median)
    print(
        f"{topology.model_name}: {n_cores} cores, {n_cpus} CPUs allowed, quota {found.quota_cpus or 'none'}; "
        f"{args.model}"
    )
    print(table(rows, topology, found.allowed))
    if best.median:
        print(f"coli's default: {rows[0].median:.2f} tok/s, {rows[0].median / best.median:.1%} of the best")
    if args.rounds > 1 and rows[0].tok_s:
        print(f"winners chosen by half of the rounds, judged by the others: {unbiased_share(rows):.1%} of the best")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot)
    return 1 if any(row.error for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
