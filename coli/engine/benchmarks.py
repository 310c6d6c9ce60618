"""Speed of the parts of a step, each beside a plain read of the same bytes in the same run.

The ruler is an xor of the very buffers that a product reads, by the same pinned team, with four streams and
the same prefetch; the two alternate, and the figures are medians, so that a noisy machine moves both.
``coli bench`` prints these rows and ``bench/`` hands them to pytest-benchmark.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Callable, Iterator

import numpy as np

from coli._core import step
from coli.container.reader import Matrix
from coli.convert.synthetic import Synthetic, SyntheticContainer, geometry
from coli.engine.session import Engine

REPEATS = 7


@dataclass(frozen=True)
class Row:
    """One figure.  gb_s : weight bytes over the median time.   read_gb_s : the ruler.   ratio : of the two."""

    name: str
    threads: int
    gb_s: float
    read_gb_s: float
    ratio: float
    median_us: float
    n_bytes: int
    repeats: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def alternate(work: Callable[[], Any], read: Callable[[], Any], repeats: int = REPEATS) -> tuple[float, float]:
    """Median seconds of two calls that take turns, after one unmeasured turn of each."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 1):
        for kept, call in zip(times, (work, read)):
            start = time.perf_counter()
            call()
            if turn:
                kept.append(time.perf_counter() - start)
    return median(times[0]), median(times[1])


