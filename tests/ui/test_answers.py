"""Answers of the page that are kept, and shared by those who ask at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.ui.test_form import made
from zsim.errors import InputError
from zsim.ui import answers as kept
from zsim.ui.answers import Answers
from zsim.ui.form import form_of
from zsim.ui.prediction import token_of


def counted(monkeypatch: pytest.MonkeyPatch, result: Any) -> list[Any]:
    """The experiments that are simulated from now on, each with `result` as its answer."""
    asked: list[Any] = []

    def answer(experiment: Any) -> Any:
        asked.append(experiment)
        return result(experiment)

    monkeypatch.setattr(kept, "answer", answer)
    return asked


def turned(answers: Answers, size: int) -> dict[str, Any]:
    return {**answers.form.initial, "training.micro_batch_size": size}


def test_a_setting_shown_again_is_not_simulated_again_and_the_oldest_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three are kept: 1, 2, 3, again 1 is three simulations; 4 lets 1 go, so that 1 is a fifth."""
    asked = counted(monkeypatch, lambda experiment: experiment.training.micro_batch_size)
    answers = Answers(form_of(made()))
    found: list[Any] = [answers.of(turned(answers, size), "") for size in (1, 2, 3, 1, 4, 1)]
    assert found == [1, 2, 3, 1, 4, 1]
    assert [one.training.micro_batch_size for one in asked] == [1, 2, 3, 4, 1]


def test_who_asks_for_an_answer_that_is_under_way_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(experiment: Any) -> str:
        begun.set()
        assert go_on.wait(30)
        return "done"

    asked = counted(monkeypatch, slow)
    answers = Answers(form_of(made()))
    found: list[Any] = []
    answers.begin()
    assert begun.wait(30)
    second = threading.Thread(target=lambda: found.append(answers.of(answers.form.initial, "")))
    second.start()
    go_on.set()
    second.join(30)
    assert (found, len(asked)) == (["done"], 1)


def test_what_failed_is_said_to_each_and_tried_anew() -> None:
    answers = Answers(form_of(made()))
    for _ in range(2):
        with pytest.raises(InputError, match="found 8192"):
            answers.of({**answers.form.initial, "training.sequence_length": 8192}, "")
    assert answers.kept == {}


def test_a_number_is_the_same_setting_as_the_browser_writes_it() -> None:
    """JavaScript has no 2.0."""
    assert token_of({"a": 2.0, "b": 0.5}, "") == token_of({"b": 0.5, "a": 2}, "")
