"""Answers of the page that are kept, and shared by those who ask at once."""

from __future__ import annotations

import gc
import threading
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.ui.test_form import made
from zsim.errors import InputError
from zsim.specs.experiment.load import change_experiment
from zsim.ui.answer import setting_token
from zsim.ui.app import Answers, make_app
from zsim.ui.form import Form, make_form
from zsim.ui.process.backend import Backend, curve
from zsim.ui.process.worker import Backends


def counted(result: Any) -> tuple[Answers, list[str]]:
    """Answers that `result` gives of a setting, and what happens: the settings that are simulated, and "end"
    where what is under way is ended."""
    happened: list[str] = []

    def answer(shown: Any, more: str) -> Any:
        happened.append(str(shown["size"]))
        return result(shown)

    return Answers(answer, lambda: happened.append("end")), happened


def test_a_setting_shown_again_is_not_simulated_again_and_the_oldest_is_let_go() -> None:
    """Three are kept: 1, 2, 3, again 1 is three simulations; 4 lets 1 go, so that 1 is a fifth. A new setting
    ends what is under way for the one before, one that is known does not."""
    answers, happened = counted(lambda shown: shown["size"])
    found: list[Any] = [answers.get({"size": size}, "") for size in (1, 2, 3, 1, 4, 1)]
    assert found == [1, 2, 3, 1, 4, 1]
    assert happened == ["end", "1", "end", "2", "end", "3", "end", "4", "end", "1"]


def test_who_asks_for_an_answer_that_is_under_way_waits_for_it() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(shown: Any) -> str:
        begun.set()
        assert go_on.wait(30)
        return "done"

    answers, happened = counted(slow)
    found: list[Any] = []
    answers.begin({"size": 1})
    assert begun.wait(30)
    second = threading.Thread(target=lambda: found.append(answers.get({"size": 1}, "")))
    second.start()
    go_on.set()
    second.join(30)
    assert (found, happened) == (["done"], ["end", "1"])


def test_what_failed_is_said_to_each_and_tried_anew() -> None:
    def wrong(shown: Any) -> Any:
        raise InputError("found 8192")

    answers, happened = counted(wrong)
    for _ in range(2):
        with pytest.raises(InputError, match="found 8192"):
            answers.get({"size": 8192}, "")
    assert answers.futures == {}
    assert happened.count("8192") == 2


def test_a_number_is_the_same_setting_as_the_browser_writes_it() -> None:
    """JavaScript has no 2.0."""
    assert setting_token({"a": 2.0, "b": 0.5}, "") == setting_token({"b": 0.5, "a": 2}, "")


# -- The page's server does not grow with the settings that it shows ---------------------------------------


PARTS = ("error", "stale", "answer", "figures", "asked", "views", "files")


def ask(client: Any, form: Form, dependency: Any, length: int) -> None:
    """Ask the page's server for a setting, as the browser does, on a thread of the request's own."""
    shown = {**form.initial, "training.sequence_length": length}
    outputs = [dict(zip(("id", "property"), name.rsplit(".", 1), strict=True))
               for name in dependency["output"].strip(".").split("...")]  # fmt: skip
    values = iter([*shown.values(), ""])
    content = {
        "output": dependency["output"], "outputs": outputs, "changedPropIds": [],
        "inputs": [{**one, "value": next(values)} for one in dependency["inputs"]],
        "state": [{**one, "value": None} for one in dependency["state"]],
    }  # fmt: skip
    answers: list[Any] = []
    request = Thread(
        target=lambda: answers.append(client.post("/_dash-update-component", json=content).get_json())
    )
    request.start()
    request.join()
    assert f"1 x {length:,} tokens" in str(answers[0]["response"]["answer"])


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def test_the_server_keeps_of_each_setting_its_numbers_alone(tmp_path: Path) -> None:
    """At most five objects a setting, of which one is the kept prediction (of at most 64); a simulated step
    has tens of thousands, and an answer's figures thousands."""
    experiment = change_experiment(made(), {"model.n_layer": 1})
    app, form = make_app(experiment, tmp_path), make_form(experiment)
    client = app.server.test_client()
    client.get("/_dash-layout")
    dependency = next(
        one for one in client.get("/_dash-dependencies").get_json()
        if one["output"].startswith("..error.children...results.className")
    )  # fmt: skip
    for length in range(100, 105):
        ask(client, form, dependency, length)
    before = objects()
    for length in range(105, 117):
        ask(client, form, dependency, length)
    assert objects() - before < 12 * 5


# -- The scaling curve of the page, computed in a process beside it ----------------------------------------


COUNTS = (8, 16)


def test_another_process_computes_the_same_curve_and_says_the_same_mistakes(tmp_path: Path) -> None:
    """gpt2 has 1,024 positions."""
    experiment = change_experiment(made(), {"model.n_layer": 2})
    form = make_form(experiment)
    backends = Backends(form, partial(Backend, form, tmp_path / "there"))
    there = backends.curve_worker.result("curve", form.initial, "", COUNTS, "weak")
    here = curve(experiment, COUNTS, "weak", tmp_path / "here")
    assert there.words == here.words
    assert there.figures["throughput"].to_plotly_json() == here.figures["throughput"].to_plotly_json()
    wrong = {**form.initial, "training.sequence_length": 8192}
    with pytest.raises(InputError, match="found 8192"):
        backends.curve_worker.result("curve", wrong, "", COUNTS, "weak")
