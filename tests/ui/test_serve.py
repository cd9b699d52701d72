"""Where the page listens, whom it answers, and what it says when it cannot."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ui.test_form import made
from zsim.errors import InputError
from zsim.ui import app as serve
from zsim.ui.app import make_app
from zsim.ui.words import run_safely

ZSIM = [sys.executable, "-c", "from zsim.cli import main; main()"]
SMALL = ["--model", "gpt2", "--gpus", "8"]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve.open_socket("127.0.0.1", 0) as place:
        server = serve.make_server(make_app(made(), tmp_path_factory.mktemp("ui")), place, "127.0.0.1")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield serve.address("127.0.0.1", place.getsockname()[1])
        server.shutdown()
        thread.join()


def test_the_page_says_that_it_fetches_nothing_from_elsewhere(address: str) -> None:
    with urllib.request.urlopen(address) as answer:
        policy, text = answer.headers["Content-Security-Policy"], answer.read().decode()
    assert policy.startswith("default-src 'self';")
    assert "connect-src 'self'" in policy
    assert "://" not in text.replace("http://www.w3.org", "")


@pytest.mark.parametrize("name", ["evil.example", "evil.example:80", "127.0.0.1.evil.example"])
def test_another_name_for_this_machine_is_not_answered(address: str, name: str) -> None:
    """A page elsewhere may point its own name at 127.0.0.1 and would then read ours."""
    request = urllib.request.Request(address, headers={"Host": name})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request)


def test_a_page_from_elsewhere_cannot_have_us_simulate(address: str) -> None:
    request = urllib.request.Request(f"{address}_dash-layout", headers={"Origin": "https://evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request)
    own = urllib.request.Request(f"{address}_dash-layout", headers={"Origin": address.rstrip("/")})
    with urllib.request.urlopen(own) as answer:
        assert answer.status == 200


def test_what_another_page_asks_for_is_not_answered_but_a_link_is(address: str) -> None:
    """A browser says with every request whose page asks; a person may follow a link here."""
    foreign = {"Sec-Fetch-Site": "cross-site"}
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(urllib.request.Request(f"{address}_dash-layout", headers=foreign))
    with urllib.request.urlopen(urllib.request.Request(address, headers=foreign)) as answer:
        assert answer.status == 200


def test_a_request_that_is_too_large_is_not_read(address: str) -> None:
    """Its length is said before its content."""
    place = http.client.HTTPConnection(address.removeprefix("http://").rstrip("/"))
    place.putrequest("POST", "/_dash-update-component")
    place.putheader("Content-Type", "application/json")
    place.putheader("Content-Length", str(serve.MAX_REQUEST + 1))
    place.endheaders()
    assert place.getresponse().status == 413
    place.close()


@pytest.mark.parametrize(
    ("name", "host", "is_own"),
    [("localhost", "127.0.0.1", True), ("evil.example", "127.0.0.1", False), ("10.0.0.5", "127.0.0.1", False),
     ("evil.example", "0.0.0.0", False), ("10.0.0.5", "0.0.0.0", True), ("::1", "::", True),
     ("box.example", "box.example", True), (socket.gethostname().lower(), "0.0.0.0", True)],
)  # fmt: skip
def test_only_names_that_nobody_else_can_point_here_are_its_own(name: str, host: str, is_own: bool) -> None:
    assert serve.is_local_name(name, host) is is_own


@pytest.mark.parametrize("name", ["localhost", "localhost:1", "[::1]:80", "127.0.0.1"])
def test_this_machines_own_names_are_answered(address: str, name: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(address, headers={"Host": name})) as answer:
        assert answer.status == 200


def test_a_port_in_use_is_one_sentence_and_exit_code_2() -> None:
    with serve.open_socket("127.0.0.1", 0) as place:
        port = place.getsockname()[1]
        done = subprocess.run([*ZSIM, "ui", *SMALL, "--port", str(port)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"zsim: --port {port}: is in use on 127.0.0.1; expected a free one")
    assert done.stderr.count("\n") == 1


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(InputError, match=r"--host 192\.0\.2\.1: cannot be listened on"):
        serve.open_socket("192.0.2.1", 0)


def test_without_dash_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'zsim\[ui\]'"):
        serve.require_dash()


def test_a_wrong_experiment_ends_the_command_before_it_listens(tmp_path: Path) -> None:
    done = subprocess.run([*ZSIM, "ui", *SMALL, "--set", "nodes=0"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "nodes: found 0" in done.stderr
    assert done.stdout == ""


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_it_listens_here_alone_and_ctrl_c_ends_it_with_0() -> None:
    done = subprocess.Popen(
        [*ZSIM, "ui", *SMALL, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert done.stdout is not None
    first = done.stdout.readline()
    assert first.startswith("page    http://127.0.0.1:")
    done.send_signal(signal.SIGINT)
    _, errors = done.communicate(timeout=60)
    assert (done.returncode, errors) == (0, "")


def test_a_host_that_others_reach_is_warned_of() -> None:
    done = subprocess.Popen(
        [*ZSIM, "ui", *SMALL, "--port", "0", "--host", "0.0.0.0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert done.stdout is not None
    done.stdout.readline()
    done.send_signal(signal.SIGINT)
    _, errors = done.communicate(timeout=60)
    assert errors.startswith("zsim: warning: --host 0.0.0.0: anyone who reaches this machine's port ")


def test_a_mistake_of_ours_is_no_traceback_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    nothing: dict[str, str] = {}
    found, text = run_safely(lambda: nothing["missing"])
    assert found is None
    assert text == "zsim made a mistake here (KeyError); the terminal has the details"
    assert "Traceback" in capsys.readouterr().err
