"""The scaling curve of the page, in a process of its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.ui.test_form import made
from zsim.errors import InputError, NotSimulatedError
from zsim.specs.experiment.load import changed
from zsim.ui import curve as module
from zsim.ui.curve import Curves, curve

COUNTS = (8, 16)
posix = pytest.mark.skipif(os.name != "posix", reason="kills a process")


def test_another_process_computes_the_same_curve_and_says_the_same_mistakes(tmp_path: Path) -> None:
    """gpt2 has 1,024 positions."""
    curves, experiment = Curves(tmp_path / "there"), changed(made(), {"model.n_layer": 2})
    there = curves.upto(experiment, COUNTS, "weak")
    here = curve(experiment, COUNTS, "weak", tmp_path / "here")
    assert there.words == here.words
    assert there.figures["throughput"].to_plotly_json() == here.figures["throughput"].to_plotly_json()
    wrong = changed(made(), {"training.sequence_length": 8192})
    with pytest.raises(InputError, match="found 8192"):
        curves.upto(wrong, COUNTS, "weak")


@posix
def test_a_process_that_was_killed_is_replaced(tmp_path: Path) -> None:
    curves, experiment = Curves(tmp_path), changed(made(), {"model.n_layer": 2})
    curves.upto(experiment, COUNTS[:1], "weak")
    os.kill(curves.worker.pools[0].submit(os.getpid).result(), signal.SIGKILL)
    assert "GPUs" in curves.upto(experiment, COUNTS, "weak").words


@posix
def test_one_that_dies_again_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "curve", die)
    with pytest.raises(NotSimulatedError, match="died 2 times"):
        Curves(tmp_path).upto(made(), COUNTS, "weak")


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
