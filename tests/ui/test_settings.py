"""Whole settings: pinned, set side by side, mended where they do not fit, taken along."""

from __future__ import annotations

import csv
import gzip
import io
import json
from typing import Any

import pytest

from tests.ui.test_form import made
from zsim.engine.micro_batches import simulate_step
from zsim.specs.experiment.resolve import resolve
from zsim.ui.answer import Predictions, answer, differences, remedy_settings
from zsim.ui.files import file_content
from zsim.ui.form import make_form
from zsim.ui.settings import MAX_PINS, add_pin, apply_remedy, ratio_words, remove_pin

MICRO_BATCH = "training.micro_batch_size"


def asked(**shown: Any) -> dict[str, Any]:
    return {"shown": shown, "more": ""}


def test_a_setting_is_pinned_once_and_there_is_an_end() -> None:
    pins = add_pin(add_pin([], asked(a=1)), asked(a=1))
    assert pins == [asked(a=1)]
    for number in range(2, 20):
        pins = add_pin(pins, asked(a=number))
    assert len(pins) == MAX_PINS
    assert remove_pin(pins, 0)[0] == asked(a=2)


def test_only_settings_that_differ_are_told() -> None:
    form = make_form(made())
    other = {**form.initial, MICRO_BATCH: 4}
    assert dict(differences(form.fields, [(form.initial, ""), (other, "")])) == {
        "Micro-batch sequences per GPU": ["left open", "4"]
    }
    same = [(form.initial, ""), (form.initial, "training.expandable_segments = true")]
    assert dict(differences(form.fields, same)) == {
        "Other settings": ["none", "training.expandable_segments = true"]
    }


def test_what_is_kept_of_settings_has_bounds() -> None:
    """Of 100 settings the numbers of the last 64 and the steps of the last three."""
    outcomes, found, step = Predictions(), answer(made()).outcome, simulate_step(resolve(made()))
    for number in range(100):
        outcomes.store(str(number), found, step)
    assert list(outcomes.predictions) == [str(number) for number in range(36, 100)]
    assert list(outcomes.steps) == ["97", "98", "99"]


def test_a_small_difference_is_none_that_zsim_can_tell() -> None:
    assert ratio_words(130.0, 100.0, is_shared=False) == "+30.0 %"
    assert ratio_words(101.0, 100.0, is_shared=False) == "+1.0 %: no difference that zsim can tell"


def test_an_outcome_is_the_answers_and_is_simulated_once() -> None:
    form, outcomes = make_form(made()), Predictions()
    found = outcomes.get_prediction(form, form.initial, "")
    assert found == answer(made()).outcome
    assert outcomes.get_prediction(form, form.initial, "") is found


def test_what_does_not_fit_is_mended_by_its_own_switches() -> None:
    """Optimizer states of 7 billion parameters, 12 bytes each, fit no GPU of 80 GB; each change that is
    offered is made on the page, and the job fits."""
    experiment = made(model="llama-2-7b", nodes=None, gpus=1, strategy={"kind": "fsdp2"})
    form, found = make_form(experiment), answer(experiment)
    assert found.fit.verdict.word == "does not fit"
    offered = remedy_settings(experiment)
    assert offered
    for overrides in offered.values():
        changed = form.experiment(*apply_remedy(form, form.initial, "", overrides))
        assert resolve(changed)
        assert answer(changed).fit.verdict.word == "fits"


def test_a_change_without_a_field_is_a_line_and_replaces_the_line_before() -> None:
    form = make_form(made())
    shown, more = apply_remedy(form, form.initial, "training.loss_chunks = 2\n", {"training.loss_chunks": 8})
    assert shown == dict(form.initial)
    assert more == "training.loss_chunks = 8"


@pytest.fixture(scope="module")
def small() -> Any:
    return made(nodes=1, strategy={"kind": "fsdp2"})


def test_the_answer_can_be_taken_as_json_csv_and_trace(small: Any) -> None:
    report = json.loads(file_content(small, "report.json"))
    rows = list(csv.DictReader(io.StringIO(file_content(small, "collectives.csv").decode())))
    trace = json.loads(gzip.decompress(file_content(small, "trace.json.gz")))
    assert [row["kind"] for row in rows] == [row["kind"] for row in report["collectives"]]
    assert [int(row["bytes"]) for row in rows] == [row["bytes"] for row in report["collectives"]]
    assert trace["traceEvents"]
