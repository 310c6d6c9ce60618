"""The step: the same bits however the ids are cut, on any number of threads and any kernel path."""

from __future__ import annotations

import numpy as np
import pytest

from coli._core import kernels, step
from coli.container.reader import Container
from coli.engine.session import PREFILL_CHUNK, Engine
from coli.errors import BackendError, ColiError, RequestError
from conftest import FIXTURES, assert_same_bits

FORMATS = [(8, 4, "group"), (8, 8, "group"), (8, 4, "row"), (4, 4, "group"), (16, 16, "group")]
NAMES = ["tiny-random", "tiny-textonly"]


@pytest.fixture(scope="module")
def engine_of(make_container):
    """engine_of(name, formats, **options) -> Engine, kept for the module."""
    engines: dict = {}
    containers: list[Container] = []

    def get(name: str, formats=(8, 4, "group"), **options) -> Engine:
        key = (name, formats, tuple(sorted(options.items())))
        if key not in engines:
            trunk, expert, scales = formats
            path = make_container(name, trunk_bits=trunk, expert_bits=expert, expert_scales=scales)
            containers.append(Container.open(path))
            engines[key] = Engine(containers[-1], **options)
        return engines[key]

    yield get
    for engine in engines.values():
        engine.close()
    for container in containers:
        container.close()


def oracle(name: str):
    return np.load(FIXTURES / name / "oracle.npz")


def prompts(name: str) -> list[np.ndarray]:
    data = oracle(name)
    return [data[f"p{i}_ids"] for i in range(sum(k.endswith("_ids") for k in data.files))]


@pytest.mark.parametrize("name", NAMES)
def test_logits_16_bit_container_equal_float32_oracle(engine_of, name):
    """A 16-bit container gives the float32 reference's logits within its own error, and its greedy ids."""
    engine, data = engine_of(name, (16, 16, "group")), oracle(name)
    for i, ids in enumerate(prompts(name)):
        expected = data[f"p{i}_logits"]
        actual = engine.logits(ids)[-len(expected) :]
        assert np.abs(actual - expected).max() < 3e-3
        session, greedy = engine.session(), []
        logits = session.prefill(ids)
        for _ in data[f"p{i}_greedy"]:
            greedy.append(int(np.argmax(logits)))
            logits = session.step(greedy[-1])
        assert greedy == data[f"p{i}_greedy"].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_routing_16_bit_container_equals_oracle(engine_of, name):
    """Every expert that the reference's router chose is chosen, in the same order, with the same weight."""
    from coli.engine.trace import trace

    engine, data = engine_of(name, (16, 16, "group")), oracle(name)
    for i, ids in enumerate(prompts(name)):
        traced = trace(engine, ids)
        assert np.array_equal(traced["router_idx"], data[f"p{i}_router_idx"].astype(np.int32))
        assert np.abs(traced["router_w"] - data[f"p{i}_router_w"]).max() < 1e-4


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_prefill_in_any_cut_gives_the_same_bits(engine_of, name, formats):
    """One prefill, any cut of it, and one token at a time leave the same logits and the same state."""
    engine = engine_of(name, formats)
    ids = max(prompts(name), key=len)
    whole = engine.logits(ids)
    one_by_one = engine.session()
    for at, token in enumerate(ids):
        assert_same_bits(one_by_one.step(int(token)), whole[at], f"{name} {formats} step {at}")
    for cut in (1, 2, 3, len(ids) // 2, len(ids) - 1):
        session = engine.session()
        session.prefill(ids[:cut])
        assert_same_bits(session.prefill(ids[cut:]), whole[-1], f"{name} {formats} cut {cut}")
        assert session.ids == ids.tolist() and session.position == len(ids)
        for index in range(sum(kind != "full_attention" for kind in engine.config.layer_types)):
            assert_same_bits(session._sequence.state(index), one_by_one._sequence.state(index), f"state {index}")
            assert_same_bits(session._sequence.conv(index), one_by_one._sequence.conv(index), f"conv {index}")


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129])
def test_prefill_equals_steps_at_chunk_borders(engine_of, length):
    """C27: lengths shorter than the convolution and around the chunks of attention make no step."""
    engine = engine_of("tiny-random")
    ids = np.random.default_rng(length).integers(0, 256, length)
    session = engine.session()
    for token in ids:
        last = session.step(int(token))
    assert_same_bits(engine.session().prefill(ids), last, f"length {length}")


