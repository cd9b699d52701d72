"""Serve the page on a port of this machine."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from zsim.errors import InputError
from zsim.extras import require
from zsim.specs.experiment.tables import Experiment

_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' "
    "data: blob:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
MAX_REQUEST = 64_000_000  # bytes; the largest trace that is taken is 40 MB as a browser sends it
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def require_dash() -> None:
    """Raise InputError where Dash is not installed."""
    require("dash", "zsim ui")


def serve(experiment: Experiment, host: str, port: int) -> None:
    """Serve until Ctrl-C. Raises InputError for a port or an address that is not available."""
    require_dash()
    from zsim.ui.app import make_app

    with tempfile.TemporaryDirectory(prefix="zsim-ui-") as folder, open_socket(host, port) as listener:
        server = make_server(make_app(experiment, Path(folder)), listener, host)
        bound_port = listener.getsockname()[1]
        try:
            if host not in LOOPBACK:
                print(
                    f"zsim: warning: --host {host}: anyone who reaches this machine's port {bound_port} can "
                    "run simulations on it; there is no password",
                    file=sys.stderr,
                )
            print(f"page    {address(host, bound_port)}   (Ctrl-C ends it)", flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def address(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens on the address. `with` closes it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise InputError(
                f"--port {port}: is in use on {host}; expected a free one, e.g. --port {port + 1}, or 0 "
                "for any"
            ) from None
        if error.errno == errno.EACCES:
            raise InputError(f"--port {port}: is not yours to take; expected one above 1023") from None
        raise InputError(f"--host {host}: cannot be listened on: {error.strerror or error}") from None
    return listener


def make_server(app: Any, listener: socket.socket, host: str) -> Any:
    """werkzeug's server for `app` on a socket that is listening already."""
    from werkzeug.serving import make_server as werkzeug_server

    guard(app.server, host)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    port = listener.getsockname()[1]
    return werkzeug_server(host, port, app.server, threaded=True, fd=listener.fileno())


def guard(server: Any, host: str) -> None:
    """Answer only requests to this machine's names and from the page itself, and allow the page to load
    nothing from elsewhere.

    A page from elsewhere could point its name at 127.0.0.1, or send a request here.
    """
    from flask import Response, request

    server.config["MAX_CONTENT_LENGTH"] = MAX_REQUEST

    @server.before_request  # type: ignore[untyped-decorator]
    def check_request() -> Response | None:
        origin = request.headers.get("Origin")
        if not is_local_name(_host_name(request.host), host):
            return Response("zsim ui answers to this machine's own names only\n", 403, mimetype="text/plain")
        is_foreign = origin is not None and urlsplit(origin).netloc != request.host
        is_link = request.method == "GET" and request.path == "/"
        if not is_link and request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site"):
            is_foreign = True  # asked for by another page, whatever it says of itself
        if is_foreign:
            return Response("zsim ui answers to its own page only\n", 403, mimetype="text/plain")
        return None

    @server.after_request  # type: ignore[untyped-decorator]
    def add_headers(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = _POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response


def is_local_name(name: str, host: str) -> bool:
    """Whether a request to `name` can be meant for a page on `host`.

    A page elsewhere may have a name that points here, but not an address, which counts with another `--host`,
    as the machine's name does.
    """
    if name in LOOPBACK or name == host:
        return True
    if host in LOOPBACK:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in (socket.gethostname().lower(), socket.getfqdn().lower())
    return True


def _host_name(address: str) -> str:
    """The host in "host:port", "host" or "[::1]:port"."""
    return urlsplit(f"//{address}").hostname or ""
