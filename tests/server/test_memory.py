"""coli/server/memory.py: pages are given back now and then, not at every turn."""

from __future__ import annotations

from types import SimpleNamespace

from coli.server import memory


def test_pages_are_given_back_once_in_a_while(monkeypatch):
    """At the first turn, and again only when EVERY_S have passed since."""
    now_s, given_back_s = 1000.0, []
    monkeypatch.setattr(memory, "_last_s", 0.0)
    monkeypatch.setattr(memory, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(memory, "return_free_pages", lambda: given_back_s.append(now_s))
    for _ in range(4):
        memory.give_back()
        now_s += memory.EVERY_S / 2
    assert given_back_s == [1000.0, 1000.0 + memory.EVERY_S]
