"""Steps that are large to simulate are bounded, and announced before."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

import zsim
from zsim.cli import app
from zsim.engine.micro_batches import simulate_step
from zsim.errors import InputError
from zsim.plan.make import make_plan
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.training.resolve import size_warning

PIPELINE: dict[str, Any] = {"parallelism": {"pipeline": 2, "schedule": "1f1b"}}
REFUSED = r"expected at most 50,000 blocks .*simulation\.every_micro_batch"


def job(micro_batches: int, **tables: Any) -> Job:
    given: dict[str, Any] = {
        "model": "llama-3-8b", "cluster": "dgx-h100", "nodes": 1, "strategy": {"kind": "fsdp2"},
        "training": {"gradient_accumulation_steps": micro_batches, "sequence_length": 512},
    }  # fmt: skip
    return resolve(zsim.Experiment(**{**given, **tables}))


def words(one: Job) -> str | None:
    every = one.simulation.every_micro_batch
    return size_warning(one.model, one.training, one.parallelism, every_micro_batch=every)


def test_a_step_of_many_blocks_is_announced_with_what_makes_it_shorter() -> None:
    """32 blocks: 78 micro-batches are 2,496, 79 are 2,528. Without a pipeline they repeat."""
    assert words(job(78, **PIPELINE)) is None
    assert words(job(79)) is None
    said = words(job(79, **PIPELINE))
    assert said is not None
    assert said.startswith(
        "32 blocks of 79 micro-batches are simulated one by one, in 252.80 MB to 2.28 GB of"
    )
    assert "simulation.every_micro_batch = false" in said
    assert words(job(1000, simulation={"every_micro_batch": False}, **PIPELINE)) is None
    deep = words(job(1, model={"extends": "llama-3-8b", "num_hidden_layers": 3000}))
    assert deep == "3,000 blocks are simulated one by one, in 300.00 MB to 2.70 GB of memory"


def test_more_blocks_than_any_machine_takes_are_refused_with_the_way_out() -> None:
    """50,000 at most: 1,562 micro-batches of 32."""
    assert words(job(1562, **PIPELINE)) is not None
    with pytest.raises(InputError, match=REFUSED):
        job(1563, **PIPELINE)
    few = job(1563, simulation={"every_micro_batch": False}, **PIPELINE)
    assert few.training.gradient_accumulation_steps == 1563


def test_micro_batches_that_repeat_are_simulated_however_many_and_planned_up_to_the_bound() -> None:
    few, many = (simulate_step(job(count)).seconds for count in (100, 10_000))
    assert many == pytest.approx(100 * few, rel=0.01)
    with pytest.raises(InputError, match=REFUSED):
        make_plan(job(10_000))


def test_the_command_says_so_on_stderr_before_it_simulates(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_args: Any, **_options: Any) -> Any:
        raise InputError("as far as the simulation")

    monkeypatch.setattr("zsim.api.simulate_step", stopped)
    told = {}
    for count in (2, 100):
        line = ["run", "--model", "llama-3-8b", "--cluster", "dgx-h100", "--nodes", "1"]
        line += ["--set", f"training.gradient_accumulation_steps={count}"]
        line += ["--set", "parallelism.pipeline=2", "--set", "strategy.kind=fsdp2"]
        told[count] = CliRunner().invoke(app, line)
    assert "note: 32 blocks of 100 micro-batches" in told[100].stderr
    assert told[100].stdout == ""
    assert "note:" not in told[2].stderr
