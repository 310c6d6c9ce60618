"""From loading to the end: health, idleness, pings, heat, and a load that fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from server.serving import NO_THINKING, Client, Serving, answering, chat_body, scripted_model

from coli.errors import ModelError
from coli.server import sse

CHAT = "/v1/chat/completions"
ROOT = Path(__file__).parents[2]


def test_health_is_503_while_loading():
    """Until the model is there, everything that needs it is 503 with Retry-After; the page is shown."""
    go = threading.Event()
    serving = Serving(lambda: go.wait(10) and scripted_model(answering("ok")))
    client = serving.start(wait=False)
    try:
        for answer in (client.get("/health"), client.post(CHAT, chat_body("x")), client.get("/coli/stats")):
            assert (answer.status, answer.json["error"]["code"]) == (503, "model_loading")
            assert "retry-after" in answer.headers
        assert client.get("/").status == client.get("/metrics").status == 200
        go.set()
        deadline = time.monotonic() + 5
        while client.get("/health").status != 200:
            assert time.monotonic() < deadline
        assert client.post(CHAT, chat_body("x", max_tokens=1)).status == 200
    finally:
        go.set()
        serving.stop()


def test_load_that_fails_ends_the_server():
    """The error is kept for whoever started it."""

    def load():
        raise ModelError("no such model")

    serving = Serving(load)
    serving.thread.start()
    serving.thread.join(10)
    assert not serving.thread.is_alive()
    assert str(serving.service.failure) == "no such model"


def test_pings_come_while_a_prompt_is_long(serve, monkeypatch):
    """A stream shows signs of life before its first token; clients take them for comments."""
    monkeypatch.setattr(sse, "PING_S", 0.1)
    client = serve(answering("ok"), delay_s=0.001)
    with client.open_stream(CHAT, chat_body("x" * 600, stream=True, **NO_THINKING)) as stream:
        lines = stream.response.read().split(b"\n")
    first_content = next(i for i, line in enumerate(lines) if b'"content":"o' in line)
    assert any(line.startswith(b": ping") for line in lines[:first_content])
    assert lines[-3] == b"data: [DONE]"


def test_metrics_are_counted(demo):
    """Passes, tokens and answers by path and status, in Prometheus' text format."""
    demo.chat("hello", max_tokens=3)
    demo.post(CHAT, {})
    text = demo.get("/metrics").body.decode()
    assert f'coli_requests_total{{endpoint="{CHAT}",status="400"}}' in text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    for name in ("coli_decode_passes_total", "coli_tokens_total", "coli_time_to_first_token_seconds_count"):
        assert float(values[name]) > 0, name


def test_models_plan_and_stats(demo):
    """One model by its folder's name; a plan, or none without devices; what runs where."""
    assert [model["id"] for model in demo.get("/v1/models").json["data"]] == ["demo"]
    assert demo.get("/coli/plan").json == {"model": "demo", "place": "off", "plan": None}
    stats = demo.get("/coli/stats?experts=1").json
    assert stats["threads"] == 1 and stats["server"]["slots"] == 8 and "plan" not in stats


@pytest.fixture
def process(tmp_path):
    """process(*flags) -> (client, process) of a `coli serve` of its own."""
    running = []

    def start(*flags, **environment):
        command = [sys.executable, "-m", "coli", "serve", "demo", "--port", "0", "--threads", "1", *flags]
        child = subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        running.append(child)
        port, lines = None, []
        for line in child.stderr:
            lines.append(line)
            if "http://" in line:
                port = int(line.partition("http://127.0.0.1:")[2].split(",")[0])
            if "is ready" in line:
                return Client(port), child
        raise AssertionError("".join(lines))

    yield start
    for child in running:
        child.kill()
        child.wait()


def test_shutdown_writes_heat_and_leaves_with_0(process, tmp_path):
    """SIGTERM: the running answer gets its time, heat is on the disk, the status is 0."""
    heat = tmp_path / "heat.json"
    client, child = process("--devices", "fake:64MiB", "--heat", str(heat))
    with client.open_stream(CHAT, chat_body("Tell me", max_tokens=300, stream=True)) as stream:
        events = iter(stream)
        next(events)
        child.send_signal(signal.SIGTERM)
        assert list(events)[-1] == "[DONE]"
    assert child.wait(20) == 0
    assert heat.stat().st_size > 100


@pytest.mark.full
def test_idle_server_is_idle(process):
    """C11: under 0.2 CPU seconds in 10 s of rest; the next first token takes at most 1.5 times an immediate one."""
    client, child = process()

    def first_token_s():
        begin = time.perf_counter()
        client.post(CHAT, chat_body(f"{begin} " + "hello there, " * 200, max_tokens=1))
        return time.perf_counter() - begin

    client.chat("hello", max_tokens=20)
    immediate = sorted(first_token_s() for _ in range(5))[2]
    time.sleep(5)
    used = psutil.Process(child.pid).cpu_times()
    time.sleep(10)
    now = psutil.Process(child.pid).cpu_times()
    spent = now.user + now.system - used.user - used.system
    late = first_token_s()
    print(f"{spent:.3f} CPU s in 10 s; first token {1e3 * immediate:.0f} ms at once, {1e3 * late:.0f} ms after a rest")
    assert spent < 0.2
    assert late < 1.5 * immediate


def test_address_in_use_and_bad_model_are_one_line(process):
    """What cannot be served ends with status 2 and says why."""
    client, _ = process()
    for arguments, what in ((["demo", "--port", str(client.port)], "cannot listen"), (["/nowhere"], "/nowhere")):
        done = subprocess.run(
            [sys.executable, "-m", "coli", "serve", "--port", "0", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith("coli: error: ") and what in done.stderr
        assert "Traceback" not in done.stderr
