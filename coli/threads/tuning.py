"""Which team is fastest on this machine for this model: what to try, how to judge it, and where the answer is kept.

``choose`` is a pure function of a table of repeats and never keeps a winner inside the noise.  ``measure`` drives
whatever it is given; the profiles are JSON files, one per machine and geometry.
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coli.errors import ColiError
from coli.files import cache_dir, replace_file
from coli.log import logger
from coli.threads.binding import choose_cpus
from coli.threads.limits import Limits
from coli.threads.topology import Topology, format_cpu_list

PROFILE_VERSION = 1

# Rounds of one measurement.  With the rule of `choose` and nine candidates that are all alike, fewer than 1 in 100
# tables names a false winner, and a true gain of 10 % is kept in 97 (8,000 simulated tables with 2 % noise; the tests
# repeat it smaller).
ROUNDS = 9
_SPREADS = 2.0
_SMALLEST_GAIN = 0.02

_WARM_UP_STEPS = 4
_FEWEST_STEPS = 4


@dataclass(frozen=True)
class Candidate:
    """One team to try: the CPU of each worker, and what the place is called."""

    cpus: tuple[int, ...]
    place: str

    @property
    def label(self) -> str:
        """Name in tables and profiles, such as ``8 threads on 0-7``."""
        return f"{len(self.cpus)} thread{'s' if len(self.cpus) != 1 else ''} on {format_cpu_list(self.cpus)}"


@dataclass(frozen=True)
class Choice:
    """What `choose` decided: the label kept, its gain over the default (0.05 is 5 %), and why in one line."""

    label: str
    gain: float
    reason: str


@dataclass(frozen=True)
class Profile:
    """A stored answer for one machine and geometry; ``table`` holds tok/s by label and round, the default first."""

    machine: str
    geometry: str
    cpus: tuple[int, ...]
    label: str
    gain: float
    reason: str
    table: dict[str, list[float]]
    cpu_name: str
    date: str
    version: int = PROFILE_VERSION


def candidates(topology: Topology, found: Limits) -> list[Candidate]:
    """The teams worth trying, the default first: fewer fast cores, slow cores too, siblings too, one node alone.

    Each is what ``choose_cpus`` makes of a count, so a profile can be given back to it.  None is above the quota.
    """
    known = topology.by_index()
    quota = found.quota or len(found.allowed)

    def team(count: int, allowed: Iterable[int] = found.allowed) -> tuple[int, ...]:
        return choose_cpus(topology, allowed, found.quota_cpus, count, {}).cpus

    default = choose_cpus(topology, found.allowed, found.quota_cpus, env={}).cpus
    cores = topology.cores(found.allowed)
    wanted = [(default, "the default")]
    wanted += [
        (team(count), "fewer cores")
        for count in sorted({len(default) - 1, 3 * len(default) // 4, len(default) // 2}, reverse=True)
        if count > 0
    ]
    if len(cores) > len(default):
        wanted.append((team(min(len(cores), quota)), "slower cores too"))
    if len(found.allowed) > len(cores):
        fast = frozenset(known[cpu].core for cpu in default)
        siblings = [cpu for cpu in found.allowed if known[cpu].core in fast]
        wanted.append((team(min(len(siblings), quota), siblings), "both siblings of each core"))
        wanted.append((team(min(len(found.allowed), quota)), "every allowed CPU"))
    nodes = topology.nodes_of(default)
    if len(nodes) > 1:
        for node in nodes:
            mine = [cpu for cpu in found.allowed if known[cpu].node == node]
            n_cores = len(topology.cores(mine))
            wanted.append((team(min(n_cores, quota), mine), f"node {node} alone"))
    seen: dict[tuple[int, ...], str] = {}
    for cpus, place in wanted:
        seen.setdefault(cpus, place)
    return [Candidate(cpus, place) for cpus, place in seen.items()]


def measure(
    tries: Sequence[Candidate],
    speed_of: Callable[[Candidate], float],
    rounds: int = ROUNDS,
    tick: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Measure every candidate once a round, in alternating direction: {label: tok/s by round}.

    ``speed_of`` runs one candidate.  Going back and forth keeps a machine that warms up, or a neighbour that comes and
    goes, from favouring a place in the order.
    """
    table: dict[str, list[float]] = {candidate.label: [] for candidate in tries}
    for number in range(rounds):
        for candidate in tries if number % 2 == 0 else tries[::-1]:
            table[candidate.label].append(speed_of(candidate))
            tick()
    return table


