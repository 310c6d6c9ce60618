"""Two cards: every way to split a model of real size over them, bits and tok/s beside the placer's prediction.

    python bench/gpu_cards.py [--cards 2 | --same-card] [--geometry qwen36-35b] [--vram 4720] [--tokens 48]

Both cards as they are, then with the second one slowed: a stream of its own reads the card's memory without a pause
while the model decodes (kernel ``read_all``, in the same context, so that no time slices come between).  The probe's
figures, which the placer decides and predicts by, are measured under that load.

Also: the names of the cards (index, PCI bus id, UUID) against nvidia-smi, each card's memory against its budget, and a
card that fails in the middle of a text.  With --same-card both are the first card, with an arena and streams each: that
shows bits, budgets and homes where there is but one, and says nothing of speed.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

from gpu_decode import MIB, PROMPT, decode, make, row, run  # noqa: E402

from coli import log  # noqa: E402
from coli.convert.synthetic import geometry  # noqa: E402
from coli.devices.base import DeviceError  # noqa: E402
from coli.devices.choose import choose_devices  # noqa: E402
from coli.devices.cuda import probe  # noqa: E402
from coli.devices.cuda.context import Context  # noqa: E402
from coli.engine.session import Engine  # noqa: E402
from coli.placement import ModelShape, Probe  # noqa: E402
from coli.placing import _Placing, cpus_to_leave  # noqa: E402
from coli.probing.cards import measure_card  # noqa: E402
from coli.probing.host import measure_cpu  # noqa: E402

WHOLE = "lmhead={0},dnproj={0},dnout={0},attnproj={0},shexp={0}"
HALVES = "lmhead=0,dnproj=0:20+1:20,dnout=0:20+1:20,attnproj=0:20+1:20,shexp=0:20+1:20"
SPLITS = {
    "experts on both, trunk on 0": WHOLE.format(0) + ",experts=all",
    "trunk on 0, experts on 1": WHOLE.format(0) + ",experts=1",
    "trunk on 1, experts on 0": WHOLE.format(1) + ",experts=0",
    "whole layers split, experts on both": HALVES + ",experts=all",
    "by hand": "lmhead=0,dnproj=0:20+1:20,experts=0",
    "auto:bytes": "auto:bytes",
    "auto": "auto",
}


class Slowed:
    """A card whose memory somebody else reads all the time, as a context manager."""

    def __init__(self, card: probe.Card) -> None:
        self._context = Context(card.cuda_ordinal, card.arch, card.name)  # the device's own may close in between
        self._buffer = self._context.alloc(256 * MIB, "the load beside")
        self._stream = self._context.stream()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        context, blocks = self._context, 2 * self._context.multiprocessors
        context.set_current()
        while not self._stop.is_set():
            for _ in range(16):  # about a millisecond of reading, so that it never runs dry
                context.launch("read_all", "", (blocks, 1), 512, 0, self._stream, self._buffer, 256 * MIB // 16,
                               self._buffer)  # fmt: skip
            context.synchronize(self._stream)

    def __enter__(self) -> Slowed:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._context.close()


def check_names() -> None:
    """Index, PCI bus id and UUID of every card name the same one as nvidia-smi does."""
    query = ["nvidia-smi", "--query-gpu=index,pci.bus_id,uuid", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    for line in lines:
        index, pci, uuid = (cell.strip() for cell in line.split(","))
        found = {choose_devices([name])[0].uuid for name in (int(index), pci, uuid)}
        print(f"- card {index} by index, PCI id and UUID: {'the same' if found == {uuid} else f'WRONG: {found}'}")


def check_failure(engine: Engine, placing: _Placing, ids: np.ndarray, wanted: list[np.ndarray], cpu_program) -> None:
    """One card traps in the middle of a text: the logits stay what they were."""
    from cuda.bindings import driver

    from coli.devices.cuda.compile import compile_cubin

    placed = engine.on_thread(lambda: placing.run(None))
    engine.program = placed.program
    session = engine.session()
    session.prefill(ids[:PROMPT])
    equal = 0
    for number, token in enumerate(ids[PROMPT : PROMPT + len(wanted)].tolist()):
        if number == 20:
            device = placed.devices[1]
            engine.on_thread(lambda: _trap(device, driver, compile_cubin))
        equal += bool((session.step(token).view(np.uint32) == wanted[number].view(np.uint32)).all())
    print(f"- card 1 traps before token 20: identical: {equal} of {len(wanted)}; fallen: {placed.program.fallen}")
    session.close()
    engine.program = cpu_program
    engine.on_thread(placed.close)


def _trap(device, driver, compile_cubin) -> None:
    context = device._context
    context.set_current()
    text = 'extern "C" __global__ void trap() { asm("trap;"); }'
    module = context.check(driver.cuModuleLoadData(compile_cubin(device.card.arch, text)), "load")
    trap = context.check(driver.cuModuleGetFunction(module, b"trap"), "find")
    driver.cuLaunchKernel(trap, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
    try:
        context.check(driver.cuCtxSynchronize(), "trap")
    except DeviceError:
        context.lost = None  # the engine is to find out by itself


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", type=int, default=2)
    parser.add_argument("--same-card", action="store_true", help="the first card twice: no speeds")
    parser.add_argument("--geometry", default="qwen36-35b")
    parser.add_argument("--vram", type=int, default=4720, help="MiB on each card")
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args(argv)
    logging.getLogger("coli").setLevel(logging.ERROR)
    log.configure("quiet")
    cards = probe.list_devices()
    if args.same_card:
        cards = cards[:1] * args.cards
    if len(cards) < args.cards:
        print(f"{len(cards)} cards are here, {args.cards} were asked for", file=sys.stderr)
        return 2
    day = time.strftime("%Y-%m-%d")
    print(f"\n### {args.cards} cards, {args.geometry}, {cards[0].name}, {args.vram} MiB each, {day}\n")
    check_names()
    config = geometry(args.geometry)
    shape = ModelShape.from_config(config)
    container = make(args.geometry, 0.8)
    cpus = sorted(os.sched_getaffinity(0))
    ids = np.random.default_rng(7).integers(0, config["vocab_size"], PROMPT + 2 * args.tokens)
    engine = Engine(container, threads=len(cpus), cpus=cpus, context=2048)
    wanted, seconds, _ = run(engine, ids, 2 * args.tokens)
    off_s = statistics.median(seconds)
    engine.leave_cpus(cpus_to_leave(len(cpus), cpus, cards))
    cpu_program = engine.program
    cpu, _ = measure_cpu(engine)
    print(f"\nCPU alone: {1 / off_s:.1f} tok/s\n")
    row("second card", "split", "tok/s (median)", "predicted", "over measured", "slots", "MiB taken", "identical")
    row("---", "---", "---:", "---:", "---:", "---:", "---:", "---")

    def chosen() -> list:
        names = [0] * args.cards if args.same_card else range(args.cards)
        return [device for name in names for device in choose_devices([name])]

    for slowed in (False,) if args.same_card else (False, True):
        medians = {}
        with Slowed(cards[1].card) if slowed else contextlib.nullcontext():
            devices = chosen()
            figures = Probe(cpu, tuple(measure_card(d, engine, cpu)[0] for d in devices))
            for name, text in SPLITS.items():
                before = [device.free_bytes() for device in devices]
                placing = _Placing(container, engine, shape, devices, text, args.vram * MIB, None, figures)
                placed = engine.on_thread(lambda: placing.run(None))  # noqa: B023
                engine.program = placed.program
                found = decode(engine, placed, figures, ids, args.tokens, wanted)
                medians[name] = statistics.median(found.warm_s)
                used = [(b - d.free_bytes()) / MIB for b, d in zip(before, devices, strict=True)]
                predicted_s = found.predicted_s
                row("slowed" if slowed else "the same" if args.same_card else "alike", name,
                    f"{1 / medians[name]:.1f}", f"{1 / predicted_s:.1f}", f"{medians[name] / predicted_s:.2f}",
                    "+".join(str(placed.tier.n_slots(i)) for i in range(args.cards)),
                    "+".join(f"{n:,.0f}" for n in used), f"{found.same} of {found.n}")  # fmt: skip
                engine.program = cpu_program
                engine.on_thread(placed.close)
        ratio = medians["experts on both, trunk on 0"] / medians["auto"]
        print(f"\nauto is {ratio:.2f} times as fast as experts on both ({'slowed' if slowed else 'alike'})\n")
    devices = chosen()
    placing = _Placing(container, engine, shape, devices, SPLITS["whole layers split, experts on both"],
                       args.vram * MIB, None, figures)  # fmt: skip
    check_failure(engine, placing, ids, wanted[: args.tokens], cpu_program)
    engine.close()
    container.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
