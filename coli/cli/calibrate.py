"""``coli bench --calibrate``: placements run beside each other, predicted beside measured, every bit compared.

Every run loads the model anew with a heat of its own, feeds the same ids and hashes every logit.  The first tokens are
the cold stretch, as many after them the warm one, when experts have had time to change places.  Rounds go back and
forth, so that a machine that warms up or a neighbour favours no placement.  Predictions are made with the experts that
were chosen and where they were: what is judged is the cost of steps, not the guess of what a router will do.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from coli import settings
from coli.errors import ColiError, PlacementError, RequestError
from coli.log import logger
from coli.placement import parse

if TYPE_CHECKING:
    from coli.devices.base import Device
    from coli.model import Model
    from coli.placement import Probe

_FRACTIONS = (0.25, 0.5, 1.0)  # of the smallest card
STRETCHES = ("cold", "warm")
_TRUNK = ("lmhead", "dnproj", "dnout", "attnproj", "shexp")


@dataclass
class Row:
    """One placement with one allowance.

    step_s, predicted_s : by stretch, of all rounds.
    vram : bytes of each device, None for the CPU alone.   identical : of ``runs``, those with the reference's bits.
    """

    place: str
    vram: int | None
    label: str = ""
    runs: int = 0
    identical: int = 0
    step_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in STRETCHES})
    predicted_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in STRETCHES})
    skipped: str = ""

    def tok_s(self, stretch: str) -> float:
        """Measured."""
        return 1 / median(self.step_s[stretch])

    def predicted_tok_s(self, stretch: str) -> float:
        """Predicted."""
        return 1 / median(self.predicted_s[stretch])

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        made = {name: value for name, value in asdict(self).items() if name not in ("step_s", "predicted_s")}
        if not self.skipped:
            for name in STRETCHES:
                measured, predicted = self.tok_s(name), self.predicted_tok_s(name)
                made[name] = {"tok_s": measured, "predicted_tok_s": predicted, "ratio": predicted / measured,
                              "step_s": self.step_s[name]}  # fmt: skip
        return made


def run(args: argparse.Namespace) -> int:
    """Print the table, or the record; 1 where a bit differed."""
    from tqdm import tqdm

    from coli.devices.choose import choose_devices
    from coli.tier.heat import HALF_LIFE_TOKENS

    devices = choose_devices(settings.get("devices", args.devices))
    if not devices:
        raise ColiError(
            "--calibrate compares placements, and there is no card here; --devices fake:64MiB rehearses with one"
        )
    if args.decode_tokens > HALF_LIFE_TOKENS // 2:
        raise RequestError(
            f"--decode-tokens is {args.decode_tokens}; --calibrate takes at most {HALF_LIFE_TOKENS // 2}: what experts "
            "were chosen is read from counts that are halved after twice as many", "decode_tokens",
        )  # fmt: skip
    trial = _Trial(args, devices)
    try:
        rows = trial.rows()
        trial.measure()
        with tqdm(total=len(rows) * args.repeats, desc="calibrate", unit="run", disable=not sys.stderr.isatty()) as bar:
            for number in range(args.repeats):
                for row in rows if number % 2 == 0 else rows[::-1]:
                    if not row.skipped:
                        trial.run(row)
                    bar.update()
    finally:
        for device in devices:
            device.close()
    runs, identical = (sum(getattr(row, name) for row in rows) for name in ("runs", "identical"))
    if args.json:
        print(json.dumps(trial.record(rows), indent=1))
    else:
        print("\n".join([*table(rows), f"identical: {identical} of {runs}"]))
    return 0 if identical == runs else 1


class _Trial:
    """The model, the devices and the ids of all runs."""

    def __init__(self, args: argparse.Namespace, devices: Sequence[Device]) -> None:
        self.args = args
        self.devices = list(devices)
        self.probe: Probe
        self.reference: list[bytes] | None = None
        self.alone: Probe | None = None
        self.machine: dict[str, Any] = {}

    def measure(self) -> None:
        """Take the figures that all predictions are made with."""
        from coli.cli.figures import figures_beside
        from coli.probing import forget

        if self.args.reprobe:
            forget()
        probe = figures_beside(self.devices, self.args.model, self.args.threads, anyway=True)
        if probe is None:
            raise ColiError("--calibrate: the CPU or a device could not be measured (see above)")
        self.probe = probe

    def rows(self) -> list[Row]:
        """What is run: the CPU alone, and for each allowance off, auto and lists."""
        smallest = min(device.free_bytes() for device in self.devices)
        if self.args.vram is None:
            allowances = [int(smallest * fraction) for fraction in _FRACTIONS]
        else:
            allowances = [settings.get("vram", text) for text in self.args.vram.split(",")]
            allowances = [smallest if one == "auto" else one for one in allowances]
            allowances = list(dict.fromkeys(self._what_there_is(one) for one in allowances))
        return [Row("cpu", None), *(Row(place, vram) for vram in allowances for place in self.places())]

    def _what_there_is(self, allowance: int) -> int:
        """An allowance that no device has is what the largest of them has: rows show what a placement could use."""
        largest = max(device.free_bytes() for device in self.devices)
        if allowance <= largest:
            return allowance
        logger("calibrate").warning(
            "--vram %s MiB is more than any device has free; the rows are of %s MiB", _mib(allowance), _mib(largest)
        )
        return largest

    def places(self) -> list[str]:
        """Off, auto in both currencies, and lists: the one that was asked for, or what one would try by hand."""
        if self.args.place is not None:
            place = settings.get("place", self.args.place)
            if "=" in place:
                parse(place, self._n_layers())  # refuses what is no list, where one that does not fit is left out
            return list(dict.fromkeys(["off", "auto", place]))
        trunk = ",".join(f"{name}=0" for name in _TRUNK)
        lists = [trunk, f"{trunk},experts=cpu"]
        if len(self.devices) > 1:
            n = self._n_layers()
            halves = ",".join(f"{name}=0:{n // 2}+1:{n - n // 2}" for name in _TRUNK[1:])
            lists += [f"{trunk},experts=1", f"lmhead=1,{halves}"]
        return ["off", "auto", "auto:bytes", *lists]

    def _n_layers(self) -> int:
        from coli.cli.plan import read_shape

        return read_shape(self.args.model).layers

    def run(self, row: Row) -> None:
        """One run of a placement: its steps, what is predicted for them, and whether the bits are the reference's."""
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as open_model:
            try:
                model = open_model.enter_context(self._load(row, Path(folder) / "heat.json"))
            except PlacementError as error:
                row.skipped = str(error)
                return
            digests = list(self._decode(model, row))
        if self.reference is None:
            self.reference = digests
        row.runs += 1
        row.identical += digests == self.reference

    def _load(self, row: Row, heat: Path) -> Model:
        import coli

        given = {"threads": self.args.threads, "context": self.args.context}
        if row.vram is None:
            return coli.load(self.args.model, devices="none", **given)
        return coli.load(self.args.model, devices=self.devices, place=row.place, vram=row.vram, heat=heat, **given)

    def _decode(self, model: Model, row: Row) -> Iterator[bytes]:
        """The hash of every step's logits; times and predictions go to the row."""
        import numpy as np

        prompt, n = self.args.prompt_tokens, self.args.decode_tokens
        if prompt + 2 * n > model.context:
            raise RequestError(
                f"{prompt} + 2 * {n} tokens do not fit the context of {model.context}; "
                "ask for fewer or raise --context",
                "decode_tokens",
            )
        ids = np.random.default_rng(0).integers(0, model.config.vocab_size, prompt + 2 * n)
        session = model.session()
        logits = session.prefill(ids[:prompt])
        yield hashlib.blake2b(logits.tobytes()).digest()
        for number, stretch in enumerate(STRETCHES):
            first = prompt + number * n
            before = _Seen(model)
            for token in ids[first : first + n].tolist():
                start = time.perf_counter()
                logits = session.step(token)
                row.step_s[stretch].append(time.perf_counter() - start)
                yield hashlib.blake2b(logits.tobytes()).digest()
            row.predicted_s[stretch].append(self._predicted_s(model, before, n, first + n / 2))
        session.close()
        if model.placed.plan is not None:
            row.label = model.placed.plan.label
        self.machine = {key: model.stats()[key] for key in ("isa", "threads")} | {
            "devices": [{"name": device.name, "uuid": device.uuid} for device in self.devices]
        }

    def _predicted_s(self, model: Model, before: _Seen, n: int, position: float) -> float:
        from coli.placement import ModelShape, plan, predict_seen

        made = model.placed.plan
        if made is None:
            shape = ModelShape.from_container(model.engine.container)
            if self.alone is None:
                from coli.probing import machine_figures

                engine = model.engine
                self.alone = machine_figures(
                    [], engine.team.n_threads, engine.cpus or None, settings.get("isa"), beside=engine
                )
            if self.alone is None:
                raise ColiError("--calibrate: the CPU could not be measured (see above)")
            alone = plan(shape, [], probe=self.alone, context=model.context, position=position)
            return alone.predicted_ms_per_token / 1e3
        after = _Seen(model)
        chosen = ((after.counts - before.counts) / n).tolist()
        residents = [seen.resident.tolist() for seen in (before, after)]
        seen = predict_seen(made, self.probe, chosen=chosen, residents=residents, position=position)
        return seen.ms_per_token / 1e3

    def record(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Everything as JSON types."""
        import coli

        return {
            "calibration": 1,
            "version": coli.__version__,
            "model": self.args.model,
            "prompt_tokens": self.args.prompt_tokens,
            "decode_tokens": self.args.decode_tokens,
            "rounds": self.args.repeats,
            **self.machine,
            "probe": self.probe.to_dict(),
            "rows": [row.to_dict() for row in rows],
            "runs": sum(row.runs for row in rows),
            "identical": sum(row.identical for row in rows),
        }


class _Seen:
    """What a tier has counted so far, and where the experts are.   counts, resident : (layers, experts)."""

    def __init__(self, model: Model) -> None:
        tier = model.placed.tier
        if tier is not None:
            self.counts, self.resident = model.engine.on_thread(
                lambda: (tier.heat.recent.copy(), tier.residency.device.copy())
            )


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of the table; lists have numbers, and stand below it in full."""
    lists = list(dict.fromkeys(row.place for row in rows if "=" in row.place))
    yield (
        f"{'place':<11} {'VRAM MiB':>9} {'stretch':>7} {'predicted tok/s':>15} {'measured tok/s':>14} "
        f"{'predicted/measured':>18}  identical"
    )
    for row in rows:
        vram = "" if row.vram is None else _mib(row.vram)
        place = f"list {lists.index(row.place) + 1}" if row.place in lists else row.place
        if row.skipped:
            yield f"{place:<11} {vram:>9} left out: it does not fit"
            continue
        for stretch in STRETCHES:
            predicted, measured = row.predicted_tok_s(stretch), row.tok_s(stretch)
            yield (
                f"{place:<11} {vram:>9} {stretch:>7} {predicted:>15.1f} {measured:>14.1f} "
                f"{predicted / measured:>18.2f}  {row.identical} of {row.runs}"
            )
    for number, place in enumerate(lists, start=1):
        yield f"list {number}: {place}"


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 20):,.0f}"
