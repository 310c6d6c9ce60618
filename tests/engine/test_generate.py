"""One answer from its prompt to its end."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scripted import CASES, TINY, ScriptedEngine, tiny_ids

from coli.engine.generate import Answer, Generation
from coli.engine.sampler import Sampler, SamplingParams
from coli.errors import ModelError, RequestError
from coli.text.tokenizer import Tokenizer
from coli.text.writer import TextWriter

TOKENIZER = Tokenizer.open(TINY)
STOP_IDS = frozenset({256, 258})
PROMPT = tiny_ids("Go: ")


def engine_for(answer: list[int], **options) -> ScriptedEngine:
    """An engine that continues PROMPT with the answer, then with <|endoftext|>."""
    script = [*answer, 256]
    return ScriptedEngine(lambda ids: script[min(len(ids) - len(PROMPT), len(answer))], **options)


def generate(
    engine: ScriptedEngine, *, max_tokens=100, stop=(), prompt=PROMPT, session=None, tokenizer=TOKENIZER
) -> Generation:
    return Generation(
        session or engine.session(),
        prompt,
        Sampler(SamplingParams(), size=TOKENIZER.size),
        context=engine.context,
        max_tokens=max_tokens,
        stop_ids=STOP_IDS,
        writer=TextWriter(tokenizer, stop) if tokenizer else None,
    )


@pytest.mark.parametrize("stop_id", sorted(STOP_IDS))
def test_c16_each_stop_id_ends_the_answer_and_is_not_shown(stop_id):
    """C16: <|im_end|> as well as <|endoftext|> stop; the text does not hold them, the ids do."""
    generation = generate(engine_for([*b"ok", stop_id, *b"no"]))
    assert "".join(generation) == "ok"
    assert generation.finish_reason == "stop"
    assert generation.ids == [*b"ok", stop_id]


@pytest.mark.parametrize(
    "case", json.loads((CASES / "streams" / "stop_split.json").read_text()), ids=lambda case: case["name"]
)
def test_c42_stop_strings_end_the_answer(case):
    """C42: text and reason as in the file, streamed; what was withheld in vain is released at the end."""
    answer = "".join(case["pieces"]).encode()
    generation = generate(engine_for(list(answer)), stop=case["stop"], max_tokens=len(answer))
    assert "".join(generation) == case["text"]
    assert generation.finish_reason == case["finish_reason"]


def test_max_tokens_ends_the_answer_with_length():
    """The limit counts sampled tokens; the last is not fed to the model."""
    engine = engine_for(list(b"abcdef"))
    generation = generate(engine, max_tokens=3)
    assert ("".join(generation), generation.finish_reason, generation.ids) == ("abc", "length", [*b"abc"])
    assert engine.calls == [("prefill", len(PROMPT)), ("step", ord("a")), ("step", ord("b"))]
    assert generation.session.ids == [*PROMPT, *b"ab"]


def test_max_tokens_zero_computes_nothing():
    """No token asked for, none made."""
    engine = engine_for(list(b"abc"))
    generation = generate(engine, max_tokens=0)
    assert (list(generation), generation.finish_reason, engine.calls) == ([], "length", [])


def test_the_end_of_the_context_ends_the_answer_with_length():
    """Prompt and answer share the context; a prompt that fills it leaves no token, a longer one is refused."""
    engine = engine_for(list(b"abcdef"), context=len(PROMPT) + 2)
    generation = generate(engine, max_tokens=None)
    assert ("".join(generation), generation.finish_reason) == ("ab", "length")
    full = generate(engine_for([], context=len(PROMPT)), max_tokens=5)
    assert (list(full), full.finish_reason) == ([], "length")
    with pytest.raises(RequestError, match=r"4 tokens and the context holds 3") as caught:
        generate(engine_for([], context=len(PROMPT) - 1))
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("bad", [-1, 1.5, "5", True])
def test_max_tokens_of_another_kind_is_refused(bad):
    """max_tokens is a whole number, 0 or more."""
    with pytest.raises(RequestError, match="max_tokens") as caught:
        generate(engine_for([]), max_tokens=bad)
    assert caught.value.param == "max_tokens"


def test_an_empty_prompt_is_refused():
    """C34: there is nothing to continue without a token."""
    with pytest.raises(RequestError, match="prompt is empty"):
        generate(engine_for([]), prompt=[])


def test_c41_no_piece_ends_inside_a_character():
    """C41: a character split over tokens waits for its last byte, and nothing is lost at the end."""
    generation = generate(engine_for(list("ok 😀".encode())))
    assert list(generation) == ["o", "k", " ", "😀"]
    cut = generate(engine_for(list("a😀".encode())), max_tokens=3)
    assert list(cut) == ["a", "\ufffd"]


def test_the_model_steps_only_when_a_token_is_asked_for():
    """Whoever stops reading stops the work within one token."""
    engine = engine_for(list(b"abcdef"))
    generation = generate(engine)
    assert (next(generation), next(generation)) == ("a", "b")
    assert len(engine.calls) == 2
    assert generation.finish_reason is None


def test_without_a_tokenizer_tokens_carry_ids_and_no_text():
    """Ids in, ids out: the iterator has no pieces, the tokens have ids."""
    generation = generate(engine_for([7, 8, 9]), tokenizer=None)
    assert generation.next_token().sample.id == 7
    assert list(generation) == []
    assert generation.ids == [7, 8, 9, 256]


def test_a_session_that_holds_the_beginning_computes_only_the_rest():
    """State is reused where the prompt goes on from it, and refused where it does not."""
    engine = engine_for(list(b"ab"))
    session = engine.session()
    session.prefill(PROMPT[:3])
    generation = generate(engine, session=session)
    assert "".join(generation) == "ab"
    assert (generation.reused_tokens, generation.prompt_tokens) == (3, 4)
    assert engine.calls[1] == ("prefill", 1)
    for held in (PROMPT, [1, 2], [*PROMPT, 1]):
        other = engine.session()
        other.prefill(held)
        with pytest.raises(ValueError, match="other ids"):
            generate(engine, session=other)


def test_c28_logits_that_turn_nan_are_an_error_and_end_the_answer():
    """C28: the third token's logits are NaN: an error that names it; the answer is over, the engine is not."""
    nan = np.full(272, np.nan, np.float32)
    engine = ScriptedEngine(lambda ids: nan if len(ids) == len(PROMPT) + 2 else 97)
    generation = generate(engine)
    assert [next(generation), next(generation)] == ["a", "a"]
    with pytest.raises(ModelError, match="token 3 of the answer"):
        next(generation)
    assert generation.next_token() is None
    assert "".join(generate(engine, max_tokens=1)) == "a"


