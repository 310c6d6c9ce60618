"""Decode while another process keeps one core busy, beside an undisturbed run with one thread fewer.

    python bench/disturbed.py MODEL [--turns 5] [--json]

A team whose threads wait for each other must not collapse when one of them loses its core for a while: the target is
half of what one thread fewer makes alone.  The turns alternate; the busy process runs wherever the system puts it, then
pinned to the core of the team's last worker, and then to that of its first thread, which starts and ends everything.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from statistics import median

BUSY = "import os, sys\nif sys.argv[1] != '-': os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


def decode_tok_s(engine, n_tokens: int = 48) -> float:
    session = engine.session()
    session.prefill(list(range(16)))
    start = time.perf_counter()
    for token in range(n_tokens):
        session.step(token)
    return n_tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    from coli._core import step
    from coli.container.reader import Container
    from coli.convert.resolve import resolve_model
    from coli.engine.session import Engine
    from coli.threads.claims import claim_threads

    claim = claim_threads(openmp_built=step.has_openmp())
    cpus = list(claim.binding.cpus)
    if len(cpus) < 2:
        raise SystemExit("this needs a team of at least two")
    places = {"disturbed": None, "disturbed_last": -1, "disturbed_first": 0}  # whose core the busy process is pinned to
    rates: dict[str, list[float]] = {name: [] for name in ("one_fewer", "alone", *places)}
    with Container.open(resolve_model(args.model)) as container:
        fewer = Engine(container, threads=len(cpus) - 1, cpus=cpus[:-1])
        team = Engine(container, threads=len(cpus), cpus=cpus)
        decode_tok_s(fewer), decode_tok_s(team)
        for _ in range(args.turns):
            time.sleep(1.2)  # a worker that was disturbed in the last turn sits out for a second
            rates["one_fewer"].append(decode_tok_s(fewer))
            rates["alone"].append(decode_tok_s(team))
            for name, thread in places.items():
                time.sleep(1.2)
                # read back: a first thread that lost its core in an earlier turn has changed with a worker
                where = "-" if thread is None else str(team.on_thread(team.team.map)[thread][0])
                busy = subprocess.Popen([sys.executable, "-c", BUSY, where])
                try:
                    time.sleep(0.2)
                    rates[name].append(decode_tok_s(team))
                finally:
                    busy.kill()
                    busy.wait()
        fewer.close()
        team.close()
    claim.release()
    found = {name: median(values) for name, values in rates.items()}
    ratios = {f"{name}_ratio": found[name] / found["one_fewer"] for name in places}
    if args.json:
        print(json.dumps({"threads": len(cpus), **found, **ratios}))
        return
    print(f"{len(cpus) - 1} threads alone {found['one_fewer']:.1f} tok/s, {len(cpus)} alone {found['alone']:.1f}")
    for name in places:
        print(f"{name}: {found[name]:.1f} tok/s, {ratios[f'{name}_ratio']:.2f} of one thread fewer (target 0.50)")


if __name__ == "__main__":
    main()
