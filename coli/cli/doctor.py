"""``coli doctor``: what this machine gives to coli, what limits it, and one line of advice for each finding."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coli import __version__, settings
from coli.errors import ColiError

if TYPE_CHECKING:
    from coli.container.reader import Container
    from coli.threads.binding import Binding
    from coli.threads.limits import Limits
    from coli.threads.memory import Memory
    from coli.threads.topology import Topology

HELP = "what this machine offers, what limits it, and advice"

_SECTIONS = ("cpu", "kernels", "limits", "threads", "memory", "nodes", "read", "cards", "model", "settings")


@dataclass
class Report:
    """``facts`` is what ``--json`` prints; ``lines`` the same for a person, by section; ``findings`` (text, advice)."""

    facts: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)
    findings: list[tuple[str, str]] = field(default_factory=list)

    def add(self, section: str, facts: Any, *lines: str) -> None:
        """Fill a section."""
        self.facts[section] = facts
        self.lines[section] = list(lines)

    def find(self, text: str, advice: str) -> None:
        """Note a finding."""
        self.findings.append((text, advice))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of this verb."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="also check this model and let it decode for a moment"
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument(
        "--machine", type=Path, metavar="PATH",
        help="describe another machine: a table of lscpu -p=CPU,CORE,SOCKET,NODE,MAXMHZ, a folder with copies of /sys "
        "and /proc, or one with a process's cgroup files and visible_cpus",
    )  # fmt: skip
    parser.add_argument(
        "--cpus", metavar="LIST", help="with --machine: as if the affinity mask were this, such as 0-3,8"
    )
    parser.add_argument("--threads", metavar="N", help="as for coli run")


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    report = examine(args.model, args.machine, args.cpus, args.threads)
    if args.json:
        findings = [{"finding": text, "advice": advice} for text, advice in report.findings]
        print(json.dumps({"version": __version__, **report.facts, "findings": findings}, indent=1))
        return 0
    print(f"coli {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    for section in _SECTIONS:
        for number, line in enumerate(report.lines.get(section, ())):
            print(f"{section if number == 0 else '':9} {line}")
    print(f"\n{len(report.findings)} finding{'s' if len(report.findings) != 1 else ''}")
    for text, advice in report.findings:
        print(f"- {text}\n  -> {advice}")
    return 0


def examine(
    model: str | None = None, machine: Path | None = None, cpus: str | None = None, threads: str | None = None
) -> Report:
    """Look at everything.  A described ``machine`` is not measured: no map, no bandwidth, no cards.

    Raises ColiError for a description that cannot be read and for a malformed --threads or --cpus.
    """
    from coli.threads.limits import described_machine, local_machine
    from coli.threads.memory import read_memory
    from coli.threads.topology import parse_cpu_list

    if cpus is not None and machine is None:
        raise ColiError("--cpus goes with --machine; here, use taskset: taskset -c LIST coli doctor")
    if machine is not None and not machine.exists():
        raise ColiError(f"--machine {machine}: there is no such file or folder")
    report = Report()
    if machine is None:
        topology, found = local_machine()
    else:
        topology, found = described_machine(machine, None if cpus is None else parse_cpu_list(cpus))
    memory = read_memory(machine or "/")  # all zero where the description has no /proc
    _cpu(report, topology)
    _limits(report, found)
    has_openmp = _kernels(report)
    binding = _threads(report, topology, found, threads, has_openmp, local=machine is None)
    if memory.total_bytes:
        _memory(report, memory)
    container = _model(report, model, memory) if model else None
    try:
        _nodes(report, topology, sorted(container.path.glob("*.safetensors")) if container else [])
        if machine is None:
            _read(report, topology, binding, container, threads)
            _cards(report)
    finally:
        if container:
            container.close()
    _settings(report)
    return report


# ---------------------------------------------------------------------------------------------------------------------
# One function a section


def _cpu(report: Report, topology: Topology) -> None:
    cores, sockets = topology.cores(), {cpu.socket for cpu in topology.cpus}
    caches: dict[str, int] = defaultdict(int)  # what all of a level and kind hold: cores of two classes have two sizes
    for cache in topology.caches:
        if cache.level > 1:
            caches[f"L{cache.level} {cache.kind}"] += cache.size_bytes
    classes = [{"label": one.label, "cores": len(one.cores)} for one in topology.classes]
    facts = {
        "name": topology.model_name,
        "cpus": len(topology.cpus),
        "cores": len(cores),
        "sockets": len(sockets),
        "classes": classes,
        "cache_bytes": caches,
    }
    counts = (_count(len(cores), "core"), _count(len(topology.cpus), "CPU"), _count(len(sockets), "socket"))
    lines = [f"{topology.model_name}: {', '.join(counts)}"]
    if len(classes) > 1:
        lines.append(", ".join(f"{one['cores']} {one['label']}" for one in classes))
        report.find(
            f"cores of {len(classes)} speeds: {lines[-1]}",
            "the default uses the fast ones, since a team waits for its slowest; coli tune MODEL tries the others",
        )
    report.add("cpu", facts, *lines)


def _limits(report: Report, found: Limits) -> None:
    from coli.threads.topology import format_cpu_list

    quota = "none" if found.quota_cpus is None else f"{found.quota_cpus:g} CPUs"
    allowed = format_cpu_list(found.allowed)
    report.add(
        "limits",
        {
            "visible_cpus": len(found.visible),
            "allowed_cpus": allowed,
            "quota_cpus": found.quota_cpus,
            "reasons": list(found.reasons),
        },
        f"CPUs: {len(found.visible)} visible, {len(found.allowed)} allowed ({allowed}), quota {quota}",
    )
    for reason in found.reasons:
        if reason.startswith("quota"):
            advice = "the default keeps within it; give the container more CPUs for more threads"
        else:
            advice = "the default keeps within it; widen the mask (taskset, --cpuset-cpus) for more threads"
        report.find(f"CPUs are limited by the {reason}", advice)


def _kernels(report: Report) -> bool:
    from coli._core import kernels, step

    available, openmp = list(kernels.available()), bool(step.has_openmp())
    try:
        forced = settings.resolve("isa").value
    except ColiError:
        forced = None  # named among the settings
    others = [name for name in available if name != kernels.best()]
    also = f", also runs {', '.join(others)}" if others else ""
    report.add(
        "kernels",
        {
            "best": kernels.best(),
            "available": available,
            "compiled": list(kernels.compiled()),
            "forced": forced,
            "openmp": openmp,
        },
        f"{forced or kernels.best()}{also}; {'OpenMP' if openmp else 'serial'}",
    )
    if not openmp:
        report.find(
            "this build has no OpenMP and runs one thread",
            "install libgomp (gcc) or libomp (clang) and build coli again",
        )
    if forced and forced not in available:
        report.find(
            f"COLI_ISA={forced} is not among what this CPU and build run",
            f"unset it, or set one of {', '.join(available)}",
        )
    elif forced:
        report.find(f"COLI_ISA={forced} forces a kernel path", f"unset it for {kernels.best()}")
    elif kernels.best() == "scalar":
        report.find(
            "no vector kernels for this CPU",
            "expect a small part of the memory's speed; AVX2 or NEON dotprod is the least",
        )
    return openmp


def _threads(
    report: Report, topology: Topology, found: Limits, threads: str | None, has_openmp: bool, local: bool
) -> Binding:
    from coli.threads.binding import choose_cpus, describe
    from coli.threads.claims import held_cpus

    busy = held_cpus(found.allowed) if local else frozenset()
    binding = choose_cpus(
        topology, found.allowed, found.quota_cpus, threads, busy=busy, openmp_built=has_openmp or not local
    )
    actual = _thread_map(binding) if local else []
    wanted = (
        f"{binding.threads} threads ({binding.source}: {binding.reason}) on CPUs {','.join(map(str, binding.cpus))}"
    )
    report.add(
        "threads",
        {**asdict(binding), "map": [{"cpu": cpu, "mask_cpus": width} for cpu, width in actual]},
        describe(binding, actual) if local else wanted,
    )
    for warning in binding.warnings:
        text, _, advice = warning.partition("; ")
        report.find(text, advice)
    return binding


def _thread_map(binding: Binding) -> list[tuple[int, int]]:
    """The map that the kernel has for such a team, from a thread of its own: pinning a team pins its caller."""
    import threading

    from coli._core import step

    found: list[tuple[int, int]] = []

    def ask() -> None:
        found.extend(step.Team(binding.threads, binding.cpus or None).map())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found


def _memory(report: Report, memory: Memory) -> None:
    limit = "none" if memory.limit_bytes is None else _size(memory.limit_bytes)
    swap = (
        f"{_size(memory.swap_used_bytes)} of {_size(memory.swap_total_bytes)} used"
        if memory.swap_total_bytes
        else "none"
    )
    report.add(
        "memory",
        {**asdict(memory), "usable_bytes": memory.usable_bytes},
        f"{_size(memory.total_bytes)}, {_size(memory.usable_bytes)} to be had, cgroup limit {limit}, swap {swap}, "
        f"transparent huge pages {memory.thp or 'unknown'}",
    )
    if memory.limit_bytes is not None:
        report.find(
            f"the cgroup limits memory to {_size(memory.limit_bytes)} of {_size(memory.total_bytes)}",
            "a model's mapped pages count against it: allow the model's size and 2 GiB more",
        )
    if memory.swap_used_bytes > memory.total_bytes // 20:
        report.find(
            f"{_size(memory.swap_used_bytes)} are swapped out",
            "free memory before decoding: a step that waits for the disk takes seconds",
        )


def _nodes(report: Report, topology: Topology, files: list[Path]) -> None:
    from coli.threads.numa import where_files_lie
    from coli.threads.topology import format_cpu_list

    nodes = [
        {"node": node.index, "cpus": format_cpu_list(node.cpus), "memory_bytes": node.memory_bytes}
        for node in topology.nodes
    ]
    lies = where_files_lie(files) if files else {}
    total = sum(lies.values())
    shares = {str(node): round(size_bytes / total, 3) for node, size_bytes in lies.items()}
    lines = [
        f"node {node.index}: CPUs {format_cpu_list(node.cpus) or 'none'}, "
        + (_size(node.memory_bytes) if node.memory_bytes else "memory unknown")
        for node in topology.nodes
    ]
    if files:
        where = ", ".join(f"{share:.0%} on node {node}" for node, share in shares.items())
        lines.append(f"the model's pages that are in memory: {where or 'none'}")
    report.add("nodes", {"nodes": nodes, "weights": shares}, *lines)
    if len(nodes) > 1:
        report.find(
            f"{len(nodes)} memory nodes",
            "coli interleaves the weights over them, or keeps team and weights on one; coli tune MODEL measures which",
        )
    if len(nodes) > 1 and shares and max(shares.values()) > 0.9:
        report.find(
            f"{max(shares.values()):.0%} of the cached model lies on one node",
            "drop the cache and load again, or copy the container: pages stay where they were first read",
        )


def _model(report: Report, model: str, memory: Memory) -> Container | None:
    """Open the container, which checks every file's size and every tensor's shape; a fault is a finding."""
    from coli.container.reader import Container
    from coli.convert.resolve import resolve_model
    from coli.text.template import template_sources

    folder = resolve_model(model)
    try:
        container = Container.open(folder)
        template = template_sources(folder)
    except ColiError as error:
        report.add("model", {"path": str(folder), "error": str(error)}, f"{folder}: cannot be used")
        report.find(str(error), "convert the checkpoint again, or copy the container again")
        return None
    size_bytes = sum(container.bytes_by_component().values())
    token_bytes = sum(container.bytes_read_per_token().values())
    formats = container.manifest
    facts = {
        "path": str(folder),
        "bytes": size_bytes,
        "bytes_per_token": token_bytes,
        "trunk_format": formats.trunk_format,
        "expert_format": formats.expert_format,
        "template": template.used,
        "templates_differ": template.differ,
        "tokenizer": (folder / "tokenizer.json").exists(),
    }
    report.add(
        "model",
        facts,
        f"{folder}: {_size(size_bytes)}, trunk {formats.trunk_format}, experts {formats.expert_format}, "
        f"{token_bytes / 1e6:.1f} MB read per token",
        "every file has its size and every tensor its shape; "
        f"coli inspect --verify {shlex.quote(str(folder))} reads every byte",
        f"chat template: {template.used or 'none'}" + ("" if facts["tokenizer"] else "; no tokenizer.json"),
    )
    if template.differ:
        report.find(
            f"{folder}: chat_template.jinja and tokenizer_config.json hold different templates; {template.used} wins",
            "remove the one that is not wanted",
        )
    if template.used is None:
        works = "coli run --raw works; or " if facts["tokenizer"] else ""
        report.find(f"{folder}: no chat template, so chat is refused", f"{works}add a chat_template.jinja")
    if not facts["tokenizer"]:
        report.find(
            f"{folder}: no tokenizer.json, so there is no text",
            "coli run --ids works; or add the checkpoint's tokenizer.json",
        )
    if size_bytes > memory.usable_bytes > 0:
        report.find(
            f"the model is {_size(size_bytes)}, {_size(memory.usable_bytes)} of memory can be had",
            "decode will wait for the disk: free memory, place parts on a card, or convert with fewer bits",
        )
    return container


def _read(
    report: Report, topology: Topology, binding: Binding, container: Container | None, threads: str | None
) -> None:
    """What the team reads of memory; of a model, its own team, chosen as any verb's, and what its decode reads."""
    import coli
    from coli.threads.bandwidth import read_gb_s
    from coli.threads.tuning import decode_tok_s

    tok_s = 0.0
    if container:
        with coli.load(container.path, devices="none", threads=threads) as model:
            n_threads, cpus = model.engine.team.n_threads, model.engine.cpus
            read, tok_s = read_gb_s(topology, cpus, n_threads), decode_tok_s(model)
    else:
        n_threads = binding.threads
        read = read_gb_s(topology, binding.cpus, n_threads)
    facts: dict[str, Any] = {"read_gb_s": round(read, 2), "threads": n_threads}
    lines = [f"{read:.1f} GB/s by {_count(n_threads, 'thread')} (xor of a buffer beyond the caches)"]
    if container:
        token_bytes = sum(container.bytes_read_per_token().values())
        decode = tok_s * token_bytes / 1e9
        facts |= {"decode_tok_s": round(tok_s, 2), "decode_gb_s": round(decode, 2), "ratio": round(decode / read, 3)}
        lines.append(f"decode reads {decode:.1f} GB/s, {decode / read:.0%} of that, at {tok_s:.1f} tok/s")
        # Below that a step is too short for memory to be what it waits for.
        if decode < 0.5 * read and token_bytes > 100e6:
            report.find(
                f"decode reaches {decode / read:.0%} of the read bandwidth",
                "close what else uses the cores, or measure other teams: coli tune MODEL",
            )
    report.add("read", facts, *lines)


