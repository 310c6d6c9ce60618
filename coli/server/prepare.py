"""From a checked request to a job for the scheduler: prompt ids, samplers, limits, grammar.

Everything that can be wrong with a request is found here, before it takes a place in the queue.  Runs on a worker
thread: templates, tokenizers and grammars take milliseconds, long prompts more.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from coli.engine.generate import Answer, check_max_tokens
from coli.engine.sampler import MAX_LOGPROBS, Sampler, SamplingParams
from coli.errors import RequestError
from coli.server.sampling import ConstrainedSampler, PromptScorer
from coli.server.schemas import ChatRequest, CompletionRequest, TokenizeRequest
from coli.text.messages import check_tools
from coli.text.stops import check_stops
from coli.text.thinking import Thinking
from coli.text.tools import tool_schemas
from coli.text.writer import TextWriter

if TYPE_CHECKING:
    from coli.model import Model
    from coli.server.grammar import Constraint, Grammars
    from coli.text.tokenizer import Tokenizer

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


@dataclass(frozen=True)
class Prepared:
    """What one prompt of a request becomes.

    tools : those that may be called, for the parser of the answer; one_call : it ends behind its first call.
    """

    prompt: np.ndarray
    answers: list[Answer]
    stop_ids: frozenset[int] = frozenset()
    marks: tuple[int, ...] = ()
    scorer: PromptScorer | None = None
    thinking: Thinking = "unset"
    tools: Sequence[dict[str, Any]] | None = None
    one_call: bool = False


class IdWriter:
    """The text of an answer of a model without a tokenizer: its ids, separated by commas."""

    stopped = False

    def __init__(self) -> None:
        self._separator = ""

    def feed(self, token_id: int) -> str:
        text, self._separator = f"{self._separator}{token_id}", ","
        return text

    def finish(self) -> str:
        return ""


class Preparer:
    """Makes jobs for one model.   most_answers : how many one request may ask for."""

    def __init__(self, model: Model, *, most_answers: int) -> None:
        self.model = model
        self._most_answers = most_answers
        self._lock = threading.Lock()

    @cached_property
    def _grammars(self) -> Grammars:
        from coli.server.grammar import Grammars  # llguidance is loaded by the first request that needs it

        return Grammars(self.tokenizer("response_format"), self.model.stop_ids)

    def tokenizer(self, param: str) -> Tokenizer:
        """The model's tokenizer, which a request needs for its field ``param``; RequestError where there is none."""
        if not self.model.has_tokenizer:
            raise RequestError(
                f"{self.model.folder.name} has no tokenizer, so it takes and gives token ids only; "
                'send a list of ids in "prompt" to /v1/completions',
                param=param,
                code="not_offered_by_model",
            )
        return self.model.tokenizer

    # ---- chat -----------------------------------------------------------------------------------------------

    def chat(self, request: ChatRequest) -> Prepared:
        tools, form, one_call = self._tools(request)
        prompt = self.render(request, tools)
        ids = self._checked(prompt.ids, "messages")
        top = self._top_logprobs(request.logprobs, request.top_logprobs)
        constraint = self._constraint(request, form, prompt.thinking == "open")
        answers = self._answers(
            request, ids, top, constraint, _smaller(request.max_tokens, request.max_completion_tokens)
        )
        return Prepared(
            np.array(ids, np.int32),
            answers,
            self.model.stop_ids,
            marks=self._history_mark(request, tools, ids),
            thinking=prompt.thinking,
            tools=tools,
            one_call=one_call,
        )

    def render(self, request: ChatRequest | TokenizeRequest, tools: Any, *, add_generation_prompt: bool = True) -> Any:
        """The prompt of a conversation; the request's own ``enable_thinking`` wins over the template's arguments."""
        self.tokenizer("messages")  # whose lack is told before that of a template
        variables = dict(request.chat_template_kwargs or {})
        if request.enable_thinking is not None:
            variables["enable_thinking"] = request.enable_thinking
        elif "enable_thinking" not in variables and getattr(request, "reasoning_effort", None) is not None:
            variables["enable_thinking"] = request.reasoning_effort != "none"  # type: ignore[union-attr]
        return self.model.template.render(
            request.messages or [], tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
        )

    def _history_mark(self, request: ChatRequest, tools: Any, ids: list[int]) -> tuple[int, ...]:
        """Where the conversation ends and the opening of the answer begins: later turns share the prompt up to there.

        Templates may open an answer in another way than they show it once it is history (an empty thought), so a state
        behind the opening would be of use to nobody.
        """
        try:
            history = self.render(request, tools, add_generation_prompt=False).ids
        except RequestError:  # a template that insists on an opening; then there is no such place
            return ()
        size = min(len(history), len(ids))
        differ = np.flatnonzero(np.array(history[:size]) != np.array(ids[:size]))
        mark = int(differ[0]) if len(differ) else size
        return (mark,) if 0 < mark < len(ids) else ()

    def _tools(self, request: ChatRequest) -> tuple[list[dict[str, Any]] | None, Sequence[Any] | None, bool]:
        """The tools on offer; those of which one must be called, or None; whether the answer ends after one call."""
        tools = check_tools(request.tools)
        choice = request.tool_choice
        one_call = request.parallel_tool_calls is False
        if choice is None or choice == "auto":
            return tools, None, one_call
        if choice == "none":
            return None, None, False
        if tools is None:
            raise RequestError("tool_choice is given without tools", param="tool_choice")
        if choice == "required":
            return tools, tools, one_call
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or choice.get("type", "function") != "function":  # type: ignore[union-attr]
            raise RequestError(
                f"tool_choice is {choice!r:.80}; none, auto, required or a function was expected", param="tool_choice"
            )
        named = [tool for tool in tools if name in tool_schemas([tool])]
        if not named:
            raise RequestError(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
        return tools, named, True

    def _constraint(self, request: Any, form: Sequence[Any] | None, thinking: bool) -> Constraint | None:
        if form is None and (request.response_format or {"type": "text"}) == {"type": "text"}:
            return None
        from coli.server.grammar import json_grammar, tool_grammar

        if form is not None:
            if json_grammar(request.response_format or {"type": "text"}) is not None:
                raise RequestError("response_format cannot be had beside a forced tool_choice", param="response_format")
            several = request.parallel_tool_calls is not False and not isinstance(request.tool_choice, dict)
            grammar, param = tool_grammar(form, several=several), "tools"
        else:
            grammar, param = json_grammar(request.response_format), "response_format"
        if grammar is None:
            return None
        with self._lock:  # the first one builds the tables
            grammars = self._grammars
        return grammars.constraint(grammar, thinking=thinking, param=param)

    # ---- plain completion -----------------------------------------------------------------------------------

    def completions(self, request: CompletionRequest) -> list[Prepared]:
        prompts = self._prompts(request.prompt)
        n = self._n(request)
        if len(prompts) * n > 16 * self._most_answers:
            raise RequestError(
                f"{len(prompts)} prompts of {n} answers are more than {16 * self._most_answers} in one request",
                param="prompt",
            )
        top = request.logprobs
        self._top_logprobs(top is not None, top)
        prepared = []
        for prompt in prompts:
            if isinstance(prompt, str):
                self.tokenizer("prompt")
            ids = self._checked(self.model.prompt_ids(prompt), "prompt")
            constraint = self._constraint(request, None, False)
            prepared.append(
                Prepared(
                    np.array(ids, np.int32),
                    self._answers(request, ids, top, constraint, request.max_tokens),
                    self.model.stop_ids,
                    marks=(len(ids) - 1,) if len(ids) > 1 else (),
                    scorer=PromptScorer(size=self._size, top=top) if request.echo and top is not None else None,
                )
            )
        return prepared

    def _prompts(self, prompt: Any) -> list[str | list[int]]:
        if isinstance(prompt, str):
            return [prompt]
        kinds = {type(item) for item in prompt}
        if kinds == {int}:
            return [prompt]
        if kinds in ({str}, {list}):
            return prompt
        raise RequestError("prompt is an empty or mixed list; texts, or lists of ids, were expected", param="prompt")

    # ---- both -----------------------------------------------------------------------------------------------

    @property
    def _size(self) -> int:
        vocab_size = self.model.engine.vocab_size
        return min(self.model.tokenizer.size, vocab_size) if self.model.has_tokenizer else vocab_size

    def _checked(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise RequestError(f"{param} makes an empty prompt; at least one token is needed", param=param)
        if len(ids) > self.model.context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens and the context holds {self.model.context}; "
                "shorten the prompt or start the server with a larger --context",
                param=param,
                code="context_length_exceeded",
            )
        return ids

    def _top_logprobs(self, wanted: bool | None, top: int | None) -> int | None:
        if not wanted:
            if top:
                raise RequestError("top_logprobs is given without logprobs", param="top_logprobs")
            return None
        if top is not None and not 0 <= top <= MAX_LOGPROBS:
            raise RequestError(f"top_logprobs is {top}; 0 to {MAX_LOGPROBS} was expected", param="top_logprobs")
        return top or 0

    def _n(self, request: Any) -> int:
        n = 1 if request.n is None else request.n
        if not 1 <= n <= self._most_answers:
            raise RequestError(f"n is {n}; 1 to {self._most_answers} (--parallel) was expected", param="n")
        return n

    def _answers(
        self, request: Any, ids: list[int], top: int | None, constraint: Constraint | None, max_tokens: int | None
    ) -> list[Answer]:
        """The answers to one prompt.  Choice i is sampled with the request's seed plus i."""
        model = self.model
        check_max_tokens(max_tokens)
        if request.stream_options is not None and not request.stream:
            raise RequestError("stream_options is given without stream", param="stream_options")
        room = model.context - len(ids)
        stops = check_stops(request.stop)
        if stops and not model.has_tokenizer:
            raise RequestError("stop strings need a tokenizer, which this model does not have", param="stop")
        params = dict(model.sampling_defaults)
        params |= {name: getattr(request, name) for name in _SAMPLING if getattr(request, name) is not None}
        bias = _logit_bias(request.logit_bias)
        answers = []
        for i in range(self._n(request)):
            seed = model.seed_of(request.seed)
            if seed is not None and i:
                seed = (seed + i) % (1 << 64)
            wanted = SamplingParams(**params, logit_bias=bias, seed=seed, logprobs=top)
            if constraint is None:
                sampler: Sampler = Sampler(wanted, size=self._size, prompt_ids=ids)
            else:
                sampler = ConstrainedSampler(
                    wanted, size=self._size, prompt_ids=ids, constraint=constraint.copy() if i else constraint
                )
            answers.append(
                Answer(
                    sampler,
                    limit=room if max_tokens is None else min(room, max_tokens),
                    stop_ids=model.stop_ids,
                    writer=TextWriter(model.tokenizer, stops) if model.has_tokenizer else IdWriter(),
                )
            )
        return answers


def _smaller(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    found = {}
    for key, value in (bias or {}).items():
        if not key.isdecimal() or len(key) > 9:
            raise RequestError(f"logit_bias names {key!r:.40}; a token id was expected", param="logit_bias")
        found[int(key)] = value
    return found
