"""The page's callbacks: when a setting changes, the experiment is simulated and the page updated."""

from __future__ import annotations

import errno
import ipaddress
import json
import logging
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from zsim.errors import InputError
from zsim.extras import require
from zsim.files import TEMPLATES
from zsim.specs.experiment.tables import Experiment
from zsim.ui.answer import Answer, Predictions, setting_token
from zsim.ui.field import KIND, STAGE, TOKENS, Field
from zsim.ui.files import add_uploads, offer_files, show_animation
from zsim.ui.form import Form, make_form
from zsim.ui.layout import ANIMATION, COMPARED, CURVE, MAIN, RUN, field_id, layout, row_id
from zsim.ui.process.backend import Backend
from zsim.ui.process.worker import Backends
from zsim.ui.recordings import show_recorded
from zsim.ui.settings import compare_settings, keep_state, offer_remedies
from zsim.ui.whole_run import show_run
from zsim.ui.words import answer_words, files_and_notes, run_safely, view_buttons

_MAX_ANSWERS = 3  # each with its figures


def make_app(experiment: Experiment, folder: Path) -> Any:
    """The Dash application that starts with `experiment`. `folder` keeps points of scaling curves.

    Raises InputError where the experiment cannot be resolved.
    """
    from dash import Dash

    form = make_form(experiment)
    app = Dash(
        "zsim",
        title="zsim",
        update_title="",
        serve_locally=True,
        assets_folder=str(Path(__file__).parent / "assets"),
        eager_loading=True,  # lists that are loaded late on a busy machine are sometimes never shown
        index_string=_index_page(),
    )
    app.layout = lambda: layout(form)
    outcomes, backends = Predictions(), Backends(form, partial(Backend, form, folder))
    answers = Answers(
        lambda field_values, other_settings: backends.answer_worker.result(
            "answer", field_values, other_settings
        ),
        backends.end,
    )
    answers.begin(form.initial)
    _answer(app, form, answers, outcomes)
    keep_state(app, form)
    compare_settings(app, backends, outcomes)
    offer_remedies(app, backends)
    add_uploads(app, backends)
    show_recorded(app, backends)
    _draw(app)
    _curve(app, backends)
    show_animation(app, backends)
    show_run(app, backends)
    offer_files(app, backends)
    return app


def _index_page() -> str:
    """Dash's index page, with the placeholders that Dash fills in."""
    import jinja2

    template_folder = Path(__file__).parent / "templates"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template_folder, TEMPLATES]), undefined=jinja2.StrictUndefined
    )
    return environment.get_template("index.html.j2").render()


def _answer(app: Any, form: Form, answers: Answers, outcomes: Predictions) -> None:
    from dash import Input, Output, State, no_update

    keys = list(form.fields)
    numbers = [key for key in keys if form.fields[key].choices is None]

    @app.callback(  # type: ignore[untyped-decorator]
        {
            "error": Output("error", "children"),
            "stale": Output("results", "className"),
            "answer": Output("answer", "children"),
            "figures": Output("figures", "data"),
            "asked": Output("asked", "data"),
            "views": Output("views", "children"),
            "files": Output("files", "children"),
            "resolved": [Output(field_id(key), "placeholder") for key in numbers],
        },
        [Input(field_id(key), "value") for key in keys],
        Input("applied", "data"),
        State("asked", "data"),
        State("named", "data"),
        running=[(Output("shell", "className"), "busy", "")],
    )  # fmt: skip
    def update(*arguments: Any) -> dict[str, Any]:
        *values, other_settings, last_request, named = arguments
        field_values = dict(zip(form.fields, values, strict=True))
        for key, setting in form.fields.items():
            if setting.choices is not None and field_values[key] is None:
                field_values[key] = (named or {}).get(key)
        page_answer, error = run_safely(answers.get, field_values, other_settings or "")
        if page_answer is None:
            untouched = dict.fromkeys(("answer", "figures", "asked", "views", "files"), no_update)
            return {"error": error, "stale": "stale", **untouched, "resolved": [no_update] * len(numbers)}
        outcomes.store(setting_token(field_values, other_settings or ""), page_answer.outcome)
        request = {
            "shown": field_values, "more": other_settings or "", "counts": list(page_answer.counts),
            "fits": page_answer.has_room,
        }  # fmt: skip
        return {
            "error": "",
            "stale": "",
            "answer": answer_words(page_answer, last_request),
            "figures": {name: figure.to_plotly_json() for name, figure in page_answer.figures.items()},
            "asked": {
                **request,
                "token": json.dumps(request, sort_keys=True, default=str),
                "tokens_per_second": page_answer.tokens_per_second,
                "is_shared": page_answer.outcome.is_shared,
            },
            "views": view_buttons(page_answer.views),
            "files": list(files_and_notes(page_answer)),
            "resolved": [page_answer.resolved.get(key, "") for key in numbers],
        }

    switches = [field for field in form.fields.values() if field.opens]
    rows = [
        field
        for field in form.fields.values()
        if field.kinds
        or field.is_of_run
        or any(field.key.startswith(f"{switch.opens}.") for switch in switches)
    ]

    @app.callback(  # type: ignore[untyped-decorator]
        [Output(row_id(field.key), "hidden") for field in rows],
        Input(field_id(KIND), "value"),
        Input(field_id(STAGE), "value"),
        Input(field_id(TOKENS), "value"),
        *(Input(field_id(switch.key), "value") for switch in switches),
    )
    def hide(kind: str, stage: str, tokens: Any, *switched: Any) -> list[bool]:
        kind_and_stage = form.fields[KIND].read(kind), form.fields[STAGE].read(stage)
        has_run = form.has_run({TOKENS: tokens})
        values = {switch.key: value for switch, value in zip(switches, switched, strict=True)}

        def is_shown(field: Field) -> bool:
            if field.is_of_run:
                return has_run
            return field.is_available(*kind_and_stage) and form.is_open(field.key, values)

        return [not is_shown(field) for field in rows]


