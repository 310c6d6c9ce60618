"""``coli inspect``: what a container, or a checkpoint that was not converted, holds."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from coli.cli import common

if TYPE_CHECKING:
    from coli.container.reader import Container
    from coli.convert.checkpoint import Checkpoint

HELP = (
    "Show a model's geometry and number formats, its bytes by component, and the bytes that one decoded token reads. "
    "A Hugging Face folder or a GGUF file is shown as it is, without converting it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)
    parser.add_argument("--verify", action="store_true", help="read every byte: checksums, and no NaN or -128 anywhere")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    from coli.container.reader import Container
    from coli.convert.gguf import open_checkpoint
    from coli.convert.resolve import find_model, is_container

    path = find_model(args.model)
    if is_container(path):
        with Container.open(path) as container:
            found = describe_container(container)
            if args.verify:
                found["verified_bytes"] = _verify(container)
    else:
        with open_checkpoint(path) as checkpoint:
            if args.verify:
                _refuse_verify(path)
            found = describe_checkpoint(checkpoint)
    print(json.dumps(found, indent=1) if args.json else "\n".join(_lines(found)))
    return 0


def describe_container(container: Container) -> dict[str, Any]:
    """Everything that ``coli inspect`` shows of a container."""
    manifest = container.manifest
    by_component = container.bytes_by_component()
    file_bytes = sum(header.file_bytes for header in container.headers.values())
    read = container.bytes_read_per_token()
    return {
        "path": str(container.path),
        "kind": "container",
        "geometry": asdict(container.config),
        "chat_template": _chat_template(container.path),
        "stop_ids": _stop_ids(container.path),
        "formats": {
            "trunk": manifest.trunk_format,
            "experts": manifest.expert_format,
            "embedding": container.embed.format,
            "kv": manifest.kv_dtype,
            "tied": manifest.tied,
        },
        "bytes_by_component": by_component | {"headers": file_bytes - sum(by_component.values())},
        "file_bytes": file_bytes,
        "bytes_read_per_token": read,
        "bytes_read_per_token_total": sum(read.values()),
        "expert": {
            "bytes": manifest.experts["stride_bytes"],
            "count": container.config.num_hidden_layers * container.config.num_experts,
        },
        "source": manifest.source,
        "skipped": manifest.skipped,
        "report": manifest.report,
        "coli_version": manifest.coli_version,
    }


def describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything that ``coli inspect`` shows of a checkpoint; its tensors are checked as for a conversion."""
    from coli.convert.gguf import stored_types
    from coli.convert.plan import plan_sources

    plan_sources(checkpoint)
    with _small_files(checkpoint) as folder:
        template, stops = _chat_template(folder), _stop_ids(folder)
    return {
        "path": str(checkpoint.path),
        "kind": "checkpoint",
        "geometry": asdict(checkpoint.config),
        "chat_template": template,
        "stop_ids": stops,
        "tied": checkpoint.config.tie_word_embeddings,
        "files": len(checkpoint.files),
        "tensors": stored_types(checkpoint),
        "skipped": checkpoint.skipped,
    }


@contextmanager
def _small_files(checkpoint: Checkpoint) -> Iterator[Path]:
    """A folder with a checkpoint's small files: its own, or one made for a GGUF file, which has them as metadata."""
    if checkpoint.path.is_dir():
        yield checkpoint.path
        return
    with TemporaryDirectory() as folder:
        for name, data in checkpoint.extra_files().items():
            Path(folder, name).write_bytes(data)
        yield Path(folder)


def _chat_template(path: Path) -> dict[str, Any]:
    """The file whose template is used, and whether the two files that may hold one disagree."""
    from coli.text.template import template_sources

    sources = template_sources(path)
    return {"used": sources.used, "differ": sources.differ}


def _stop_ids(path: Path) -> list[int]:
    """The ids that end an answer: those of all files that name one."""
    from coli.text.defaults import stop_ids
    from coli.text.tokenizer import Tokenizer

    token_id = Tokenizer.open(path).token_id if (path / "tokenizer.json").exists() else None
    return sorted(stop_ids(path, token_id))


