"""``coli serve``: one model behind the OpenAI API, until it is told to end."""

from __future__ import annotations

import argparse
import ipaddress
import socket
from typing import TYPE_CHECKING

from coli import settings
from coli.cli import common
from coli.errors import ColiError
from coli.log import logger

if TYPE_CHECKING:
    import uvicorn

HELP = (
    "Answer the OpenAI API over HTTP (chat, completions, models; /health, /metrics) and show a page at /. "
    "Ctrl-C ends it: running answers end with an error, heat is written; a second one ends it at once."
)

_SERVING = (
    "host", "port", "parallel", "queue", "prefix_cache", "prefix_every", "cors", "allow_host", "max_body",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)
    group = parser.add_argument_group("serving", "an API key is read from the environment variable COLI_API_KEY")
    for name in _SERVING:
        setting = settings.BY_NAME[name]
        assert setting.flag is not None
        default = "" if setting.default is None else f"default {setting.default}; "
        text = f"{setting.reason} ({default}environment {setting.env[0]})".replace("%", "%%")
        group.add_argument(setting.flag, metavar=name.upper(), help=text)
    common.add_loading(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal.  Raises the error that loading failed with."""
    try:
        from coli.server.app import make_app
        from coli.server.http import make_server
        from coli.server.service import Service
    except ModuleNotFoundError as error:
        raise ColiError(f"coli serve needs {error.name}; install it with: pip install 'coli[server]'") from None

    chosen = {name: settings.get(name, getattr(args, name)) for name in _SERVING}
    api_key = settings.get("api_key")
    server: uvicorn.Server
    service = Service(
        lambda: common.load_model(args),
        slots=chosen["parallel"],
        queue=chosen["queue"],
        prefix_bytes=chosen["prefix_cache"],
        prefix_every=chosen["prefix_every"],
        on_failure=lambda: setattr(server, "should_exit", True),
    )
    app = make_app(
        service,
        api_key=api_key,
        hosts=[*(chosen["allow_host"] or ()), chosen["host"]],
        origins=chosen["cors"] or (),
        max_body_bytes=chosen["max_body"],
    )
    listener = _listen(chosen["host"], chosen["port"])
    log = logger("serve")
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    log.info("http://%s:%d, API at /v1%s", shown, port, ", key required" if api_key else "")
    if not api_key and not ipaddress.ip_address(host).is_loopback:
        log.warning("other machines can reach this server and it asks for no key; set COLI_API_KEY")
    server = make_server(app)
    with listener:
        server.run(sockets=[listener])
    if service.failure is not None:
        raise service.failure
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; an error that names address and reason where there can be none."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except BaseException:
            listener.close()
            raise
        return listener
    except OSError as error:
        raise ColiError(f"cannot listen on {host} port {port} ({error.strerror}); choose --host or --port") from None
