"""The engine with a card, real and emulated, against the CPU, bit for bit, and when the card fails."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from devices.cuda.machines import machine, on

import coli
from coli.devices.cuda import compile as compiling
from coli.devices.cuda import probe
from coli.tier.promotion import Promotion
from conftest import assert_same_bits

MIB = 1 << 20
CONTEXT = 512
THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))  # the rest is for what plays the card
LISTS = [
    "lmhead=0",
    "dnproj=0",
    "dnout=0",
    "attnproj=0",
    "shexp=0",
    "experts=0",
    "dnproj=0,dnout=0,attnproj=0,experts=cpu",
    "dnproj=0:2,dnout=0:4,shexp=0,experts=cpu",
    "lmhead=0,dnproj=0,dnout=0,attnproj=0,shexp=0,experts=0",
]
MODELS = ["demo", "tiny-random", "tiny-textonly"]
PROMPT = "The river "
TRAP = 'extern "C" __global__ void trap() { asm("trap;"); }'
HOG = """
import sys
from cuda.bindings import driver as d
d.cuInit(0); dev = d.cuDeviceGet(0)[1]; ctx = d.cuDevicePrimaryCtxRetain(dev)[1]; d.cuCtxSetCurrent(ctx)
free = d.cuMemGetInfo()[1]
print(int(d.cuMemAlloc(free - int(sys.argv[1]))[0]), flush=True)
sys.stdin.read()
"""


def answer(model: coli.Model, ids: list[int]) -> list[np.ndarray]:
    """Logits of prefills across the border of a K/V block, of steps, of a copy, and of a batch of two sessions."""
    session = model.session()
    logits = [session.prefill(ids[:40]), session.prefill(ids[40:130])]
    logits += [session.step(token) for token in ids[130:136]]
    copied = session.copy()
    logits += [copied.step(ids[0]), session.step(ids[1]), copied.prefill(ids[2:7])]
    out = np.empty((2, model.engine.vocab_size), np.float32)
    parts = [(copied, np.array(ids[:3], np.int32)), (session, np.array(ids[5:6], np.int32))]
    model.engine.on_thread(lambda: model.engine.forward(parts, [2, 3], out))
    return [*logits, *out, session.step(ids[9])]


@pytest.fixture(scope="module")
def where(request):
    with machine(request.param):
        yield request.param


@pytest.fixture(scope="module")
def cases(make_container):
    """cases(name) -> (path, ids, what the CPU answers)."""
    made: dict[str, tuple] = {}

    def case(name: str):
        if name not in made:
            path = "demo" if name == "demo" else str(make_container(name))
            with coli.load(path, devices="none", threads=THREADS, context=CONTEXT) as model:
                ids = np.random.default_rng(7).integers(0, model.config.vocab_size, 140).tolist()
                made[name] = path, ids, answer(model, ids)
        return made[name]

    return case


def check(case, what: str, prepare=None, **options) -> dict:
    """Load with the first card, compare, return the stats."""
    path, ids, expected = case
    options = {"devices": "0", "vram": 2048 * MIB, "threads": THREADS, "context": CONTEXT, **options}
    with coli.load(path, **options) as model:
        if prepare is not None:
            prepare(model)
        for at, (a, b) in enumerate(zip(answer(model, ids), expected, strict=True)):
            assert_same_bits(a, b, f"{what}, logits {at}")
        return {**model.stats(), "mixers": len(model.engine.program.mixers)}


@pytest.mark.parametrize(
    ("where", "name", "place"),
    on(
        card=[(name, place) for name in MODELS for place in ("auto", "auto:bytes", "off", *LISTS)],
        emulated=[("tiny-random", place) for place in ("auto:bytes", "off", *LISTS[-3:])],
    ),
    indirect=["where"],
)
def test_every_list_answers_as_the_cpu(cases, where, name, place):
    """auto, off and lists on the demo model and the fixtures, prefill and decode."""
    stats = check(cases(name), f"{name} {place}", place=place)
    assert stats["fallen"] == []
    # by time, nothing so small is worth a hop
    assert stats["mixers"] > 0 or place not in ("auto:bytes", LISTS[-1], LISTS[6])


@pytest.mark.parametrize(
    ("where", "vram_mib"),
    on(card=[(n,) for n in (1, 49, 50, 51, 53, 56, 60, 70)], emulated=[(51,)]), indirect=["where"],
)  # fmt: skip
def test_every_budget_answers_as_the_cpu(cases, where, vram_mib):
    """From less than the staging takes to all of the model."""
    check(cases("demo"), f"{vram_mib} MiB", vram=vram_mib * MIB)


@pytest.mark.parametrize("where", on(card=[()], emulated=[()]), indirect=True)
def test_forced_evictions_answer_as_the_cpu(cases, where):
    """An expert leaves its slot at every token."""

    def evict(model: coli.Model) -> None:
        tier = model.placed.tier
        tier.exchange.policy = Promotion(every_tokens=1, max_swaps=4, ratio=0.0, margin=-1.0, max_slowdown=math.inf)
        between = tier.between_tokens

        def settled() -> None:
            between()
            tier.settle()

        tier.between_tokens = settled

    stats = check(cases("demo"), "evictions", evict, vram=51 * MIB, place="off")
    assert stats["tier"]["swaps"] >= 8


def text_of(model: coli.Model, at_token: int = -1, act=None) -> str:
    """64 greedy tokens, with something done after one of them."""
    pieces, generation = [], model.generate(PROMPT, max_tokens=64)
    for n, piece in enumerate(generation):
        pieces.append(piece)
        if n == at_token:
            act(model)
    return "".join(pieces)


def trap(model: coli.Model) -> None:
    """Start a kernel that traps, on the stream of the card's dense work."""
    from cuda.bindings import driver

    device = model.placed.devices[0]

    def start() -> None:
        context = device._context
        module = context.check(driver.cuModuleLoadData(compiling.compile_cubin(device.card.arch, TRAP)), "load")
        kernel = context.check(driver.cuModuleGetFunction(module, b"trap"), "find")
        driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, device._lanes[0].stream, 0, 0)

    model.engine.on_thread(start)


