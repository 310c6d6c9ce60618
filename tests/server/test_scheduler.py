"""Many answers, one engine: the same texts, one pass a step, room, order, failure and leaving."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from server.serving import NO_THINKING, Stream, answering, broken, chat_body, joined, until

CHAT = "/v1/chat/completions"
PROMPTS = [f"Tell me the story of number {i}, and of the {'very ' * i}long road to it." for i in range(8)]


def texts_of(client, bodies):
    """The answers to bodies that are sent at the same moment."""
    start = threading.Barrier(len(bodies))

    def ask(body):
        start.wait()
        return client.post(CHAT, body).json["choices"][0]["message"]

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(ask, bodies))


def test_eight_streams_get_the_texts_that_each_has_alone(demo, demo_model):
    """Batched with seven others an answer is, to the character, that of `Model.chat`; so are sampled ones by seed."""
    bodies = [
        {**chat_body(prompt, max_tokens=40), **({"temperature": 0.9, "top_p": 0.9, "seed": i} if i % 2 else {})}
        for i, prompt in enumerate(PROMPTS)
    ]
    before = demo.stats()
    together = texts_of(demo, bodies)
    after = demo.stats()
    defaults = demo_model.sampling_defaults
    for body, message in zip(bodies, together, strict=True):
        sampling = {**defaults, **{k: body[k] for k in ("temperature", "top_p", "seed") if k in body}}
        alone = demo_model.chat(body["messages"], max_tokens=40, **sampling)
        content = "".join(alone)
        assert (message["content"], message.get("reasoning_content")) == (content, alone.reasoning)
    assert after["decode_passes"] - before["decode_passes"] < (after["tokens"] - before["tokens"]) / 2


def test_running_answers_share_one_pass_a_step(serve):
    """While eight answers run, every step is one pass with a row for each."""
    client = serve(answering("y" * 60, end=False), delay_s=0.002)
    texts_of(client, [chat_body(prompt, max_tokens=60, **NO_THINKING) for prompt in PROMPTS])
    decode = [rows for rows in client.engine.passes if all(n == 1 for n in rows)]
    assert max(len(rows) for rows in decode) == 8
    assert sum(len(rows) for rows in decode) < 8 * 60 and len(decode) < 3 * 60


def test_answers_go_on_between_the_pieces_of_a_long_prompt(serve):
    """A long prompt is taken in piece by piece; between two pieces every running answer gets a token."""
    client = serve(answering("y", end=False), delay_s=0.001)
    with client.open_stream(CHAT, chat_body("short", max_tokens=3000, stream=True)) as running:
        next(iter(running))
        client.post(CHAT, chat_body("long " * 400, max_tokens=1))
    pieces = [i for i, rows in enumerate(client.engine.passes) if len(rows) == 1 and rows[0] > 20]
    assert len(pieces) > 3
    assert all(b - a == 2 for a, b in zip(pieces[1:-1], pieces[2:-1], strict=False))


def test_queue_full_is_429_with_retry_after(serve):
    """What has no place in the queue is told when to come back; the others are answered."""
    client = serve(answering("y", end=False), delay_s=0.005, slots=1, queue=1)
    with client.open_stream(CHAT, chat_body("a", max_tokens=100, stream=True)) as first:
        next(iter(first))
        waiting = threading.Thread(target=client.post, args=(CHAT, chat_body("b", max_tokens=1)))
        waiting.start()
        until(lambda: client.stats()["waiting"] == 1)
        for stream in (False, True):
            answer = client.post(CHAT, chat_body("c", stream=stream))
            assert (answer.status, answer.json["error"]["code"]) == (429, "queue_full")
            assert 1 <= int(answer.headers["retry-after"]) <= 60
    waiting.join(5)
    assert not waiting.is_alive()
    assert client.stats()["refused"] == 2


def test_queue_of_zero_takes_what_finds_a_slot(serve):
    """With no room to wait, a request is answered where a slot is free and refused where none is."""
    client = serve(answering("y", end=False), delay_s=0.005, slots=1, queue=0)
    assert client.post(CHAT, chat_body("a", max_tokens=1)).status == 200
    with client.open_stream(CHAT, chat_body("a", max_tokens=200, stream=True)) as first:
        next(iter(first))
        until(lambda: client.stats()["running"] == 1)
        assert client.post(CHAT, chat_body("b", max_tokens=1)).status == 429


def test_client_leaving_the_queue_frees_its_place(serve):
    """A request whose client is gone before its turn is never computed."""
    client = serve(answering("y", end=False), delay_s=0.005, slots=1, queue=1)
    with client.open_stream(CHAT, chat_body("a", max_tokens=300, stream=True)) as first:
        next(iter(first))
        left = Stream(client.port, CHAT, chat_body("b", max_tokens=5, stream=True))
        until(lambda: client.stats()["waiting"] == 1)
        left.connection.sock.shutdown(socket.SHUT_RDWR)
        left.close()
        until(lambda: client.stats()["waiting"] == 0 and client.stats()["cancelled"] == 1)


def test_n_answers_share_one_prompt_and_differ_by_seed(demo):
    """n choices: the prompt is computed once, each choice is a run with the seed plus its index."""
    body = {**chat_body(PROMPTS[3], max_tokens=20, n=3, seed=7), "temperature": 1.0}
    answer = demo.post(CHAT, body).json
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == sum(
        demo.post(CHAT, {**body, "n": 1, "seed": 7 + i}).json["usage"]["completion_tokens"] for i in range(3)
    )
    streamed = demo.stream(CHAT, body)
    for i, choice in enumerate(answer["choices"]):
        alone = demo.post(CHAT, {**body, "n": 1, "seed": 7 + i}).json["choices"][0]
        assert alone["message"] == choice["message"]
        assert joined(streamed, i)["message"]["reasoning_content"] == choice["message"].get("reasoning_content")


# ---- leaving ------------------------------------------------------------------------------------------------


def test_client_leaving_a_stream_stops_it_within_a_token(serve, caplog):
    """The next request starts as on an idle server, and a line says cancelled."""
    caplog.set_level("INFO", "coli")
    client = serve(answering("y", end=False), delay_s=0.01, context=100_000)
    stream = Stream(client.port, CHAT, chat_body("go on", max_tokens=90_000, stream=True, **NO_THINKING))
    events = iter(stream)
    for _ in range(3):
        next(events)
    stream.connection.sock.shutdown(socket.SHUT_RDWR)
    stream.close()
    begin = time.monotonic()
    answer = client.chat("short", max_tokens=2)
    assert time.monotonic() - begin < 1
    assert answer["usage"]["completion_tokens"] == 2
    until(lambda: client.stats()["cancelled"] == 1 and client.stats()["running"] == 0)
    passes = len(client.engine.passes)
    time.sleep(0.05)
    assert len(client.engine.passes) == passes
    assert any("cancelled" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("stream", [False, True])
def test_client_leaving_in_prefill_stops_it_within_a_piece(serve, stream):
    """A prompt that nobody waits for is not computed further; its state so far is whole."""
    client = serve(answering("y"), delay_s=0.001, context=100_000)
    body = chat_body("word " * 4000, max_tokens=5, stream=stream)
    connection = socket.create_connection(("127.0.0.1", client.port))
    import json

    data = json.dumps(body).encode()
    connection.sendall(
        b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(data)) + data
    )
    until(lambda: len(client.engine.passes) > 1)
    connection.close()
    until(lambda: client.stats()["cancelled"] == 1, 2)
    assert sum(sum(rows) for rows in client.engine.passes) < 15_000
    assert client.chat("short", max_tokens=2)["usage"]["completion_tokens"] == 2


# ---- failing ------------------------------------------------------------------------------------------------


def test_failed_step_ends_the_job_that_caused_it_and_no_other(serve):
    """When a pass of several fails, each is tried alone; all but the culprit get the text of a run without it."""
    client = serve(answering("y" * 40), delay_s=0.002)
    bad = "poison"

    def fail(parts):
        for ids in parts:
            if bytes(i for i in ids if i < 256).count(bad.encode()) and ids[-10:] == [ord("y")] * 10:
                raise broken(ids)

    client.engine.fail = fail
    bodies = [chat_body(text, **NO_THINKING) for text in ("one", bad, "three", "four")]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda body: client.post(CHAT, body), bodies))
    assert [answer.status for answer in answers] == [200, 500, 200, 200]
    for answer in (answers[0], answers[2], answers[3]):
        assert answer.json["choices"][0]["message"]["content"] == "y" * 40
    assert client.stats()["running"] == 0


def test_unexpected_failure_of_the_engine_is_an_error_and_no_end(serve):
    """Whatever a pass raises becomes a 500 without inner detail; the server goes on."""
    client = serve(answering("ok"))

    def fail(parts):
        raise MemoryError("secret detail")

    client.engine.fail = fail
    answer = client.post(CHAT, chat_body("x"))
    assert (answer.status, answer.json["error"]["message"]) == (500, "internal error (MemoryError)")
    client.engine.fail = lambda parts: None
    assert client.post(CHAT, chat_body("x")).status == 200


def test_closing_tells_those_who_wait(serve):
    """A scheduler that ends answers what it still held with an error."""
    client = serve(answering("y", end=False), delay_s=0.005, context=100_000)
    with client.open_stream(CHAT, chat_body("x", stream=True)) as stream:
        events = iter(stream)
        next(events)
        client.serving.service.scheduler.close()
        rest = list(events)
    assert "the server is stopping" in rest[-2] and rest[-1] == "[DONE]"
