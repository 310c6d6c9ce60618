"""Key, host names, origins, sizes and slow clients."""

from __future__ import annotations

import errno
import socket
import time
from types import SimpleNamespace

import pytest
from server.serving import answering, chat_body, until

from coli.server import doors, http, sse

CHAT = "/v1/chat/completions"
KEY = {"Authorization": "Bearer s3cret"}
PAGE = "https://page.example"
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


def allowed(answer) -> str | None:
    return answer.headers.get("access-control-allow-origin")


def test_preflight_with_a_key_set(serve, caplog):
    """C40: the preflight needs no key; the requests do, and their refusals carry CORS headers; the key is in no log."""
    caplog.set_level("DEBUG")
    client = serve(answering("ok"), app={"api_key": "s3cret", "origins": [PAGE]})
    preflight = client.request("OPTIONS", CHAT, headers=PREFLIGHT)
    assert 200 <= preflight.status < 300
    assert allowed(preflight) == PAGE
    named = preflight.headers["access-control-allow-headers"].lower()
    assert "authorization" in named and "content-type" in named
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "s3cret"},
        {"Authorization": "Basic s3cret"},
    ):
        answer = client.post(CHAT, chat_body("x"), headers={"Origin": PAGE, **headers})
        assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key")
        assert allowed(answer) == PAGE
    answer = client.post(CHAT, chat_body("x", max_tokens=1), headers={"Origin": PAGE, **KEY})
    assert (answer.status, allowed(answer)) == (200, PAGE)
    assert not [record for record in caplog.records if "s3cret" in record.getMessage()]


def test_key_guards_everything_but_the_page_and_health(serve):
    """Statistics, ids and plans are as closed as the answers."""
    client = serve(answering("ok"), app={"api_key": "s3cret"})
    for path in ("/v1/models", "/metrics", "/coli/plan", "/coli/stats", "/openapi.json", "/nowhere"):
        assert client.get(path).status == 401, path
    for path in ("/", "/health"):
        assert client.get(path).status == 200, path
    assert client.get("/v1/models", headers=KEY).status == 200


def test_origins_off_the_list_are_refused(serve):
    """Without a list no page elsewhere gets CORS headers or an answer; the server's own page does."""
    client = serve(answering("ok"))
    preflight = client.request("OPTIONS", CHAT, headers=PREFLIGHT)
    assert allowed(preflight) is None
    for origin in (PAGE, "null", "http://localhost:1", f"https://127.0.0.1.evil.example:{client.port}"):
        answer = client.post(CHAT, chat_body("x"), headers={"Origin": origin})
        assert (answer.status, answer.json["error"]["code"]) == (403, "origin_not_allowed")
        assert allowed(answer) is None
    own = {"Origin": f"http://127.0.0.1:{client.port}"}
    assert client.post(CHAT, chat_body("x", max_tokens=1), headers=own).status == 200


def test_host_names_that_could_be_rebound_are_refused(serve):
    """Addresses and localhost pass; another name only where it is listed."""
    client = serve(answering("ok"), app={"hosts": ["coli.example"]})
    for host, status in (
        ("localhost:8080", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("192.168.1.7:8080", 200),
        ("coli.example", 200), ("COLI.example:99", 200), ("evil.example", 403), ("localhost.evil.example", 403),
    ):  # fmt: skip
        assert client.get("/health", headers={"Host": host}).status == status, host


def test_bodies_over_the_limit_are_413(serve):
    """By their stated length before a byte is read, or by their bytes where none is stated."""
    client = serve(answering("ok"), app={"max_body_bytes": 2000})
    assert client.post(CHAT, chat_body("x" * 3000)).status == 413
    with socket.create_connection(("127.0.0.1", client.port), 5) as raw:
        raw.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" % CHAT.encode())
        raw.sendall(b"800\r\n" + b"x" * 0x800 + b"\r\n")
        assert b" 413 " in raw.recv(200)
    assert client.post(CHAT, chat_body("x", max_tokens=1)).status == 200


def test_body_that_does_not_come_is_408(serve, monkeypatch):
    """A client that sends its body byte by byte holds no place for long."""
    monkeypatch.setattr(doors, "BODY_TIMEOUT_S", 0.1)
    client = serve(answering("ok"))
    with socket.create_connection(("127.0.0.1", client.port), 5) as raw:
        raw.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{" % CHAT.encode())
        assert b" 408 " in raw.recv(200)


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\nHost: loc"])
def test_headers_that_do_not_come_close_the_connection(serve, monkeypatch, sent):
    """Neither an idle new connection nor a half-sent head is kept."""
    monkeypatch.setattr(http, "HEADERS_TIMEOUT_S", 0.1)
    client = serve(answering("ok"))
    with socket.create_connection(("127.0.0.1", client.port), 5) as raw:
        raw.sendall(sent)
        begin = time.monotonic()
        assert raw.recv(100) == b""
        assert time.monotonic() - begin < 2


def test_client_that_does_not_read_is_given_up(serve, monkeypatch):
    """A stream into a full socket ends after the send timeout, and its answer with it."""
    monkeypatch.setattr(sse, "SEND_TIMEOUT_S", 0.2)
    client = serve(answering("y", end=False), context=400_000)
    import json

    body = json.dumps(chat_body("x", stream=True, logprobs=True, top_logprobs=20, max_tokens=300_000)).encode()
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", client.port))
        raw.sendall(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body
        )
        until(lambda: client.stats()["running"] == 1)
        until(lambda: client.stats()["cancelled"] == 1, 20)
    assert client.post(CHAT, chat_body("x", max_tokens=1)).status == 200


def test_connections_beyond_the_open_files_are_one_line(caplog):
    """Not a traceback for each try; anything else the event loop complains of goes its usual way."""
    complaints, usual = http._Complaints(), []
    loop = SimpleNamespace(time=lambda: 100.0 + len(usual), default_exception_handler=usual.append)
    with caplog.at_level("WARNING"):
        for number in (errno.EMFILE, errno.ENFILE, errno.EMFILE):
            complaints(loop, {"message": "socket.accept() out of system resource", "exception": OSError(number, "full")})
    assert 1 == sum("ulimit -n" in record.message for record in caplog.records) and not usual
    complaints(loop, {"message": "a task failed", "exception": ValueError("x")})
    assert ["a task failed"] == [context["message"] for context in usual]


def test_server_may_open_as_many_files_as_the_system_lets_it(monkeypatch):
    """The soft limit, 1,024 as a rule, is raised to the hard one."""
    asked = []
    monkeypatch.setattr(http.resource, "getrlimit", lambda what: (1024, 4096))
    monkeypatch.setattr(http.resource, "setrlimit", lambda what, limits: asked.append((what, limits)))
    http._allow_files()
    assert [(http.resource.RLIMIT_NOFILE, (4096, 4096))] == asked