def _cards(report: Report) -> None:
    from coli.cli.doctor_cards import card_findings, card_line, cuda_packages
    from coli.devices.cuda.probe import survey

    found, packages = survey(), cuda_packages()
    installed = ", ".join(f"{name} {version}" for name, version in packages.items() if version) or "none"
    facts = {
        "cards": [asdict(card) for card in found.cards],
        "reason": found.reason,
        "nvml_reason": found.nvml_reason,
        "packages": packages,
    }
    lines = [card_line(card) for card in found.cards] or [f"none: {found.reason}"]
    lines.append(f"CUDA packages: {installed}" + (f"; {found.nvml_reason}" if found.nvml_reason else ""))
    report.add("cards", facts, *lines)
    report.findings += card_findings(found)


def _settings(report: Report) -> None:
    rows, lines = [], []
    for setting in settings.SETTINGS:
        try:
            value, source = settings.resolve(setting.name)
        except ColiError as error:
            report.find(str(error), "correct it or unset it: every command stops at it")
            value, source = None, "malformed"
        rows.append({"name": setting.name, "value": value, "source": source, "env": list(setting.env)})
        lines.append(f"{setting.name}={value if value is not None else ''} ({source})")
    report.add("settings", rows, *lines)
    for complaint in settings.complaints(os.environ):
        text, _, advice = complaint.partition("; ")
        report.find(text, advice or "unset one of them")


def _size(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 30):.1f} GiB" if n_bytes >= 1 << 30 else f"{n_bytes / (1 << 20):.1f} MiB"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' if n != 1 else ''}"
