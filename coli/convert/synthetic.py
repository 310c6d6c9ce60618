"""Models of a real geometry with random weights: what benchmarks and placement runs use instead of 20 GB of download.

One generator for everything: the container on disk, the same in memory, a Hugging Face checkpoint and a GGUF
(``synth_files``).  Small tensors (embedding, norms, convolution, router) are the same numbers in all of them;
the big matrices are random in each, with the same spread.  A tensor depends on the seed and its name alone,
so any of them can be made without the others.

``skew`` makes the router prefer some experts, as a trained one does: expert ranks are shuffled by layer and
rank r is chosen about in proportion to r ** -skew.  It works through feature 0 of the residual stream, which
every embedding row holds at the same value and no layer writes to (row 0 of every output matrix is zero), so
that the router's column 0 is a bias.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from coli.config import ModelConfig
from coli.container.layout import FORMATS, MatrixLayout, SlabLayout, matrix_layout, slab_layout
from coli.container.reader import Matrix, Slabs
from coli.container.schema import EXPERT_SLABS, MATRIX, Entry, entries
from coli.errors import RequestError

_QWEN36_35B: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
    "eos_token_id": 0,
}

GEOMETRIES: dict[str, dict[str, Any]] = {
    "small8": _QWEN36_35B | {"num_hidden_layers": 8, "num_experts": 64, "vocab_size": 32000},
    "qwen36-35b": _QWEN36_35B,
}

# Feature 0 of every embedding row. Large beside the others (standard deviation 1), so that the norm leaves
# the router a steady value to multiply its bias with.
_BIAS_FEATURE = 8.0
# Output matrices add this much of their input's size to the residual stream: it grows slowly over 40 layers.
_OUTPUT_GAIN = 0.1
EMBED_ROWS = 4096  # rows made at once
_OUTPUTS = ("out_proj", "o_proj", "down")


def geometry(name: str) -> dict[str, Any]:
    """config.json of a named geometry.  RequestError lists those there are."""
    if name not in GEOMETRIES:
        raise RequestError(f"no geometry {name}; known are {', '.join(GEOMETRIES)}", "GEOMETRY")
    return GEOMETRIES[name]


class Synthetic:
    """Random weights for one geometry.

    config_dict : as in config.json.   seed : of all tensors.   skew : exponent of the experts' popularity, 0 is even.
    """

    def __init__(self, config_dict: dict[str, Any], *, seed: int = 0, skew: float = 0.0) -> None:
        self.config_dict = config_dict
        self.config = ModelConfig.from_dict(config_dict, "geometry")
        self.seed = seed
        self.skew = skew

    def generator(self, name: str) -> np.random.Generator:
        """The stream of random numbers that belongs to a tensor."""
        return np.random.Generator(np.random.SFC64([self.seed, zlib.crc32(name.encode())]))

    def plain(self, entry: Entry) -> np.ndarray:
        """A small tensor or the embedding: float32 values that bf16 holds exactly, of the entry's shape."""
        rng, shape, leaf = self.generator(entry.name), entry.shape, entry.name.rpartition(".")[2]
        if leaf == "A_log":
            values = np.log(rng.uniform(0.2, 6.0, shape))
        elif leaf == "dt_bias":
            values = rng.uniform(-4.0, 0.5, shape)
        elif leaf == "conv1d":
            values = rng.uniform(-0.7, 0.7, shape)
        elif leaf == "gate":
            values = self._router(rng, shape)
        elif entry.name == "embed_tokens":
            return np.concatenate([bf16_to_float32(rows) for rows in self.embed_blocks()])
        elif len(shape) == 1:
            values = 0.1 * rng.standard_normal(shape)
            if "linear_attn.norm" in entry.name:
                values += 1.0  # the one norm that is not zero-centred
            if entry.shape == (self.config.hidden_size,):
                values[0] = 0.0  # the norms leave feature 0 its size
        else:
            values = rng.standard_normal(shape) / np.sqrt(shape[-1])
        return bf16_to_float32(float32_to_bf16(np.asarray(values, np.float32)))

    def embed_block(self, first: int) -> np.ndarray:
        """Rows [first, first + EMBED_ROWS) of the embedding, bf16 payloads (whole, it would be 2 GB of float32)."""
        rng = self.generator(f"embed_tokens.{first}")
        n = min(EMBED_ROWS, self.config.vocab_size - first)
        values = rng.standard_normal((n, self.config.hidden_size), np.float32)
        values[:, 0] = _BIAS_FEATURE
        return float32_to_bf16(values)

    def embed_blocks(self) -> Iterator[np.ndarray]:
        """The whole embedding, block by block."""
        return map(self.embed_block, range(0, self.config.vocab_size, EMBED_ROWS))

    def _router(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Logits of about unit spread, and the bias of an expert's rank in column 0."""
        values = rng.standard_normal(shape) / np.sqrt(shape[1])
        popularity = -self.skew * np.log(1.0 + rng.permutation(shape[0]))
        values[:, 0] = (popularity - popularity.mean()) / (0.7 * _BIAS_FEATURE)
        return values

    def spread(self, name: str, cols: int) -> float:
        """Standard deviation of a big matrix's weights."""
        leaf = name.rpartition(".")[2]
        return (_OUTPUT_GAIN if leaf in _OUTPUTS else 1.0) / float(np.sqrt(cols))

    def blocks(self, name: str, layout: MatrixLayout, out: np.ndarray, rng: np.random.Generator) -> None:
        """Fill uint8 ``out`` with a random R16 matrix.  ``name`` tells an output matrix, whose row 0 is zero."""
        number = FORMATS[layout.format]
        out[layout.used_bytes :] = 0
        flat = out[: layout.used_bytes]
        _random_bytes(rng, flat)
        lines = flat.reshape(layout.n_blocks, layout.block_bytes)
        payload = lines[:, layout.header_bytes :]
        if number.bits == 8:
            payload[payload == 0x80] = 0  # -128 is no int8 weight (docs/numerics.md, section 2)
        # spread of uniform int8 is 73.6, of uniform nibbles 4.6; signs of the scales take the nibbles' mean away
        scale = self.spread(name, layout.cols) / (73.6 if number.bits == 8 else 4.6)
        headers = lines[:, : layout.header_bytes]
        headers[:] = 0
        per_group = number.scales == "group"
        shape = (layout.n_blocks, layout.n_groups if per_group else 1, 16)
        scales = (scale * rng.uniform(0.7, 1.3, shape) * rng.choice((-1.0, 1.0), shape)).astype(np.float32)
        if name.rpartition(".")[2] in _OUTPUTS:
            scales[0, :, 0] = 0.0
        ragged = layout.n_blocks * 16 - layout.rows
        if ragged:
            scales[-1, :, 16 - ragged :] = 0.0
        stored = np.ascontiguousarray(scales.astype(np.float16) if per_group else scales).view(np.uint8)
        headers[:, : stored.shape[1] * stored.shape[2]] = stored.reshape(layout.n_blocks, -1)

    def slab(self, name: str, layout: SlabLayout, out: np.ndarray, rng: np.random.Generator) -> None:
        """Fill one expert: gate, up, down."""
        for part in ("gate", "up", "down"):
            matrix, at = getattr(layout, part), getattr(layout, f"{part}_offset")
            self.blocks(f"{name}.{part}", matrix, out[at : at + matrix.total_bytes], rng)


def _random_bytes(rng: np.random.Generator, out: np.ndarray) -> None:
    words = len(out) // 8
    out[: words * 8].view(np.uint64)[:] = rng.integers(0, 2**64, words, np.uint64)
    out[words * 8 :] = rng.integers(0, 256, len(out) - words * 8, np.uint8)


def float32_to_bf16(values: np.ndarray) -> np.ndarray:
    """Round to nearest even; uint16 payloads."""
    u = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_to_float32(payload: np.ndarray) -> np.ndarray:
    """Widen uint16 payloads."""
    return (payload.astype(np.uint32) << 16).view(np.float32)


class SyntheticContainer:
    """A container that was never written: what ``container.reader.Container`` hands out, made on demand.

    Each matrix is made once and kept, so a part of a model costs that part's memory.   made : row-major matrices that
    another container of the same weights has made; they are the same in every format.
    """

    def __init__(
        self,
        weights: Synthetic,
        *,
        trunk_format: str = "i8_row",
        expert_format: str = "i4_group",
        made: Iterable[Matrix] = (),
    ) -> None:
        self.weights = weights
        self.config = weights.config
        self.trunk_format, self.expert_format = trunk_format, expert_format
        self.manifest = SimpleNamespace(
            kv_dtype="float16",
            trunk_format=trunk_format,
            expert_format=expert_format,
            is_quantised=True,
            tied=False,
        )
        self.path = None
        self._entries = {e.name: e for e in entries(weights.config)}
        self._made: dict[str, Any] = {matrix.name: matrix for matrix in made}

    def matrix(self, name: str) -> Matrix:
        """A matrix of the trunk in its format, or a row-major one in bf16."""
        if name not in self._made:
            entry = self._entries[name]
            rows, cols = entry.shape
            format = self.trunk_format if entry.kind == MATRIX else "bf16"
            layout = matrix_layout(format, rows, cols)
            data = np.empty(layout.total_bytes, np.uint8)
            if entry.kind == MATRIX:
                self.weights.blocks(name, layout, data, self.weights.generator(name))
            elif name == "embed_tokens":
                rows_of = data[: layout.used_bytes].view(np.uint16).reshape(rows, cols)
                first = 0
                for block in self.weights.embed_blocks():
                    rows_of[first : first + len(block)] = block
                    first += len(block)
            else:
                data[: layout.used_bytes] = float32_to_bf16(self.weights.plain(entry)).view(np.uint8).reshape(-1)
            self._made[name] = Matrix(
                name, format, rows, cols, layout.block_bytes, layout.n_blocks, layout.n_groups, data
            )
        return self._made[name]

    @property
    def embed(self) -> Matrix:
        """The embedding, (V, H) bf16."""
        return self.matrix("embed_tokens")

    def slabs(self, name: str) -> Slabs:
        """All experts of a layer, or its shared expert."""
        if name not in self._made:
            entry = self._entries[name]
            count = entry.shape[0] if entry.kind == EXPERT_SLABS else 1
            format = self.expert_format if entry.kind == EXPERT_SLABS else self.trunk_format
            layout = slab_layout(format, entry.shape[-1], entry.shape[-2])
            data = np.empty(count * layout.total_bytes, np.uint8)
            rng = self.weights.generator(name)
            for i in range(count):
                self.weights.slab(name, layout, data[i * layout.total_bytes : (i + 1) * layout.total_bytes], rng)
            self._made[name] = Slabs(
                name, format, count, layout.total_bytes, entry.shape[-1], entry.shape[-2], layout.gate, layout.up,
                layout.down, layout.gate_offset, layout.up_offset, layout.down_offset, data,
            )  # fmt: skip
        return self._made[name]

    def float32(self, name: str) -> np.ndarray:
        """A small tensor."""
        return self.weights.plain(self._entries[name])

    def will_not_need(self, name: str) -> None:
        """Nothing: what was made is here and nowhere else."""

    def close(self) -> None:
        """Let the memory go."""
        self._made.clear()