def _draw(app: Any) -> None:
    """Apply the page's colours to figures, in the browser."""
    from dash import ClientsideFunction, Input, Output

    for names, store in (
        (MAIN, "figures"),
        (CURVE, "curve"),
        (ANIMATION, "film"),
        (RUN, "run"),
        (COMPARED, "recorded"),
    ):
        outputs = [Output(f"plot-{name}", "figure") for name in names]
        outputs += [Output(f"plot-{name}", "style") for name in names]
        outputs += [Output(f"box-{name}", "hidden") for name in names]
        app.clientside_callback(ClientsideFunction("zsim", "draw"), outputs, Input(store, "data"))
    app.clientside_callback(
        "(recorded) => [!recorded, recorded ? recorded.words : '']",
        Output("card-recorded", "hidden"),
        Output("recorded-words", "children"),
        Input("recorded", "data"),
    )
    devices = [name.removeprefix("waterfall-") for name in MAIN if name.startswith("waterfall-")]
    cards = [Output(f"card-{device}", "hidden") for device in devices]
    app.clientside_callback(ClientsideFunction("zsim", "cards"), cards, Input("figures", "data"))


def _curve(app: Any, backends: Backends) -> None:
    from dash import ClientsideFunction, Input, Output, State

    app.clientside_callback(
        ClientsideFunction("zsim", "next"),
        Output("wanted", "data"),
        Input("tick", "n_intervals"),
        State("asked", "data"),
        State("mode", "value"),
        State("curve", "data"),
        State("wanted", "data"),
    )

    @app.callback(  # type: ignore[untyped-decorator]
        Output("curve", "data"),
        Output("curve-words", "children"),
        Input("wanted", "data"),
        State("asked", "data"),
        prevent_initial_call=True,
    )
    def extend(target: Mapping[str, Any], request: Mapping[str, Any]) -> tuple[Any, str]:
        counts = request["counts"][: target["number"]]
        arguments = request["shown"], request["more"], counts, target["mode"]
        scaling_curve, error = run_safely(backends.curve_worker.result, "curve", *arguments)
        figures = (
            {}
            if scaling_curve is None
            else {name: f.to_plotly_json() for name, f in scaling_curve.figures.items()}
        )
        return {**figures, "done": target}, error if scaling_curve is None else scaling_curve.words


@dataclass(frozen=True)
class Answers:
    """The answer under way and the last ones done, by setting.

    What is shown again is not simulated again, and a request for an answer that is under way waits for it.
    The first is simulated while the browser still starts.
    """

    simulate: Callable[[Mapping[str, Any], str], Answer]
    """Simulates a setting."""
    end: Callable[[], None]
    """Ends all that is under way for the setting before."""
    futures: dict[str, Future[Answer]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, field_values: Mapping[str, Any], other_settings: str) -> Answer:
        """The answer of a setting. Raises as `simulate` does."""
        token = setting_token(field_values, other_settings)
        with self.lock:
            future = self.futures.get(token)
            new_future: Future[Answer] | None = None
            if future is None:
                self.end()
                future = new_future = self.futures[token] = Future()
            while len(self.futures) > _MAX_ANSWERS:
                self.futures.pop(next(iter(self.futures)))
        if new_future is not None:
            try:
                new_future.set_result(self.simulate(field_values, other_settings))
            except BaseException as error:
                new_future.set_exception(error)
                with self.lock:
                    if self.futures.get(token) is new_future:
                        self.futures.pop(token)
        return future.result()

    def begin(self, initial: Mapping[str, Any]) -> None:
        """Simulate what the page starts with, concurrently."""
        threading.Thread(target=run_safely, args=(lambda: self.get(initial, ""),), daemon=True).start()


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
        if not is_local_name(urlsplit(f"//{request.host}").hostname or "", host):
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
