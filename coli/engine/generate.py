"""One answer: logits in, tokens out, until something ends it.

`Answer` holds what an answer needs besides the model: sampler, text, stop ids, limits.  Whoever has logits pushes them
into it, one sequence or many at a time.  `Generation` is an answer with a session of its own that it steps: an iterator
of text pieces.  Neither knows chat templates or channels; the text side is an object that turns ids into text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

from coli.engine.sampler import Sample, Sampler
from coli.errors import RequestError

if TYPE_CHECKING:
    from coli.engine.session import Session

FinishReason = Literal["stop", "length"]


class Writer(Protocol):
    """What makes text of an answer's ids: `coli.text.writer.TextWriter`."""

    @property
    def stopped(self) -> bool: ...

    def feed(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class Token(NamedTuple):
    """One sampled id and the text that it made certain; empty while a character or a stop string is open.

    The last token of an answer also carries the text that was still withheld.
    """

    text: str
    sample: Sample


def check_max_tokens(max_tokens: int | None) -> None:
    """RequestError unless ``max_tokens`` is None or a whole number, 0 or more."""
    if max_tokens is not None and (isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 0):
        raise RequestError(
            f"max_tokens is {max_tokens!r:.80}; a whole number, 0 or more, was expected", param="max_tokens"
        )


class Answer:
    """An answer in the making.

    limit : tokens after which it ends with "length".   stop_ids : ids that end it with "stop"; they make no text.
    writer : None where the model has no tokenizer; tokens then carry no text.
    ids : every sampled id, the stop id included.   finish_reason : None while it is not over.
    """

    def __init__(
        self, sampler: Sampler, *, limit: int, stop_ids: frozenset[int] = frozenset(), writer: Writer | None = None
    ) -> None:
        self._sampler = sampler
        self._limit = limit
        self._stop_ids = stop_ids
        self._writer = writer
        self.ids: list[int] = []
        self.finish_reason: FinishReason | None = "length" if limit <= 0 else None

    def push(self, logits: np.ndarray) -> Token:
        """Sample the next token from float32 logits (vocab_size,).  Not to be called once there is a finish_reason."""
        sample = self._sampler.sample(logits)
        self.ids.append(sample.id)
        if sample.id in self._stop_ids:
            self.finish_reason = "stop"
            return Token(self._rest(), sample)
        text = self._writer.feed(sample.id) if self._writer else ""
        if self._writer and self._writer.stopped:
            self.finish_reason = "stop"
        elif len(self.ids) >= self._limit:
            self.finish_reason = "length"
            text += self._rest()
            if self._writer and self._writer.stopped:  # the withheld end of a character completed a stop string
                self.finish_reason = "stop"
        return Token(text, sample)

    def _rest(self) -> str:
        return self._writer.finish() if self._writer else ""


class Generation:
    """Runs an answer to its end: ``for piece in generation`` gives its text as it comes.

    ids : the sampled ids so far, a stop id included.   finish_reason : "stop" or "length" once it is over, else None.
    prompt_tokens, reused_tokens : the prompt's length, and how much of it the session held already.
    prefill_s, decode_s : seconds in the prompt, and in the steps after it.
    session : stays usable; ``session.ids`` says what it took in, whatever ended or interrupted the answer.
    kept : the copy of the session that `keep_state_behind` asked for, once the prompt is computed; else None.
    """

    def __init__(
        self,
        session: Session,
        prompt_ids: Sequence[int],
        sampler: Sampler,
        *,
        context: int,
        max_tokens: int | None,
        stop_ids: frozenset[int] = frozenset(),
        writer: Writer | None = None,
    ) -> None:
        """
        session : holds nothing, or a beginning of ``prompt_ids`` that leaves at least one id to compute.
        context : prompt and answer together; ``max_tokens`` None lets the answer fill it.
        Raises RequestError for an empty prompt, one longer than the context, or a bad ``max_tokens``.
        """
        check_max_tokens(max_tokens)
        prompt_ids = [int(i) for i in prompt_ids]
        if not prompt_ids:
            raise RequestError("the prompt is empty; at least one token is needed", param="prompt")
        if len(prompt_ids) > context:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens and the context holds {context}; "
                "shorten the prompt or raise --context",
                param="prompt",
                code="context_length_exceeded",
            )
        self.session = session
        self.prompt_tokens = len(prompt_ids)
        self.reused_tokens = len(session.ids)
        if self.reused_tokens >= len(prompt_ids) or prompt_ids[: self.reused_tokens] != session.ids:
            raise ValueError("the session holds other ids than a beginning of the prompt")
        room = context - len(prompt_ids)
        limit = room if max_tokens is None else min(room, max_tokens)
        self._answer = Answer(sampler, limit=limit, stop_ids=stop_ids, writer=writer)
        self._prompt_ids = prompt_ids
        self._interrupted = False
        self._keep_at = 0
        self.kept: Session | None = None
        self.prefill_s = 0.0
        self.decode_s = 0.0

    @property
    def ids(self) -> list[int]:
        return self._answer.ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._answer.finish_reason

    def keep_state_behind(self, ids: Sequence[int]) -> None:
        """Keep a copy of the session as it stands behind ``ids``, for prompts that begin so and then go another way.

        The recurrent state cannot be rewound, and a template that drops old thoughts makes the next turn's prompt leave
        this one's where the answer begins.  Does nothing where the prompt does not begin with ``ids``, or where the
        session is past them already.  To be called before the first token is asked for.
        """
        if self.reused_tokens <= len(ids) < len(self._prompt_ids) and self._prompt_ids[: len(ids)] == list(ids):
            self._keep_at = len(ids)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """The next piece of text; tokens that complete no text are passed over."""
        while True:
            token = self.next_token()
            if token is None:
                raise StopIteration
            if token.text:
                return token.text

    def next_token(self) -> Token | None:
        """The next token, None once the answer is over.  The model steps only when the token is asked for.

        An answer that an exception cut off (an interrupt, logits that are not finite) is over too.
        """
        if self._answer.finish_reason is not None or self._interrupted:
            return None
        start = time.perf_counter()
        self._interrupted = True  # until the token is there: a step that was cut off cannot be taken again
        if self._answer.ids:
            logits = self.session.step(self._answer.ids[-1])
            self.decode_s += time.perf_counter() - start
        else:
            logits = self._prefill()
            self.prefill_s += time.perf_counter() - start
        token = self._answer.push(logits)
        self._interrupted = False
        return token

    def _prefill(self) -> np.ndarray:
        """The logits behind the prompt.  Where it is cut on the way makes no difference to them."""
        start = self.reused_tokens
        if self._keep_at:
            if self._keep_at > start:
                self.session.prefill(self._prompt_ids[start : self._keep_at])
            self.kept = self.session.copy()
            start = self._keep_at
        return self.session.prefill(self._prompt_ids[start:])