def test_an_interrupt_leaves_the_session_usable():
    """Ctrl-C inside a step ends the answer; what the session took in is known and can be gone on from."""
    engine = engine_for(list(b"abcdef"))
    generation = generate(engine)
    next(generation)
    session, step = generation.session, generation.session.step

    def interrupted(token_id):
        step(token_id)
        raise KeyboardInterrupt

    session.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        next(generation)
    session.step = step
    assert list(generation) == []
    assert session.ids == [*PROMPT, *b"a"]
    again = generate(engine, session=session, prompt=[*PROMPT, *b"ab"])
    assert "".join(again) == "cdef"


def test_answers_can_be_pushed_without_a_session():
    """A batch pushes each sequence's logits into its own answer."""
    answers = [
        Answer(Sampler(SamplingParams(), size=262), limit=3, stop_ids=STOP_IDS, writer=TextWriter(TOKENIZER))
        for _ in "xy"
    ]
    one_hot = np.eye(272, dtype=np.float32)
    texts = [answer.push(one_hot[i]).text for answer, i in zip(answers, (97, 98), strict=True)]
    assert texts == ["a", "b"]
    assert answers[0].push(one_hot[258]).text == ""
    assert (answers[0].finish_reason, answers[1].finish_reason) == ("stop", None)


def test_times_are_of_their_phase():
    """The prompt's seconds and the steps' are kept apart, for the speeds that are shown."""
    generation = generate(engine_for(list(b"abc")))
    "".join(generation)
    assert generation.prefill_s > 0
    assert generation.decode_s > 0
    assert generation.prompt_tokens == 4
