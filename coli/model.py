"""What a user holds: a loaded model that answers.

Joins container, engine and text; does no arithmetic of its own but the sums of a perplexity.  Which devices and threads
the engine gets is decided in `_build_engine` and nowhere else here.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from coli import settings
from coli.engine.generate import FinishReason, Generation
from coli.engine.sampler import Sampler, SamplingParams
from coli.errors import ColiError, PlacementError, RequestError
from coli.log import logger
from coli.text.channels import ChannelParser, Delta
from coli.text.defaults import sampling_defaults, stop_ids
from coli.text.stops import check_stops
from coli.text.template import ChatTemplate
from coli.text.tokenizer import Tokenizer
from coli.text.tools import ToolCall
from coli.text.writer import TextWriter

if TYPE_CHECKING:
    from coli.config import ModelConfig
    from coli.container.reader import Container
    from coli.engine.session import Engine, Session
    from coli.placing import Placed

PERPLEXITY_WINDOW = 512
_SCORE_ROWS = 32  # rows widened to float64 at once: 32 x 248,320 are 64 MB


def load(
    path_or_name: str | Path = "demo",
    *,
    place: str | None = None,
    devices: str | Sequence[Any] | None = None,
    vram: int | str | None = None,
    heat: str | Path | None = None,
    threads: int | str | None = None,
    context: int | None = None,
    seed: int | None = None,
) -> Model:
    """Load a model.

    path_or_name : a container folder, a Hugging Face folder (converted once into the cache directory), or "demo".
    place, devices, vram, heat, threads, context : see docs/settings.md; None takes the environment's value, else the
        default.  devices : "auto", "none", or a list of indexes, PCI bus ids, UUIDs or Device objects.
    seed : makes every answer of this model repeatable that is sampled without a seed of its own.
    Raises ColiError: one line that says what is wrong and what to do.
    """
    from coli.container.reader import Container
    from coli.convert.resolve import resolve_model

    container = Container.open(resolve_model(str(path_or_name)))
    try:
        engine, placed, release = _build_engine(
            container, place=place, devices=devices, vram=vram, heat=heat, threads=threads, context=context
        )
    except BaseException:
        container.close()
        raise

    def close() -> None:
        try:
            release()
        finally:
            container.close()

    return Model(engine, Path(container.path), seed=seed, placed=placed, on_close=close)


def _build_engine(
    container: Container,
    *,
    place: str | None,
    devices: str | Sequence[Any] | None,
    vram: int | str | None,
    heat: str | Path | None,
    threads: int | str | None,
    context: int | None,
) -> tuple[Engine, Placed, Callable[[], None]]:
    """The engine for a container and what lies where, by the settings; and what gives all of it back."""
    from coli._core import step
    from coli.engine.session import Engine
    from coli.placing import place_model
    from coli.threads.binding import describe
    from coli.threads.claims import claim_threads
    from coli.threads.tuning import geometry_key

    positions = settings.resolve("context", context)
    formats = (container.manifest.trunk_format, container.manifest.expert_format)
    claim = claim_threads(
        threads, geometry=geometry_key(container.config, formats), openmp_built=step.has_openmp()
    )
    try:
        with claim.memory(sum(container.bytes_by_component().values())):
            engine = Engine(
                container,
                threads=claim.binding.threads,
                cpus=claim.binding.cpus or None,
                context=None if positions.source == "default" else positions.value,
                isa=settings.get("isa"),
            )
    except BaseException:
        claim.release()
        raise
    logger("threads").info(describe(claim.binding, engine.thread_map))
    try:
        placed = place_model(
            container, engine, place=place, devices=devices, vram=vram, heat=heat,
            team_is_given=claim.binding.is_given,
        )  # fmt: skip
    except BaseException:
        engine.close()
        claim.release()
        raise

    def release() -> None:
        with contextlib.ExitStack() as rest:  # in reverse order, and each whatever the one before it raised
            rest.callback(claim.release)
            rest.callback(engine.close)
            rest.callback(engine.on_thread, placed.close)

    return engine, placed, release


class Score(NamedTuple):
    """How well a text was predicted: scored tokens, mean negative log-likelihood in nats, its exponential."""

    tokens: int
    nll: float
    perplexity: float


class Model:
    """A loaded model.  Made by `coli.load`; a context manager.

    engine : what computes.   placed : what lies where.
    folder : the container, for its tokenizer, template and generation_config.json.
    """

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        *,
        seed: int | None = None,
        placed: Placed | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._pid = os.getpid()
        self.placed = placed
        self.folder = Path(folder)
        SamplingParams(seed=seed)  # checks it
        self._seeds = None if seed is None else random.Random(seed)
        self._on_close = on_close or engine.close
        self._closed = False

    # ---- facts ---------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """What computes.  ColiError in a forked child, which has the model's memory but none of its threads."""
        if os.getpid() != self._pid:
            from coli.engine.worker import FORKED

            raise ColiError(FORKED)
        return self._engine

    @property
    def config(self) -> ModelConfig:
        return self.engine.config

    @property
    def context(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self.engine.context

    @property
    def has_tokenizer(self) -> bool:
        return (self.folder / "tokenizer.json").exists()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; ModelError that says so where the container has none."""
        return Tokenizer.open(self.folder)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template; ModelError that says so where the container has none."""
        return ChatTemplate.open(self.folder, self.tokenizer)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end an answer."""
        return stop_ids(self.folder, self.tokenizer.token_id if self.has_tokenizer else None)

    @cached_property
    def sampling_defaults(self) -> dict[str, float | int]:
        """The sampling that the checkpoint was made for, from its generation_config.json."""
        return sampling_defaults(self.folder)

    def stats(self) -> dict[str, Any]:
        """What runs where, and what it did: "isa", "threads", "place", "tier" and more."""
        placed = {"place": "off", "tier": None} if self.placed is None else self.placed.stats()
        return {"model": str(self.folder), **placed, **self.engine.stats()}

    def set_vram(self, vram: int | str) -> list[int]:
        """Take so much of each device from now on, by giving expert slots back or taking more: the slots of each.

        vram : bytes, "6GiB", or "auto" for what is free now less the reserve.  No answer changes by it.
        Raises PlacementError where no device is used, or one cannot change its slots while it runs.
        """
        if self.placed is None or self.placed.plan is None:
            raise PlacementError("no device is in use; load the model with devices first")
        return self.engine.on_thread(lambda: self.placed.set_allowance(vram))

    # ---- logits --------------------------------------------------------------------------------------

    def session(self) -> Session:
        """A session in the empty state: ``prefill(ids)``, ``step(id)``, ``copy()``, ``position``."""
        return self.engine.session()

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Teacher-forced logits from an empty state: float32 (len(ids), vocab_size)."""
        return self.engine.logits(ids)

    def perplexity(self, ids: Sequence[int]) -> float:
        """exp of the mean negative log-likelihood over windows of 512 ids, as in `score`."""
        return self.score(ids).perplexity

    def score(
        self,
        ids: Sequence[int],
        *,
        window: int = PERPLEXITY_WINDOW,
        progress: Callable[[int], None] | None = None,
    ) -> Score:
        """Score ids in windows without overlap, each from an empty state; a window's first id is not scored.

        progress : called after each window with its number of ids.
        """
        if isinstance(window, bool) or not isinstance(window, int) or not 2 <= window <= self.context:
            raise RequestError(f"window is {window!r}; 2 to {self.context} (the context) was expected", param="window")
        tokens, total = 0, 0.0
        for start in range(0, len(ids), window):
            part = ids[start : start + window]
            if len(part) > 1:
                total += _negative_log_likelihood(self.logits(part)[:-1], part[1:])
                tokens += len(part) - 1
            if progress:
                progress(len(part))
        if tokens == 0:
            raise RequestError("nothing to score: at least two tokens are needed", param="ids")
        mean = total / tokens
        return Score(tokens, mean, math.exp(mean) if mean < 700 else math.inf)

    # ---- text ----------------------------------------------------------------------------------------

    def generate(
        self,
        prompt_or_ids: str | Sequence[int],
        *,
        max_tokens: int | None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        session: Session | None = None,
        **sampling: Any,
    ) -> Generation:
        """Continue a prompt: an iterator of text pieces with ``.ids`` and ``.finish_reason``.

        prompt_or_ids : text, taken as it is (a control token spelt out in it is that token), or token ids.
        max_tokens : None fills the context.   temperature 0 is greedy.
        session : one that holds a beginning of the prompt (`reuse_session`); its state is not computed again.
        sampling : the further parameters of `coli.engine.sampler.SamplingParams`.
        Without a tokenizer ids are continued and no pieces come; read ``.ids`` when the iterator is exhausted.
        Raises RequestError naming the parameter, ModelError for text without a tokenizer.
        """
        params = _sampling_params(
            sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=self.seed_of(seed)
        )
        ids = self.prompt_ids(prompt_or_ids)
        if session is not None and getattr(session, "engine", self.engine) is not self.engine:
            raise RequestError("the session belongs to another model; use model.session() of this one", "session")
        stops = check_stops(stop)
        if stops and not self.has_tokenizer:
            raise RequestError("stop strings need a tokenizer, which this container does not have", param="stop")
        size = min(self.tokenizer.size, self.engine.vocab_size) if self.has_tokenizer else self.engine.vocab_size
        return Generation(
            self.session() if session is None else session,
            ids,
            Sampler(params, size=size, prompt_ids=ids),
            context=self.context,
            max_tokens=max_tokens,
            stop_ids=self.stop_ids,
            writer=TextWriter(self.tokenizer, stops) if self.has_tokenizer else None,
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        preserve_thinking: bool | None = None,
        session: Session | None = None,
        **sampling: Any,
    ) -> ChatAnswer:
        """Answer a conversation: an iterator of pieces of the answer's content; see `ChatAnswer` for the rest.

        messages : as in the chat API.   enable_thinking, preserve_thinking : handed to the template where not None.
        session : an earlier turn's; its state is used as far as the new prompt goes on from it.
        sampling : as in `generate`.
        """
        prompt = self.template.render(
            messages, tools=tools, enable_thinking=enable_thinking, preserve_thinking=preserve_thinking
        )
        session = self.reuse_session(session, prompt.ids)
        generation = self.generate(prompt.ids, max_tokens=max_tokens, session=session, **sampling)
        return ChatAnswer(generation, ChannelParser(thinking=prompt.thinking, tools=tools))

    def prompt_ids(self, prompt_or_ids: str | Sequence[int]) -> list[int]:
        """The ids of a plain prompt; RequestError where it is neither text nor ids of this model."""
        if isinstance(prompt_or_ids, str):
            return self.tokenizer.encode(prompt_or_ids, special=True)
        if isinstance(prompt_or_ids, (bytes, bytearray, Mapping)) or not isinstance(prompt_or_ids, Iterable):
            raise RequestError(
                f"the prompt is of type {type(prompt_or_ids).__name__}; text or a list of token ids was expected",
                "prompt",
            )
        ids = list(prompt_or_ids)
        for place, token_id in enumerate(ids):
            if isinstance(token_id, bool) or not isinstance(token_id, numbers.Integral):
                raise RequestError(f"the prompt holds {token_id!r} at place {place}; a token id was expected", "prompt")
            if not 0 <= token_id < self.engine.vocab_size:
                raise RequestError(
                    f"token id {token_id} at place {place} is outside 0..{self.engine.vocab_size - 1}", "prompt"
                )
        return [int(token_id) for token_id in ids]

    def reuse_session(self, session: Session | None, prompt_ids: Sequence[int]) -> Session:
        """``session`` if the prompt goes on from what it took in, else a new one.

        The recurrent state cannot be rewound, so it is all or nothing; either way the logits are the same bits.
        """
        held = 0 if session is None else len(session.ids)
        if session is not None and 0 < held < len(prompt_ids) and list(prompt_ids[:held]) == session.ids:
            return session
        return self.session()

    def seed_of(self, seed: int | None) -> int | None:
        """The seed of one answer: the one that was given, else the model's next, if it has any."""
        return self._seeds.getrandbits(64) if seed is None and self._seeds is not None else seed

    # ---- end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the engine's threads and let the files go.  May be called twice; in a forked child it does nothing."""
        if not self._closed and os.getpid() == self._pid:
            self._closed = True
            self._on_close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ChatAnswer:
    """One answer of a conversation: iterating gives its content as it comes.

    reasoning, content, tool_calls : what came so far on each channel.   `deltas` gives all channels in order.
    generation : the run behind it, with ``ids``, ``session`` and times.
    """

    def __init__(self, generation: Generation, parser: ChannelParser) -> None:
        self.generation = generation
        self._parser = parser
        self._deltas = self._run()

    def _run(self) -> Iterator[Delta]:
        for piece in self.generation:
            yield from self._parser.feed(piece)
        yield from self._parser.finish()

    def deltas(self) -> Iterator[Delta]:
        """The additions to every channel, in the order in which they came; those already taken are not repeated."""
        return self._deltas

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(delta.text for delta in self._deltas if delta.channel == "content")

    @property
    def ids(self) -> list[int]:
        return self.generation.ids

    @property
    def reasoning(self) -> str | None:
        return self._parser.reasoning

    @property
    def content(self) -> str | None:
        return self._parser.content

    @property
    def tool_calls(self) -> list[ToolCall]:
        return self._parser.tool_calls

    @property
    def finish_reason(self) -> FinishReason | str | None:
        """ "stop", "length" or "tool_calls"; None while the answer is not over."""
        reason = self.generation.finish_reason
        return None if reason is None else self._parser.finish_reason(reason)


def _sampling_params(further: Mapping[str, Any], **named: Any) -> SamplingParams:
    known = SamplingParams.__dataclass_fields__
    for name in further:
        if name not in known:
            raise RequestError(f"{name} is no sampling parameter; known are {', '.join(known)}", param=name)
    return SamplingParams(**named, **further)


def _negative_log_likelihood(logits: np.ndarray, ids: Sequence[int]) -> float:
    """Sum over rows of -log softmax(row)[id], in float64.   logits : float32 (T, vocab_size).   ids : T."""
    total = 0.0
    for at in range(0, len(ids), _SCORE_ROWS):
        exact = logits[at : at + _SCORE_ROWS].astype(np.float64)
        peak = exact.max(axis=1)
        log_total = peak + np.log(np.exp(exact - peak[:, None]).sum(axis=1))
        rows = np.arange(len(exact))
        total += float((log_total - exact[rows, np.asarray(ids[at : at + _SCORE_ROWS])]).sum())
    return total