@pytest.mark.parametrize("name", NAMES)
def test_threads_and_paths_give_the_same_bits(engine_of, name):
    """1, 2, 3, 4 and 7 threads, and every kernel path of this machine, give the scalar path's logits."""
    ids = max(prompts(name), key=len)[:70]
    for formats in ((8, 4, "group"), (4, 8, "group"), (16, 16, "group")):
        expected = engine_of(name, formats, isa="scalar", threads=1).logits(ids)
        for threads in (1, 2, 3, 4, 7) if formats == (8, 4, "group") else (2,):
            assert_same_bits(engine_of(name, formats, threads=threads).logits(ids), expected, f"{threads} threads")
        for isa in kernels.available():
            if isa != "amx":
                assert_same_bits(engine_of(name, formats, isa=isa).logits(ids), expected, isa)


def test_batch_of_sequences_gives_each_the_bits_it_has_alone(engine_of):
    """Rows of several sequences, some prefilling and some decoding, do not touch each other."""
    engine = engine_of("tiny-random", threads=2)
    rng = np.random.default_rng(5)
    alone, sessions = [], []
    for n in (3, 65, 1, 20):
        ids = rng.integers(0, 256, n).astype(np.int32)
        extra = rng.integers(0, 256, 1 + n % 3).astype(np.int32)
        reference = engine.session()
        reference.prefill(ids)
        alone.append(reference.prefill(extra))
        session = engine.session()
        session.prefill(ids)
        sessions.append((session, extra))
    rows = np.cumsum([len(extra) for _, extra in sessions]) - 1
    out = np.empty((len(rows), engine.vocab_size), np.float32)
    engine._thread.call(lambda job: engine.forward(sessions, rows.tolist(), out))
    for i, expected in enumerate(alone):
        assert_same_bits(out[i], expected, f"sequence {i}")


def test_long_context_split_over_threads_gives_the_same_bits(engine_of):
    """A lone row whose attention is split by chunks over threads equals one thread's heads in turn."""
    ids = np.random.default_rng(9).integers(0, 256, 700)
    one, three = engine_of("tiny-random", threads=1), engine_of("tiny-random", threads=3)
    a, b = one.session(), three.session()
    a.prefill(ids)
    b.prefill(ids)
    for token in range(3):
        assert_same_bits(b.step(token), a.step(token), f"step {token}")


def test_copy_is_independent(engine_of):
    """A copy goes on as the original would, and neither changes the other."""
    engine = engine_of("tiny-random")
    ids = np.random.default_rng(2).integers(0, 256, 80)
    original = engine.session()
    original.prefill(ids)
    copy = original.copy()
    expected = [original.step(t) for t in (1, 2, 3)]
    copy.step(200)
    again = engine.session()
    again.prefill(ids)
    second = again.copy()
    for token, logits in zip((1, 2, 3), expected):
        assert_same_bits(second.step(token), logits, f"copy, token {token}")
    assert second.ids == original.ids and copy.ids != original.ids


def _used(layout) -> int:
    return layout.n_blocks * layout.block_bytes


