"""The model behind the HTTP paths: loads it, runs its scheduler, says how it is.

Loading happens on a thread of its own, so that /health can answer 503 meanwhile.  The end has two halves: stopping
tells everybody who waits and returns at once; closing waits for the step under way, then ends the model, which writes
its heat.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from coli.errors import ColiError
from coli.log import logger
from coli.server.faults import Loading
from coli.server.metrics import Metrics
from coli.server.prepare import Prepared, Preparer
from coli.server.run import Run
from coli.server.scheduler import Event, Job, Scheduler, Stopping
from coli.text.defaults import read_json_if_present
from coli.text.template import template_sources

if TYPE_CHECKING:
    from coli.model import Model

_log = logger("serve")


class Service:
    """One served model.

    load : makes the model; called once, on a thread.   name : of the model in the API, None for its folder's.
    on_failure : called (on that thread) where loading failed; the error is in ``failure``.
    slots, queue, prefix_bytes, prefix_every : see `coli.server.scheduler.Scheduler`.
    """

    def __init__(
        self,
        load: Callable[[], Model],
        *,
        slots: int = 8,
        queue: int = 64,
        prefix_bytes: int = 1 << 30,
        prefix_every: int = 512,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        self._load = load
        self._on_failure = on_failure
        self._options = {
            "slots": slots, "queue": queue, "prefix_bytes": prefix_bytes, "prefix_every": prefix_every,
        }  # fmt: skip
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loader: threading.Thread | None = None
        self._ready: tuple[Model, Scheduler, Preparer] | None = None
        self._runs: weakref.WeakSet[Run] = weakref.WeakSet()
        self._stopping = False
        self._closing = False
        self.failure: BaseException | None = None
        self.started_s = int(time.time())
        self.metrics = Metrics(
            lambda: self._ready[1].stats() if self._ready else None,
            lambda: self._ready[0].stats().get("tier") if self._ready else None,
        )

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to load; events of jobs will arrive on ``loop``."""
        self._loop = loop
        self._loader = threading.Thread(target=self._load_model, name="coli-load", daemon=True)
        self._loader.start()

    def _load_model(self) -> None:
        start = time.monotonic()
        try:
            model = self._load()
            scheduler = Scheduler(model.engine, deliver=self._deliver, **self._options)
        except BaseException as error:
            self.failure = error
            if self._on_failure is not None:
                self._on_failure()
            return
        self._ready = model, scheduler, Preparer(model, most_answers=self._options["slots"])
        _log.info("%s is ready after %.1f s", self.name, time.monotonic() - start)

    def _deliver(self, events: list[tuple[Job, Event]]) -> None:
        """On the scheduler's thread: carry a turn's events over to the event loop, in one wake-up."""

        def hand_out() -> None:
            for job, event in events:
                job.sink(event)

        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(hand_out)
        except RuntimeError:  # the loop has ended, and with it everybody who waited
            pass

    # ---- what handlers use; each raises Loading while there is no model -------------------------------------

    def _parts(self) -> tuple[Model, Scheduler, Preparer]:
        if self._ready is None:
            if self.failure is not None:
                raise ColiError(f"the model could not be loaded: {self.failure}")
            raise Loading("the model is still loading")
        return self._ready

    @property
    def model(self) -> Model:
        return self._parts()[0]

    @property
    def scheduler(self) -> Scheduler:
        return self._parts()[1]

    @property
    def preparer(self) -> Preparer:
        return self._parts()[2]

    @property
    def name(self) -> str:
        return self.model.folder.name

    def begin(self, prepared: Sequence[Prepared]) -> Run:
        """Queue a request's jobs.  On the event loop; raises what `Run` does."""
        if self._stopping:
            raise Stopping()
        run = Run(self.scheduler, prepared)
        self._runs.add(run)
        return run

    def note(self, run: Run, what: str, tokens: int) -> None:
        """A request is answered: log it, count its times."""
        timings = run.timings(tokens)
        job = run.jobs[0]
        if job.first_at is not None:
            self.metrics.first_token_s.observe(job.first_at - job.queued_at)
        speed = timings["predicted_per_second"]
        if speed:
            self.metrics.next_token_s.observe(1 / speed)
        _log.info(
            "%s: prompt %d tokens (%d reused) in %.2f s, answer %d tokens%s",
            what, timings["prompt_n"] + timings["cache_n"], timings["cache_n"], timings["prompt_ms"] / 1e3, tokens,
            f" at {speed:.1f} tok/s" if speed else "",
        )  # fmt: skip

    def tokenizer_info(self) -> dict[str, Any]:
        """Named tokens and chat template, for clients that make ids and prompts themselves."""
        model = self.model
        config = read_json_if_present(model.folder / "tokenizer_config.json")
        tokens = {key: config.get(key) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
        return {
            **{key: t.get("content") if isinstance(t, dict) else t for key, t in tokens.items()},
            "chat_template": template_sources(model.folder).text,
        }

    def plan(self) -> dict[str, Any]:
        """What lies where, and why: the plan as ``coli plan --json`` prints it, ``null`` where no device is in use."""
        stats = self.model.stats()
        return {"model": self.name, "place": stats["place"], "plan": stats.get("plan")}

    def stats(self, *, experts: bool) -> dict[str, Any]:
        """Engine, tier and scheduler.   experts : add heat and place of every expert, [layer][expert]."""
        model, scheduler, _ = self._parts()
        stats = {key: value for key, value in model.stats().items() if key != "plan"}
        found: dict[str, Any] = {
            **stats,
            "model": self.name,
            "uptime_s": int(time.time()) - self.started_s,
            "server": scheduler.stats(),
        }
        container = getattr(model.engine, "container", None)
        if container is not None:
            found["component_bytes"] = container.bytes_by_component()
        tier = model.placed.tier if experts and model.placed is not None else None
        if tier is not None:  # plain reads of arrays that the engine thread changes: a picture, not a ledger
            found["experts"] = {
                "heat": tier.heat.recent.round(2).tolist(),
                "device": tier.residency.device.tolist(),
            }
        return found

    def stop(self) -> None:
        """Tell everybody who waits that the server stops, and take no more.  On the event loop; does not wait."""
        self._stopping = True
        if self._ready is not None:
            _log.info("the server is stopping")
            self._ready[1].stop()
        elif self.failure is None:
            _log.info("the server is stopping once the model is loaded; Ctrl-C again ends it at once")
        for run in list(self._runs):
            run.end(Stopping())

    def close(self) -> None:
        """End the scheduler and the model.  A load under way is waited for."""
        if self._loader is not None:
            self._loader.join()
        if self._ready is not None and not self._closing:
            self._closing = True
            model, scheduler, _ = self._ready
            scheduler.close()
            model.close()