def in_a_process_of_its_own(where: str, body: str) -> str:
    """A context that a kernel has killed stays dead for its process."""
    body = textwrap.indent(body, "    ")
    code = f"from devices.cuda.test_engine_card import *\nwith machine({where!r}) as emulated:\n{body}"
    done = subprocess.run([sys.executable, "-c", code], env=_environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


def _environment() -> dict[str, str]:
    from pathlib import Path

    root = Path(coli.__file__).parent.parent
    path = [str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


@pytest.mark.parametrize(
    ("where", "place"),
    on(card=[("auto:bytes",), ("dnproj=0,shexp=0,lmhead=0,experts=0",)], emulated=[("auto:bytes",)]),
    indirect=["where"],
)  # fmt: skip
def test_trap_in_token_20_leaves_the_text(where, place):
    """A kernel that traps loses the card in the middle of an answer; the text goes on, one line says how long."""
    said = in_a_process_of_its_own(where, f"""
from coli import log
log.configure("info")
with coli.load("demo", devices="none", threads=THREADS, context=CONTEXT) as model:
    expected = text_of(model)
with coli.load("demo", devices="0", vram=2048 * MIB, threads=THREADS, context=CONTEXT, place={place!r}) as model:
    assert text_of(model) == expected, "before"
    found = text_of(model, 20, trap)
    assert model.placed.program.lost, "the card was not lost"
    assert found == expected, (found, expected)
assert emulated is None or "trap" in emulated.complaint
print("equal", len(expected))
""")
    assert "equal" in said and "is lost" in said
    assert place != "auto" or "was computed again in" in said
    print(said)


@pytest.mark.parametrize("where", on(card=[()], emulated=[]), indirect=True)
def test_memory_taken_by_another_process_leaves_the_text(cases, where):
    """An arena that fails although it was planned leaves the card out, and the answers as they were."""
    device = probe.list_devices()[0]
    device._opened()
    hog = subprocess.Popen(
        [sys.executable, "-c", HOG, str(24 * MIB)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        hog.stdout.readline()
        assert device.free_bytes() < 40 * MIB
        device.free_bytes = lambda: 1 << 30
        stats = check(cases("demo"), "a full card", devices=[device], vram="auto")
        assert stats["tier"]["residents"] == 0
    finally:
        hog.stdin.close()
        hog.wait()
