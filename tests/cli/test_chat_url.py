"""coli chat --url: the same conversation, the model behind a server."""

from __future__ import annotations

import io
import sys

import pytest
from server.serving import Serving, answering, scripted_model

from coli.cli.main import main


@pytest.fixture
def server():
    model = scripted_model(answering("hm</think>\n\nHello."))
    with Serving(model, app={"api_key": "k"}) as client:
        client.engine = model.engine
        yield client


def talk(server, monkeypatch, typed: str, *flags: str, key: str = "k") -> int:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
    monkeypatch.setenv("COLI_API_KEY", key)
    return main(["chat", "--url", f"http://127.0.0.1:{server.port}/v1", "--temperature", "0", *flags])


def test_chat_url_answers_and_keeps_the_history(server, monkeypatch, capsys):
    """Each line is answered on standard output; the second turn sends the first, without tags."""
    assert talk(server, monkeypatch, "Hi\nAgain\n/stats\n") == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello.\nHello.\n"
    assert "predicted_n: 12" in captured.err
    stats = server.get("/coli/stats", headers={"Authorization": "Bearer k"}).json["server"]
    assert stats["finished"] == 2 and stats["prompt_tokens"] == 23 + 55


def test_chat_url_says_what_cut_an_answer_off(server, monkeypatch, capsys):
    """Inside the thought or behind it; nothing for an answer that ended by itself."""
    assert talk(server, monkeypatch, "Hi\n") == 0
    assert "cut off" not in capsys.readouterr().err
    assert talk(server, monkeypatch, "Hi\n", "--max-tokens", "1") == 0
    assert "the answer was cut off inside the thought by --max-tokens 1" in capsys.readouterr().err
    assert talk(server, monkeypatch, "Hi\n", "--max-tokens", "10") == 0
    assert "the answer was cut off by --max-tokens 10" in capsys.readouterr().err


def test_chat_url_wrong_key_or_nobody_there_is_one_line(server, monkeypatch, capsys):
    """The server's own words, or that it cannot be reached; status 2."""
    assert talk(server, monkeypatch, "Hi\n", key="x") == 2
    assert "API key" in capsys.readouterr().err
    assert main(["chat", "--url", "http://127.0.0.1:1"]) == 2
    assert "cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["chat"],
        ["chat", "demo", "--url", "http://x"],
        ["chat", "--url", "http://x", "--threads", "2"],
        ["chat", "--url", "http://x", "--reprobe"],
        ["chat", "--url", "x"],
    ],
)
def test_chat_url_contradictions_are_refused(argv, capsys):
    """A model and a server, flags of loading beside a server, or neither: one line, status 2."""
    assert main(argv) == 2
    assert capsys.readouterr().err.count("\n") == 1
