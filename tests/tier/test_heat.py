"""coli/tier/heat.py: decode counts that fade, and what of them is not saved yet."""

from __future__ import annotations

import numpy as np

from coli.tier.heat import HALF_LIFE_TOKENS, PROMPT_TOKENS, Heat


def test_noted_choices_are_counted_by_fold():
    """Rows of one layer that chose the same expert are both counted; the buffer may change in between."""
    heat = Heat(2, 4, 2)
    top_idx = np.array([[0, 3], [3, 1]], np.int32)
    heat.note(0, top_idx)
    top_idx[:] = 2
    heat.note(1, top_idx[:1])
    assert 0 == heat.recent.sum()
    keys = heat.fold()
    assert [[1, 1, 0, 2], [0, 0, 2, 0]] == heat.recent.tolist()
    assert [0, 3, 3, 1, 6, 6] == keys.tolist()
    assert 0 == len(heat.fold())


def test_recent_counts_halve_with_the_tokens():
    """What is old loses its say; what is saved does not fade."""
    heat = Heat(1, 2, 1)
    for _ in range(HALF_LIFE_TOKENS):
        heat.note(0, np.array([[0]], np.int32))
        heat.fold()
    assert [[HALF_LIFE_TOKENS / 2, 0]] == heat.recent.tolist()
    heat.note(0, np.full((2 * HALF_LIFE_TOKENS, 1), 1, np.int32))  # a batch may pass two half lives at once
    heat.fold()
    assert [[HALF_LIFE_TOKENS / 8, HALF_LIFE_TOKENS / 2]] == heat.recent.tolist()
    assert 3 * HALF_LIFE_TOKENS == heat.tokens
    assert [[HALF_LIFE_TOKENS, 2 * HALF_LIFE_TOKENS]] == heat.take_unsaved().tolist()


def test_long_history_starts_as_one_half_life():
    """Counts of many tokens keep their proportions and weigh at most a half life of new ones; few stay as they are."""
    long = Heat(2, 2, 1, np.array([[3.0, 1.0], [4.0, 0.0]]) * 1024)
    assert [[768, 256], [1024, 0]] == long.recent.tolist()
    assert [[3, 1]] == Heat(1, 2, 1, np.array([[3.0, 1.0]])).recent.tolist()
    assert [[0, 0]] == Heat(1, 2, 1, np.zeros((1, 2))).recent.tolist()


def test_unsaved_counts_are_given_out_once_and_taken_back():
    """A save that failed loses nothing."""
    heat = Heat(1, 2, 1, np.array([[5.0, 5.0]]))
    assert heat.take_unsaved() is None
    heat.note(0, np.array([[1]], np.int32))
    heat.fold()
    delta = heat.take_unsaved()
    assert [[0, 1]] == delta.tolist()
    assert heat.take_unsaved() is None
    heat.note(0, np.array([[0]], np.int32))
    heat.fold()
    heat.give_back(delta)
    assert [[1, 1]] == heat.take_unsaved().tolist()


def test_prompt_is_hot_now_and_no_heat():
    """A prompt's choices count for what is hot now, at most as a half life of tokens, and neither for the file nor for
    the tokens."""
    heat = Heat(2, 4, 2)
    heat.note(0, np.array([[0, 1], [0, 2]], np.int32), False)
    assert 0 == len(heat.fold())
    assert [[2, 1, 1, 0], [0, 0, 0, 0]] == heat.now.tolist()
    assert (0, 0, None) == (heat.tokens, heat.recent.sum(), heat.take_unsaved())
    heat.note(1, np.tile(np.array([[3, 2]], np.int32), (4 * PROMPT_TOKENS, 1)), False)
    heat.fold()
    assert [PROMPT_TOKENS, PROMPT_TOKENS] == heat.now[1, 2:].tolist()


def test_chunks_of_a_prompt_count_alike_and_an_older_prompt_half():
    """Decode in between makes it another prompt; what was decoded long enough ago and what was read fade together."""
    heat = Heat(1, 2, 1)
    for _ in range(2):
        heat.note(0, np.array([[0]], np.int32), False)
        heat.fold()
    assert [[2, 0]] == heat.now.tolist()
    heat.note(0, np.array([[1]], np.int32))
    heat.fold()
    heat.note(0, np.array([[1]], np.int32), False)
    heat.fold()
    assert [[1, 2]] == heat.now.tolist()
    heat.note(0, np.zeros((HALF_LIFE_TOKENS, 1), np.int32))
    heat.fold()
    assert [[(HALF_LIFE_TOKENS + 1) / 2, 1]] == heat.now.tolist()


def test_layers_of_a_span_are_noted_at_once():
    """(layers, rows, top_k) from a layer on is the same as layer by layer."""
    once, each = Heat(4, 4, 2), Heat(4, 4, 2)
    top_idx = np.random.default_rng(0).integers(0, 4, (3, 5, 2)).astype(np.int32)
    for decoding in (True, False):
        once.note(1, top_idx, decoding)
        for layer in range(3):
            each.note(1 + layer, top_idx[layer], decoding)
    assert once.fold().tolist() == each.fold().tolist()
    assert once.now.tolist() == each.now.tolist()
