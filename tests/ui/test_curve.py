"""The scaling curve of the page, computed in a process beside it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.ui.test_form import made
from zsim.errors import InputError
from zsim.specs.experiment.load import change_experiment
from zsim.ui.form import make_form
from zsim.ui.process.backend import Backend, curve
from zsim.ui.process.worker import Backends

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