@pytest.mark.parametrize("threads", [1, 3])
def test_weights_are_read_once_a_chunk(engine_of, threads):
    """T tokens read each trunk matrix ceil(T / chunk) times, each chosen expert once a chunk, and nothing else."""
    from coli.engine.trace import trace

    engine = engine_of("tiny-random", threads=threads)
    ids = np.random.default_rng(0).integers(0, 256, 2 * PREFILL_CHUNK + 100)
    chosen = trace(engine, ids)["router_idx"]  # (L, T, k)
    before = engine.stats()["weight_bytes_read"]
    engine.session().prefill(ids)
    read = engine.stats()["weight_bytes_read"] - before
    container, expected, chunks = engine.container, 0, 3
    for layer, kind in enumerate(engine.config.layer_types):
        p = f"layers.{layer}."
        names = ["mlp.gate", "mlp.shared_expert_gate"]
        names += (
            ["self_attn.qkv_proj", "self_attn.o_proj"]
            if kind == "full_attention"
            else ["linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj"]
        )
        expected += chunks * sum(_used(container.matrix(p + name)) for name in names)
        for slabs, times in (
            (container.slabs(p + "mlp.shared_expert"), chunks),
            (
                container.slabs(p + "mlp.experts"),
                sum(len(np.unique(chosen[layer, at : at + PREFILL_CHUNK])) for at in range(0, len(ids), PREFILL_CHUNK)),
            ),
        ):
            expected += times * sum(_used(getattr(slabs, part)) for part in ("gate", "up", "down"))
    assert read == expected + _used(container.matrix("lm_head"))


def test_context_longer_prompt_is_refused(engine_of):
    """A prompt longer than the context is refused with both numbers, before anything is computed."""
    engine = engine_of("tiny-random", context=64)
    session = engine.session()
    with pytest.raises(RequestError, match="65 tokens do not fit the context of 64") as info:
        session.prefill([1] * 65)
    assert info.value.code == "context_length_exceeded" and session.position == 0
    session.prefill([1] * 64)
    with pytest.raises(RequestError, match="65 tokens"):
        session.step(1)


def test_context_default_and_limit(engine_of):
    """The context is 8,192 or the model's own limit; more than that limit is refused."""
    assert engine_of("tiny-random").context == 4096
    assert engine_of("tiny-textonly").context == 2048
    with pytest.raises(RequestError, match="takes 1 to 4096"):
        engine_of("tiny-random", context=4097)


@pytest.mark.parametrize("ids", [[], [256], [-1], [0, 1, 999], [[1]], [1.5]])
def test_ids_out_of_range_are_refused(engine_of, ids):
    """An id that is no row of the vocabulary is refused with its place and value; the session is unchanged."""
    engine = engine_of("tiny-random")
    session = engine.session()
    session.prefill([1, 2])
    with pytest.raises(RequestError):
        session.prefill(ids)
    assert session.ids == [1, 2] and session.position == 2


def test_isa_unknown_or_missing_is_refused(make_container):
    """A kernel path that this CPU lacks is refused with those that it has."""
    with Container.open(make_container("tiny-random")) as container:
        with pytest.raises(BackendError, match="scalar"):
            Engine(container, isa="neon" if "neon" not in kernels.available() else "avx2")


def test_closed_engine_refuses_calls(make_container):
    """After close a call is an error, not a hang."""
    with Container.open(make_container("tiny-random")) as container:
        engine = Engine(container)
        session = engine.session()
        session.prefill([1])
        engine.close()
        engine.close()
        with pytest.raises(ColiError, match="closed"):
            session.step(1)


def test_engine_thread_keeps_the_caller_unpinned(make_container):
    """Workers are pinned; the thread that loads the model keeps its whole mask."""
    import os

    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("no affinity on this system")
    before = os.sched_getaffinity(0)
    cpus = sorted(before)[:2]
    with Container.open(make_container("tiny-random")) as container:
        engine = Engine(container, threads=len(cpus), cpus=cpus)
        assert os.sched_getaffinity(0) == before
        if step.has_openmp():
            assert engine.stats()["thread_map"] == [(cpu, 1) for cpu in cpus]
        engine.close()
