"""How large a step the page simulates."""

from __future__ import annotations

import pytest

from tests.ui.test_form import made
from zsim.errors import NotSimulatedError
from zsim.plan.make import make_plan
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.ui import prediction as size
from zsim.ui.prediction import check_size

STEPS = "training.gradient_accumulation_steps"


def test_a_step_of_too_many_ops_is_refused_with_the_bound_and_the_way_out() -> None:
    with pytest.raises(NotSimulatedError) as refused:
        check_size(resolve(change_experiment(made(), {STEPS: 2_000})))
    said = str(refused.value)
    assert said.startswith("training.gradient_accumulation_steps: 2,000 micro-batches are about 1,")
    assert "up to 1,000,000. With simulation.every_micro_batch = false" in said
    check_size(resolve(change_experiment(made(), {STEPS: 2_000, "simulation.every_micro_batch": False})))
    check_size(resolve(change_experiment(made(), {STEPS: 100})))


def test_ops_are_counted_from_plans_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count of 40 micro-batches is that of their plan: a bound at it passes, one below does not."""
    job = resolve(change_experiment(made(), {STEPS: 40}))
    ops = sum(len(program.ops) for program in make_plan(job).programs)
    monkeypatch.setattr(size, "MAX_OPS", ops)
    check_size(job)
    monkeypatch.setattr(size, "MAX_OPS", ops - 1)
    with pytest.raises(NotSimulatedError, match=f"{ops:,} ops"):
        check_size(job)
