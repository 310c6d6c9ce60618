"""Looking inside a forward pass: the residual stream, mixers, routing and states, layer by layer.

For tests and for people who compare engines.  It runs the same operations as ``Engine.forward``, one layer
at a time, and copies what the step wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence as Ids

import numpy as np

from coli._core import step

if TYPE_CHECKING:
    from coli.engine.session import Engine


def trace(engine: Engine, ids: Ids[int]) -> dict[str, Any]:
    """Teacher-force ids from an empty state and keep everything.  T tokens, L layers, H hidden, k experts a token.

    Returns logits (T, V), hidden (L + 1, T, H), mixer_out (L, T, H), router_logits (L, T, E), router_idx and
    router_w (L, T, k), and by layer index: state (Hv, dk, dv) and conv (K, C), newest row last, of DeltaNet layers;
    key and value (Hkv, T, d) of attention layers as stored in the cache, widened.
    """
    checked = engine.check_ids(ids)
    return engine.on_thread(lambda: _trace(engine, checked))


def _trace(engine: Engine, ids: np.ndarray) -> dict[str, Any]:
    config, runner, n = engine.config, engine.runner, len(ids)
    sequence = engine.begin(ids, engine.context)

    def copy(name: str, width: int) -> np.ndarray:
        return np.array(np.asarray(runner.buffer(name))[:, :width])

    out: dict[str, Any] = {"state": {}, "conv": {}, "key": {}, "value": {}}
    hidden, mixer, logits, idx, weight = [copy("x", config.hidden_size)], [], [], [], []
    for layer in range(config.num_hidden_layers):
        first = layer * step.N_OPS
        runner.run(first, first + step.OPS.index("NORM2"))
        mixer.append(copy("y", config.hidden_size))
        runner.run(first + step.OPS.index("NORM2"), first + step.N_OPS)
        hidden.append(copy("x", config.hidden_size))
        logits.append(copy("router", config.num_experts))
        idx.append(copy("top_idx", config.num_experts_per_tok))
        weight.append(copy("top_w", config.num_experts_per_tok))
    table = np.empty((n, engine.padded_vocab), np.float32)
    runner.head(range(n), table)
    runner.finish()
    attention = deltanet = 0
    for layer, kind in enumerate(config.layer_types):
        if kind == "full_attention":
            for values, name in enumerate(("key", "value")):
                out[name][layer] = _cache(engine, sequence, attention, bool(values), n)
            attention += 1
        else:
            out["state"][layer] = np.array(sequence.state(deltanet))
            ring = np.array(sequence.conv(deltanet))
            out["conv"][layer] = np.roll(ring, -(n % len(ring)), axis=0)
            deltanet += 1
    out.update(
        logits=np.ascontiguousarray(table[:, : config.vocab_size]),
        hidden=np.stack(hidden),
        mixer_out=np.stack(mixer),
        router_logits=np.stack(logits),
        router_idx=np.stack(idx),
        router_w=np.stack(weight),
    )
    return out


def _cache(engine: Engine, sequence: step.Sequence, index: int, values: bool, n: int) -> np.ndarray:
    """(Hkv, n, d) float32 of one attention layer's keys or values."""
    config = engine.config
    kind = np.float16 if engine.container.manifest.kv_dtype == "float16" else np.float32
    blocks = [
        np.frombuffer(sequence.kv_block(index, b, values), kind).reshape(
            config.num_key_value_heads, step.KV_BLOCK, config.head_dim
        )
        for b in range(-(-n // step.KV_BLOCK))
    ]
    return np.concatenate(blocks, axis=1)[:, :n].astype(np.float32)
