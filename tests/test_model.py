"""The facade: prompts, chats, seeds, perplexity."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from scripted import CASES, TINY, VOCAB, ScriptedEngine, reciting, tiny_ids

from coli.errors import ModelError, RequestError
from coli.model import Model

TOOLS = json.loads((CASES / "streams" / "tool_basic.json").read_text())["tools"]


def model(*answers: str, folder=TINY, seed=None, **options) -> Model:
    script = reciting(*(tiny_ids(answer) for answer in answers)) if answers else lambda ids: 97
    return Model(ScriptedEngine(script, **options), folder, seed=seed)


def noise(ids: list[int]) -> np.ndarray:
    """Logits that are a pure function of the ids so far."""
    return np.random.default_rng([len(ids), *ids]).standard_normal(VOCAB).astype(np.float32)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def test_generate_continues_text_and_ids_alike():
    """A text prompt is its ids, control tokens included; the pieces join to the answer."""
    prompt = "<|im_start|>Go<|im_end|>"
    by_text, by_ids = model("ok!").generate(prompt, max_tokens=9), model("ok!").generate(tiny_ids(prompt), max_tokens=9)
    assert "".join(by_text) == "".join(by_ids) == "ok!"
    assert by_text.ids == by_ids.ids
    assert by_text.finish_reason == "stop"


def test_generate_takes_numpy_ids():
    """Ids come as arrays too."""
    assert "".join(model("ok").generate(np.array([1, 2]), max_tokens=2)) == "ok"


@pytest.mark.parametrize("bad", [[1, 2.5], ["1"], [True], [1, VOCAB], [-1]])
def test_generate_refuses_ids_that_are_none(bad):
    """What is no id of this model is named with its place before anything is computed."""
    with pytest.raises(RequestError, match="place"):
        model().generate(bad, max_tokens=1)


def test_generate_unknown_parameter_is_named():
    """A misspelt parameter is refused, never ignored."""
    with pytest.raises(RequestError, match="temprature is no sampling parameter"):
        model().generate("x", max_tokens=1, temprature=1)


def test_generate_never_samples_padding_rows():
    """Ids at or above the tokenizer's size stay out even where their logits are the largest."""
    padded = Model(ScriptedEngine(lambda ids: np.arange(300, dtype=np.float32), vocab_size=300), TINY)
    assert padded.generate("x", max_tokens=3).next_token().sample.id == 271


def test_load_seed_makes_the_sequence_of_answers_repeatable():
    """With a seed at load the first, second, third answers are each the same again; a seed of their own wins."""

    def texts(seed, own=None):
        loaded = Model(ScriptedEngine(noise), TINY, seed=seed)
        return [loaded.generate("x", max_tokens=8, temperature=1.0, seed=own) for _ in range(3)]

    def ids(generations):
        return [generation.ids for generation in generations if list(generation) is not None]

    assert ids(texts(1)) == ids(texts(1))
    assert len({tuple(answer) for answer in ids(texts(1))}) == 3
    assert ids(texts(1)) != ids(texts(2))
    assert len({tuple(answer) for answer in ids(texts(1, own=5))}) == 1
    with pytest.raises(RequestError, match="seed"):
        Model(ScriptedEngine(noise), TINY, seed=1 << 64)


def test_chat_gives_content_and_keeps_the_thought_apart():
    """The prompt opened the thought: pieces are content only, reasoning is beside them, ids are all."""
    answer = model("I add.\n</think>\n\nFour.<|im_end|>").chat([user("2+2")], max_tokens=50)
    assert "".join(answer) == "Four."
    assert (answer.reasoning, answer.content, answer.finish_reason) == ("I add.", "Four.", "stop")
    assert answer.ids == tiny_ids("I add.\n</think>\n\nFour.<|im_end|>")


def test_c33_enable_thinking_false_gives_no_reasoning():
    """C33: with thinking off the prompt closes the thought, and all of the answer is content."""
    answer = model("Four.<|im_end|>").chat([user("2+2")], max_tokens=50, enable_thinking=False)
    assert ("".join(answer), answer.reasoning) == ("Four.", None)


def test_c43_chat_with_tools_ends_with_tool_calls():
    """C43: a call in the answer is a call beside the content, and the reason says so."""
    call = "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
    answer = model(f"hm</think>\n\nLet me look.\n{call}<|im_end|>").chat([user("weather")], max_tokens=200, tools=TOOLS)
    assert "".join(answer) == "Let me look."
    assert [(c.name, json.loads(c.arguments)) for c in answer.tool_calls] == [("get_weather", {"city": "Oslo"})]
    assert answer.finish_reason == "tool_calls"


