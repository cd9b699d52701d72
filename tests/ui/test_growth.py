"""The page's server does not grow with the settings that it shows."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.ui.test_form import made
from zsim.errors import InputError
from zsim.specs.experiment.load import change_experiment
from zsim.ui.app import make_app
from zsim.ui.form import Form, make_form
from zsim.ui.process.backend import Backend, curve
from zsim.ui.process.worker import Backends

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
