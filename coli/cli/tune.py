"""``coli tune``: measure the decode step over teams of threads, keep the answer where it is beyond the noise."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from coli.errors import ColiError, RequestError
from coli.log import logger

if TYPE_CHECKING:
    from coli.config import ModelConfig
    from coli.container.reader import Container
    from coli.threads.limits import Limits
    from coli.threads.topology import Topology
    from coli.threads.tuning import Profile

HELP = "find the threads that decode fastest on this machine, and keep them for this model's geometry"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of this verb."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what to measure; --show and --forget do without")
    parser.add_argument(
        "--print-env", action="store_true", help="print the environment for a launcher; measures only if needed"
    )
    parser.add_argument(
        "--show", action="store_true", help="print what is stored for this machine (and MODEL), measure nothing"
    )
    parser.add_argument("--forget", action="store_true", help="remove what is stored for this machine (and MODEL)")
    parser.add_argument("--json", action="store_true", help="print profiles as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure, or show, or forget."""
    if args.show and args.forget:
        raise RequestError("--show and --forget contradict each other; give one of them", "--forget")
    from coli.threads.limits import local_machine
    from coli.threads.tuning import geometry_key, load_profile, machine_fingerprint, stored_profiles

    topology, found = local_machine()
    machine = machine_fingerprint(topology, found)
    if args.model is None:
        if not (args.show or args.forget):
            raise ColiError("coli tune needs a MODEL to measure; --show and --forget do without one")
        stored = list(stored_profiles(machine))
        return _forget([path for path, _ in stored]) if args.forget else _show([profile for _, profile in stored], args)

    geometry = geometry_key(*_shape(args.model))
    if args.forget:
        return _forget([path for path, profile in stored_profiles(machine) if profile.geometry == geometry])
    profile = load_profile(machine, geometry)
    if args.show:
        return _show([profile] if profile else [], args)
    if profile is None or not args.print_env:
        container = _open(args.model)
        try:
            profile = _measure(container, topology, found, machine, geometry)
        finally:
            container.close()
    return _show([profile], args)


def _open(model: str) -> Container:
    from coli.container.reader import Container
    from coli.convert.resolve import resolve_model

    return Container.open(resolve_model(model))


def _shape(model: str) -> tuple[ModelConfig, tuple[str, str]]:
    """The configuration and number formats of what MODEL is or would be converted to; nothing is converted for it."""
    from coli.config import ModelConfig
    from coli.container.manifest import read_manifest
    from coli.convert.resolve import find_model, is_container

    path = find_model(model)
    if is_container(path):
        manifest = read_manifest(path)
        return ModelConfig.from_folder(path), (manifest.trunk_format, manifest.expert_format)
    from coli.convert.convert import Options
    from coli.convert.gguf import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        return checkpoint.config, Options().formats([])


def _measure(container: Container, topology: Topology, found: Limits, machine: str, geometry: str) -> Profile:
    """Run all candidates in rounds and store what was found."""
    from tqdm import tqdm

    import coli
    from coli._core import step
    from coli.threads.tuning import ROUNDS, Candidate, Profile, candidates, choose, decode_tok_s, measure, save_profile

    if not step.has_openmp():
        raise ColiError(
            "this build has no OpenMP and runs one thread: there is nothing to tune; build coli with OpenMP"
        )
    binding = [
        name for name in ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY") if os.environ.get(name, "").strip()
    ]
    if binding:
        raise ColiError(f"{', '.join(binding)} is set and places the threads: unset it to let coli tune try places")
    tries = candidates(topology, found)
    files = sorted(container.path.glob("*.safetensors")) if len(topology.nodes) > 1 else []
    bar = tqdm(total=len(tries) * ROUNDS, desc="tune", unit="run", disable=not sys.stderr.isatty(), file=sys.stderr)

    def speed_of(candidate: Candidate) -> float:
        _drop_from_cache(files)
        # The load sees just these CPUs, so it takes them all and its memory follows their nodes.
        threads = len(candidate.cpus)
        with _quiet(), _mask(candidate.cpus), coli.load(container.path, devices="none", threads=threads) as model:
            return decode_tok_s(model)

    with bar:
        speed_of(tries[0])  # the first run reads the file; it is not counted
        table = measure(tries, speed_of, tick=bar.update)
    choice = choose(table)
    cpus = next(candidate.cpus for candidate in tries if candidate.label == choice.label)
    today = datetime.date.today().isoformat()
    profile = Profile(
        machine, geometry, cpus, choice.label, choice.gain, choice.reason, table, topology.model_name, today
    )
    path = save_profile(profile)
    logger("threads").info(f"kept {choice.label} in {path}")
    return profile


def _show(profiles: Sequence[Profile], args: argparse.Namespace) -> int:
    """Print profiles as JSON, as environment lines, or as tables."""
    if args.json:
        print(json.dumps([asdict(profile) for profile in profiles], indent=1))
        return 0
    if not profiles:
        logger("threads").info("nothing is stored for this machine; coli tune MODEL measures")
        return 0
    for profile in profiles:
        print(environment(profile) if args.print_env else "\n".join(table_lines(profile)))
    return 0


def environment(profile: Profile) -> str:
    """The kept team as variables for a launcher, without quotes: ``env $(coli tune M --print-env) ...`` works."""
    places = ",".join(f"{{{cpu}}}" for cpu in profile.cpus)
    return f"COLI_THREADS={len(profile.cpus)} OMP_PLACES={places} OMP_PROC_BIND=close"


def table_lines(profile: Profile) -> Iterator[str]:
    """The measured table, the kept row marked, and why."""
    yield f"{profile.cpu_name}, machine {profile.machine}, {profile.geometry}, {profile.date}"
    width = max(map(len, profile.table))
    for label, row in profile.table.items():
        kept = "  kept" if label == profile.label else ""
        yield f"{label:{width}}  {statistics.median(row):8.2f} tok/s  ({min(row):.2f} to {max(row):.2f}){kept}"
    yield profile.reason


def _forget(paths: Sequence[Path]) -> int:
    for path in paths:
        path.unlink(missing_ok=True)
    logger("threads").info(f"forgot {len(paths)} profile{'s' if len(paths) != 1 else ''}")
    return 0


@contextmanager
def _mask(cpus: Sequence[int]) -> Iterator[None]:
    """Restrict this thread, and the engine's thread that it starts, to ``cpus``."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back the lines that every load prints."""
    import logging

    root = logging.getLogger("coli")
    before = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(before)


def _drop_from_cache(files: Sequence[Path]) -> None:
    """Let the system forget cached pages, which stay on the node where they were first read."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