class Bench:
    """A product, an expert group or a step to measure.

    run : does it once, on the engine thread.   buffers : the weights that it reads.
    """

    def __init__(self, name: str, engine: Engine, run: Callable[[], Any], buffers: list[np.ndarray]) -> None:
        self.name = name
        self.engine = engine
        self.run = run
        self.buffers = buffers
        self.n_bytes = sum(b.nbytes // 64 * 64 for b in buffers)

    def read(self) -> None:
        self.engine.runner.read(self.buffers)

    def measure(self, repeats: int = REPEATS) -> Row:
        """Alternate with the ruler."""
        work_s, read_s = self.engine.on_thread(lambda: alternate(self.run, self.read, repeats))
        gb_s, read_gb_s = self.n_bytes / work_s / 1e9, self.n_bytes / read_s / 1e9
        n_threads = self.engine.team.n_threads
        return Row(self.name, n_threads, gb_s, read_gb_s, gb_s / read_gb_s, work_s * 1e6, self.n_bytes, repeats)


def _begin(engine: Engine) -> None:
    """A batch of one row, set up on the engine thread, so that single operations can be run."""

    def begin() -> None:
        engine.begin(np.zeros(1, np.int32))
        # so that no buffer of the operations measured is zero: a product of zeros may be faster
        for name in ("xn", "o", "x", "y"):
            buffer = np.asarray(engine.runner.buffer(name))
            buffer[:] = np.random.default_rng(1).standard_normal(buffer.shape).astype(np.float32)
        engine.runner.run(0, 1)

    engine.on_thread(begin)


# (trunk format, expert format) of one engine, and the names of the head's bench and of the experts'.
_KERNELS = {
    ("i8_row", "i4_group"): ("gemv_int8_lm_head", "experts_int4_random"),
    ("i8_group", "i4_row"): ("gemv_int8_group_lm_head", "experts_int4_row_random"),
    ("i4_group", "i8_row"): ("gemv_int4_lm_head", "experts_int8_random"),
}
KERNEL_NAMES = tuple(name for names in _KERNELS.values() for name in names)


class KernelBenches:
    """The products of a token at the geometry of Qwen3.6-35B-A3B, in four formats: a bench by its name, in any order.

    Each matrix is much larger than the caches, or one of many (256 experts of 1.6 MB, of int8 3.2 MB): what is measured
    is memory.  One engine is kept, of the formats last asked for; the embedding, 1 GB that no bench measures, is made
    once.
    """

    def __init__(
        self,
        threads: int,
        cpus: list[int] | None = None,
        isa: str | None = None,
        *,
        config: dict[str, Any] | None = None,
    ) -> None:
        self._weights = Synthetic(config or geometry("qwen36-35b") | {"num_hidden_layers": 1})
        self._team = {"threads": threads, "cpus": cpus, "isa": isa}
        self._formats: tuple[str, str] | None = None
        self._engine: Engine | None = None
        self._embed: Matrix | None = None

    def __getitem__(self, name: str) -> Bench:
        """The bench of a name in `KERNEL_NAMES`; those of other formats cannot be run any more."""
        formats, (head, _) = next(item for item in _KERNELS.items() if name in item[1])
        engine = self._engine_of(formats)
        return _head_bench(engine, name) if name == head else _experts_bench(engine, name)

    def _engine_of(self, formats: tuple[str, str]) -> Engine:
        if self._engine is None or self._formats != formats:
            self.close()
            made = () if self._embed is None else (self._embed,)
            container = SyntheticContainer(self._weights, trunk_format=formats[0], expert_format=formats[1], made=made)
            self._embed = container.embed
            self._engine, self._formats = Engine(container, **self._team), formats
            _begin(self._engine)
        return self._engine

    def close(self) -> None:
        """End the engine and let its matrices go.  May be called twice."""
        if self._engine is not None:
            self._engine.close()
            self._engine.container.close()
            self._engine = None


def kernel_benches(threads: int, cpus: list[int] | None = None, isa: str | None = None) -> Iterator[Bench]:
    """All of `KernelBenches`, each to be measured before the next is asked for."""
    with closing(KernelBenches(threads, cpus, isa)) as benches:
        for name in KERNEL_NAMES:
            yield benches[name]


def _head_bench(engine: Engine, name: str) -> Bench:
    """The logits of one row."""
    head, runner = engine.container.matrix("lm_head"), engine.runner
    logits = np.empty((1, engine.padded_vocab), np.float32)
    return Bench(name, engine, lambda: runner.head((0,), logits), [head.data[: head.n_blocks * head.block_bytes]])


def _experts_bench(engine: Engine, name: str) -> Bench:
    """Eight experts drawn anew for every call, as a router draws them; the shared expert is left out.

    The ruler reads one fixed draw: any eight cost the same.
    """
    slabs = engine.container.slabs("layers.0.mlp.experts")
    config, rng = engine.config, np.random.default_rng(2)
    runner, first = engine.runner, step.OPS.index("MOE")
    shape = 4, config.num_experts_per_tok
    draws = [np.sort(rng.choice(config.num_experts, shape, False).astype(np.int32)) for _ in range(64)]
    turn = iter(range(1 << 62))
    top_idx = np.asarray(runner.buffer("top_idx"))

    def pick() -> list[np.ndarray]:
        return list(draws[next(turn) % len(draws)])

    def run() -> None:
        runner.shared_external = True
        for ids in pick():
            top_idx[0] = ids
            runner.run(first, first + 1)

    def read() -> None:
        stride = slabs.stride_bytes
        for ids in pick():
            runner.read([slabs.data[e * stride : (e + 1) * stride] for e in ids])

    bench = Bench(name, engine, run, [slabs.data[: 4 * config.num_experts_per_tok * slabs.stride_bytes]])
    bench.read = read  # type: ignore[method-assign]
    return bench


def token_buffers(engine: Engine) -> list[np.ndarray]:
    """The weights that one token reads: the whole trunk, and top_k experts of each layer drawn at random."""
    container, config, rng = engine.container, engine.config, np.random.default_rng(3)
    buffers = []
    for layer, kind in enumerate(config.layer_types):
        p = f"layers.{layer}."
        names = ("self_attn.qkv_proj", "self_attn.o_proj")
        if kind != "full_attention":
            names = ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj")
        buffers += [container.matrix(p + n).data for n in (*names, "mlp.gate")]
        shared, experts = container.slabs(p + "mlp.shared_expert"), container.slabs(p + "mlp.experts")
        buffers.append(shared.data[: shared.stride_bytes])
        for e in rng.choice(config.num_experts, config.num_experts_per_tok, False):
            buffers.append(experts.data[e * experts.stride_bytes : (e + 1) * experts.stride_bytes])
    head = container.matrix("lm_head")
    return buffers + [head.data]


def decode_bench(engine: Engine, name: str = "decode_step", position: int = 16) -> Bench:
    """One token behind a short prompt: everything that a decode step does, against reading its weights."""
    rng = np.random.default_rng(4)
    session = engine.session()
    session.prefill(rng.integers(0, engine.vocab_size, position))
    out = np.empty((1, engine.vocab_size), np.float32)
    ids = iter(rng.integers(0, engine.vocab_size, 1 << 16))

    def run() -> None:
        engine.forward([(session, np.asarray([next(ids)], np.int32))], (0,), out)

    return Bench(name, engine, run, token_buffers(engine))


def prefill_tok_s(engine: Engine, tokens: int, repeats: int = 3) -> float:
    """Prompt tokens a second, each repeat from an empty state: nothing of an earlier prompt is used again."""
    rng, times = np.random.default_rng(5), []
    for turn in range(repeats + 1):
        ids, session = rng.integers(0, engine.vocab_size, tokens), engine.session()
        start = time.perf_counter()
        session.prefill(ids)
        if turn:
            times.append(time.perf_counter() - start)
    return tokens / median(times)