def _verify(container: Container) -> int:
    from tqdm import tqdm

    from coli.container.verify import verify

    total = sum(file["bytes"] for file in container.manifest.files.values())
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="verify", leave=False, disable=not sys.stderr.isatty()
    ) as bar:
        return verify(container, bar.update)


def _refuse_verify(path: Path) -> None:
    from coli.errors import RequestError

    raise RequestError(f"{path}: a checkpoint holds no checksums to verify; convert it first", "--verify")


def _lines(found: dict[str, Any]) -> Iterator[str]:
    geometry = found["geometry"]
    yield f"{found['path']}  ({found['kind']})"
    yield ""
    layers = geometry["layer_types"]
    attention = sum(kind == "full_attention" for kind in layers)
    shown = {
        "model": geometry["model_type"],
        "layers": f"{len(layers)}: {len(layers) - attention} DeltaNet, {attention} attention",
        "hidden / vocabulary": f"{geometry['hidden_size']} / {geometry['vocab_size']}",
        "attention": f"{geometry['num_attention_heads']} query and {geometry['num_key_value_heads']} key heads of "
        f"{geometry['head_dim']}; RoPE on {geometry['partial_rotary_factor']:g} of it, "
        f"theta {geometry['rope_theta']:g}",
        "DeltaNet": f"{geometry['linear_num_key_heads']} key heads of {geometry['linear_key_head_dim']}, "
        f"{geometry['linear_num_value_heads']} value heads of {geometry['linear_value_head_dim']}, "
        f"convolution over {geometry['linear_conv_kernel_dim']}",
        "experts": f"{geometry['num_experts']} a layer, each {geometry['moe_intermediate_size']} wide; "
        f"{geometry['num_experts_per_tok']} a token, and a shared one {geometry['shared_expert_intermediate_size']} "
        "wide",
        "context": f"{geometry['max_position_embeddings']:,} positions",
        "stop ids": ", ".join(map(str, found["stop_ids"])) or "none",
        "chat template": found["chat_template"]["used"] or "none",
    }
    if found["chat_template"]["differ"]:
        shown["chat template"] += "; tokenizer_config.json holds a different one, which is not used"
    if "formats" in found:
        formats = found["formats"]
        shown["formats"] = (
            f"trunk {formats['trunk']}, experts {formats['experts']}, embedding {formats['embedding']}, "
            f"keys and values {formats['kv']}{', tied' if formats['tied'] else ''}"
        )
        shown["one expert"] = f"{found['expert']['bytes']:,} bytes; {found['expert']['count']:,} of them"
    for key, value in shown.items():
        yield f"{key:<20} {value}"
    yield ""
    if found["kind"] == "container":
        yield from _byte_table(found)
    else:
        for kind, of_type in found["tensors"].items():
            yield f"{kind:<12} {of_type['tensors']:>7} tensors {of_type['bytes']:>18,} bytes"
    for kind, left_out in found["skipped"].items():
        if left_out["tensors"]:
            yield f"left out: {left_out['tensors']} {kind} tensors, {left_out['bytes']:,} bytes"
    yield from _report_lines(found.get("report", {}))
    if "verified_bytes" in found:
        yield f"verified: {found['verified_bytes']:,} bytes, every checksum and every number"


def _byte_table(found: dict[str, Any]) -> Iterator[str]:
    on_disk, read = found["bytes_by_component"], found["bytes_read_per_token"]
    yield f"{'component':<12} {'bytes on disk':>18} {'bytes a token reads':>20}"
    for name, n_bytes in on_disk.items():
        yield f"{name:<12} {n_bytes:>18,} {read.get(name, 0):>20,}"
    yield f"{'sum':<12} {sum(on_disk.values()):>18,} {sum(read.values()):>20,}"


def _report_lines(report: dict[str, Any]) -> Iterator[str]:
    for format, of_format in report.get("formats", {}).items():
        yield (
            f"{format}: rows lost {100 * of_format['mean_error']:.2f} % on average when they were quantised, "
            f"{of_format['rows_above_bound']:,} of {of_format['rows']:,} more than {100 * of_format['bound']:.0f} %"
        )
    for row in report.get("worst_rows", ())[:5]:
        yield f"  {100 * row['error']:5.1f} %  {row['tensor']} row {row['row']}"
