"""Reuse of states: a warm answer is a cold answer, to the bit, and what was reused is said."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scripted import CASES
from server.serving import Serving, chat_body, joined

import coli
from coli.server.prefixes import PrefixCache

CHAT = "/v1/chat/completions"


class Held:
    """A stand-in for a session: ids and a size."""

    def __init__(self, *ids: int, size_bytes: int = 10) -> None:
        self.ids = list(ids)
        self.size_bytes = size_bytes


def find(cache: PrefixCache, *ids: int):
    found = cache.find(np.array(ids, np.int32))
    return None if found is None else found.ids


def test_find_gives_the_longest_strict_beginning():
    """The longest state whose ids the prompt begins with; never the whole prompt, never one that differs."""
    cache = PrefixCache(1000)
    for ids in ((1,), (1, 2), (1, 2, 3), (1, 9, 9, 9)):
        cache.keep(Held(*ids))
    assert find(cache, 1, 2, 3, 4) == [1, 2, 3]
    assert find(cache, 1, 2, 3) == [1, 2]
    assert find(cache, 1, 2, 7, 8) == [1, 2]
    assert find(cache, 1) is None
    assert find(cache, 2, 1) is None


def test_keep_stays_within_the_budget_and_drops_the_least_used():
    """The budget holds at every moment; what was used last stays; what is larger than all of it is not kept."""
    cache = PrefixCache(30)
    for i in (1, 2, 3):
        cache.keep(Held(i))
    assert find(cache, 1, 5) == [1]
    cache.keep(Held(4))
    assert [find(cache, i, 5) is not None for i in (1, 2, 3, 4)] == [True, False, True, True]
    cache.keep(Held(5, size_bytes=31))
    assert find(cache, 5, 5) is None
    cache.keep(Held(6, size_bytes=25))
    assert cache.stats()["bytes"] == 25 and cache.stats()["states"] == 1
    assert PrefixCache(0).keep(Held(1)) is None


def test_budget_of_zero_keeps_nothing():
    """With no budget every prompt is cold."""
    cache = PrefixCache(0)
    cache.keep(Held(1))
    assert find(cache, 1, 2) is None


# ---- on the demo model --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def servers():
    """Two servers of one model: with states, often left behind, and without any."""
    with coli.load("demo", threads=1, devices="none") as warm, coli.load("demo", threads=1, devices="none") as cold:
        with Serving(warm, prefix_every=64) as a, Serving(cold, prefix_bytes=0) as b:
            yield a, b


def outcome(answer):
    choice = answer["choices"][0]
    message = {k: v for k, v in choice["message"].items() if v}
    return message, choice["logprobs"], choice["finish_reason"]


def same_as_cold(servers, body):
    """Ask both; the answers, log-probabilities too, must be equal.  The warm one's usage."""
    warm, cold = (client.post(CHAT, body) for client in servers)
    assert (warm.status, cold.status) == (200, 200), (warm.body, cold.body)
    assert outcome(warm.json) == outcome(cold.json)
    assert cold.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    return warm.json["usage"]


def cached(usage) -> int:
    return usage["prompt_tokens_details"]["cached_tokens"]


def turn(name: str):
    return json.loads((CASES / "requests" / name).read_text())


def test_second_turn_warm_equals_cold(servers):
    """C24: text and log-probabilities are equal, and usage says what came from earlier states."""
    first = same_as_cold(servers, turn("cache_turn1.json"))
    second = same_as_cold(servers, turn("cache_turn2.json"))
    assert cached(second) >= 0.8 * first["prompt_tokens"]
    streamed = joined(servers[0].stream(CHAT, turn("cache_turn2.json")))
    whole = servers[1].post(CHAT, turn("cache_turn2.json")).json["choices"][0]
    assert streamed["message"]["reasoning_content"] == whole["message"].get("reasoning_content")
    assert streamed["logprobs"] == whole["logprobs"]["content"]


def test_same_prompt_twice(servers):
    """C25: the same answer; at least the last token is computed; also with one token to answer."""
    body = turn("cache_turn1.json")
    for extra in ({}, {}, {"max_tokens": 1}):
        usage = same_as_cold(servers, {**body, **extra})
    assert 0 < cached(usage) < usage["prompt_tokens"]


@pytest.mark.parametrize("words", [4, 400])
def test_three_turns_whose_thinking_the_client_drops(servers, words):
    """C26: content only is sent back; every turn equals a cold run and begins behind the last shared state."""
    messages = [{"role": "user", "content": "Consider this: " + "iron and coal " * words}]
    previous = 0
    for number in range(3):
        usage = same_as_cold(servers, {"messages": messages, "temperature": 0, "max_tokens": 30})
        assert number == 0 or cached(usage) >= previous - 12  # all but the opening of the answer
        previous = usage["prompt_tokens"]
        messages += [
            {"role": "assistant", "content": f"Answer number {number}."},
            {"role": "user", "content": f"And then, for the {number + 2}nd time?"},
        ]


def test_branches_and_beginnings_of_earlier_prompts(servers):
    """A prompt that branches off, and one that is a beginning of an earlier one, take the longest state that fits."""
    base = "one two three four five six seven eight nine ten " * 12
    long = same_as_cold(servers, chat_body(base + "and the end is red", max_tokens=8))
    branch = same_as_cold(servers, chat_body(base + "and the end is blue", max_tokens=8))
    start = same_as_cold(servers, chat_body(base[: len(base) // 2], max_tokens=8))
    assert cached(branch) >= long["prompt_tokens"] // 64 * 64 - 64 > 0
    assert cached(start) >= 64


def test_plain_completion_goes_on_from_its_prompt(servers):
    """A prompt that continues an earlier prompt and its answer starts where that ended."""
    ids = (
        servers[0]
        .post("/tokenize", {"content": "It is a truth universally acknowledged, that a single man"})
        .json["tokens"]
    )
    first = servers[0].post("/v1/completions", {"prompt": ids, "max_tokens": 9, "temperature": 0, "logprobs": 0}).json
    tokens = servers[0].post("/tokenize", {"content": first["choices"][0]["text"]}).json["tokens"]
    again = {"prompt": ids + tokens + tokens, "max_tokens": 9, "temperature": 0, "logprobs": 2}
    warm, cold = (client.post("/v1/completions", again).json for client in servers)
    assert warm["choices"] == cold["choices"]
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(ids) - 1