def decode_tok_s(model: Any, seconds: float = 0.5) -> float:
    """Decode speed of a loaded model: single steps for about ``seconds``, after a few that are not counted.

    The ids are the same pseudo-random ones for every team, so that all read the same experts.
    """
    ids = random.Random(0)
    vocab_size = model.config.vocab_size
    session = model.session()
    session.prefill([ids.randrange(vocab_size) for _ in range(_WARM_UP_STEPS)])
    for _ in range(min(_WARM_UP_STEPS, model.context // 4)):
        session.step(ids.randrange(vocab_size))
    n_steps, start = 0, time.perf_counter()
    end = start
    while (end - start < seconds or n_steps < _FEWEST_STEPS) and session.position < model.context:
        session.step(ids.randrange(vocab_size))
        n_steps, end = n_steps + 1, time.perf_counter()
    session.close()
    return n_steps / (end - start)


def choose(table: Mapping[str, Sequence[float]]) -> Choice:
    """Choose from tok/s by label and round; the first label is the default and stays unless it is clearly beaten.

    The rule: divide each round by its median over all labels (what slows a whole round says nothing about a place).
    The best other median must exceed the default's by more than the combined spread, the sum over both of twice their
    median absolute deviation, and by more than 2 %.

    Raises ColiError for a table whose rows are empty or of different lengths.
    """
    labels = list(table)
    lengths = {len(row) for row in table.values()}
    if not labels or len(lengths) != 1 or 0 in lengths:
        raise ColiError(f"tuning table: rows of {sorted(lengths)} repeats; every candidate needs as many as the others")
    default = labels[0]
    pace = [statistics.median(values) for values in zip(*table.values(), strict=True)]
    even = {label: [value / base for value, base in zip(row, pace, strict=True)] for label, row in table.items()}
    median = {label: statistics.median(row) for label, row in even.items()}
    best = max(labels, key=lambda label: median[label])
    if best == default:
        return Choice(default, 0.0, "nothing was faster than the default")
    spread = _SPREADS * sum(
        statistics.median(abs(value - median[label]) for value in even[label]) for label in (best, default)
    )
    gain = median[best] / median[default] - 1
    noise = max(spread / median[default], _SMALLEST_GAIN)
    if gain <= noise:
        return Choice(default, 0.0, f"{best} was {gain:+.1%}, within the noise of {noise:.1%}: the default stays")
    return Choice(best, gain, f"{gain:+.1%} over the default, beyond the noise of {noise:.1%}")


# ---------------------------------------------------------------------------------------------------------------------
# Profiles


def machine_fingerprint(topology: Topology, found: Limits) -> str:
    """A short name for this machine as this process may use it: another mask or quota is another machine."""
    facts = {
        "cpu": topology.model_name,
        "cpus": [(cpu.index, cpu.core, cpu.socket, cpu.node, cpu.rank) for cpu in topology.cpus],
        "allowed": found.allowed,
        "quota": found.quota,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def geometry_key(config: Any, formats: Sequence[str] = ()) -> str:
    """A model's shape in one word: two models of one shape and number format share a profile.

    ``config`` is a ModelConfig, ``formats`` the trunk's and the experts' number formats.
    """
    parts = [
        f"l{config.num_hidden_layers}",
        f"h{config.hidden_size}",
        f"e{config.num_experts}x{config.num_experts_per_tok}",
        f"i{config.moe_intermediate_size}",
        f"s{config.shared_expert_intermediate_size}",
        f"v{config.vocab_size}",
    ]
    return "-".join([*parts, *formats])


def profile_folder() -> Path:
    """Where profiles are kept."""
    return cache_dir() / "threads"


def save_profile(profile: Profile, folder: Path | None = None) -> Path:
    """Store a profile; a reader sees the old file or the new one, never a part."""
    folder = profile_folder() if folder is None else folder
    path = folder / f"{profile.machine}-{profile.geometry}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(asdict(profile), indent=1).encode())
    except OSError as error:
        raise ColiError(
            f"{path}: the profile cannot be written ({error.strerror}); set XDG_CACHE_HOME to a writable folder"
        ) from None
    return path


def load_profile(machine: str, geometry: str, folder: Path | None = None) -> Profile | None:
    """The stored profile, or None, also without a place for one; a damaged file is one warning and counts as none."""
    try:
        path = (profile_folder() if folder is None else folder) / f"{machine}-{geometry}.json"
    except ColiError:
        return None
    return _read_profile(path) if path.exists() else None


def stored_profiles(machine: str | None = None, folder: Path | None = None) -> Iterator[tuple[Path, Profile]]:
    """All readable profiles, or those of one machine, by file name."""
    try:
        folder = profile_folder() if folder is None else folder
    except ColiError:
        return
    for path in sorted(folder.glob(f"{machine or '*'}-*.json")):
        profile = _read_profile(path)
        if profile is not None:
            yield path, profile


def _read_profile(path: Path) -> Profile | None:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields.get("version") != PROFILE_VERSION:
            raise ValueError(f"version {fields.get('version')}, expected {PROFILE_VERSION}")
        cpus = tuple(fields["cpus"])
        if not cpus or not all(isinstance(cpu, int) for cpu in cpus):
            raise ValueError(f"cpus {fields['cpus']!r} is no list of CPU numbers")
        return Profile(**{**fields, "cpus": cpus})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger("threads").warning(
            f"{path}: not a profile of coli tune ({error}); going on without it, run coli tune again"
        )
        return None