def test_chat_without_a_template_is_refused_and_completion_works(tmp_path):
    """C16: no template: chat says so, a plain prompt runs."""
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(TINY / name, tmp_path)
    bare = model("ok", folder=tmp_path)
    with pytest.raises(ModelError, match="no chat template"):
        bare.chat([user("x")], max_tokens=1)
    assert "".join(bare.generate("x", max_tokens=5)) == "ok"


def test_model_without_a_tokenizer_takes_ids_only(tmp_path):
    """Text is refused in one line, ids run to the stop ids of generation_config.json, stop strings are refused."""
    shutil.copy(TINY / "generation_config.json", tmp_path)
    bare = model("ab", folder=tmp_path)
    with pytest.raises(ModelError, match="no tokenizer.json"):
        bare.generate("x", max_tokens=1)
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        bare.generate([1], max_tokens=1, stop="x")
    generation = bare.generate([1], max_tokens=5)
    assert (list(generation), generation.ids, generation.finish_reason) == ([], [97, 98, 256], "stop")


def test_reuse_session_is_all_or_nothing():
    """A session is kept where the prompt goes on from all it took in, else a new one begins."""
    loaded = model()
    session = loaded.session()
    session.prefill([1, 2, 3])
    assert loaded.reuse_session(session, [1, 2, 3, 4]) is session
    for prompt in ([1, 2, 3], [1, 2], [1, 9, 3, 4]):
        assert loaded.reuse_session(session, prompt).ids == []
    assert loaded.reuse_session(None, [1]).ids == []


def test_second_turn_from_the_first_ones_state_equals_a_fresh_one():
    """C24: a warm turn gives the ids of a cold one, computing only what is new."""
    warm = Model(ScriptedEngine(noise), TINY)
    first = warm.generate("abc", max_tokens=5, temperature=1.0, seed=1)
    list(first)
    prompt = [*tiny_ids("abc"), *first.ids, *tiny_ids(" more")]
    session = warm.reuse_session(first.session, prompt)
    second = warm.generate(prompt, max_tokens=8, temperature=1.0, seed=2, session=session)
    list(second)
    cold = Model(ScriptedEngine(noise), TINY).generate(prompt, max_tokens=8, temperature=1.0, seed=2)
    list(cold)
    assert second.ids == cold.ids
    assert second.reused_tokens == 7


def test_score_counts_windows_without_overlap():
    """The first id of each window is not scored; the sum is over -log softmax in each window from an empty state."""
    loaded = Model(ScriptedEngine(noise), TINY)
    ids = list(range(1, 12))
    expected, seen = 0.0, []
    for start in (0, 4, 8):
        window = ids[start : start + 4]
        for i in range(1, len(window)):
            row = noise(window[:i]).astype(np.float64)
            expected += math.log(np.exp(row).sum()) - row[window[i]]
    score = loaded.score(ids, window=4, progress=seen.append)
    assert score.tokens == 8
    assert score.nll == pytest.approx(expected / 8, rel=1e-12)
    assert score.perplexity == pytest.approx(math.exp(expected / 8), rel=1e-12)
    assert seen == [4, 4, 3]
    assert loaded.perplexity(ids) == loaded.score(ids, window=512).perplexity


def test_score_leaves_out_a_last_window_of_one_id():
    """A window of one id has nothing to predict; a text of one id has no perplexity."""
    loaded = Model(ScriptedEngine(noise), TINY)
    assert loaded.score([1, 2, 3, 4, 5], window=4).tokens == 3
    for bad in ([], [1]):
        with pytest.raises(RequestError, match="at least two tokens"):
            loaded.score(bad)
    with pytest.raises(RequestError, match="window is 1"):
        loaded.score([1, 2], window=1)


def test_model_closes_once_and_is_a_context_manager():
    """Leaving the block closes; closing again does nothing."""
    engine = ScriptedEngine(noise)
    with Model(engine, TINY) as loaded:
        assert loaded.stats()["isa"] == "scripted"
    loaded.close()
    assert engine.closed == 1


FORK = """
import os, signal, sys
import coli

with coli.load("demo", devices="none", threads=1) as model:
    before = model.logits([1, 2]).tobytes()
    session = model.session()
    if os.fork() == 0:
        signal.alarm(20)  # a hang is what this is about
        uses = (lambda: model.logits([1]), lambda: model.generate([1], max_tokens=1), model.session, model.stats,
                lambda: session.step(1), session.copy)
        for use in uses:
            try:
                use()
            except coli.ColiError as error:
                assert "load it in the child" in str(error) and "\\n" not in str(error), error
            else:
                os._exit(3)
        model.close()  # a child that leaves a `with` block in the usual way
        os._exit(0)
    status = os.wait()[1]
    assert model.logits([1, 2]).tobytes() == before
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_model_in_a_forked_child_is_refused_and_the_parents_goes_on():
    """The engine's threads are not in the child, where a call would wait for ever; one line says what to do instead."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
