"""Answers of the page that are kept, and shared by those who ask at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from zsim.errors import InputError
from zsim.ui.app import Answers
from zsim.ui.prediction import setting_token


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
