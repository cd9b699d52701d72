"""Typed settings mean what the dict with the same keys means."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import zsim
from zsim import frameworks
from zsim.specs.experiment.load import change_experiment

JOB: dict[str, Any] = {"model": "gpt2", "cluster": "dgx-h100", "nodes": 1}


@pytest.mark.parametrize(
    ("typed", "table"),
    [
        (zsim.Ddp(bucket_cap_mb=50), {"kind": "ddp", "bucket_cap_mb": 50}),
        (zsim.DeepSpeed(stage=3), {"kind": "deepspeed", "stage": 3}),
        (
            zsim.Fsdp1(sharding_strategy="SHARD_GRAD_OP"),
            {"kind": "fsdp1", "sharding_strategy": "SHARD_GRAD_OP"},
        ),
        (zsim.Fsdp2(replicate=2), {"kind": "fsdp2", "replicate": 2}),
        (zsim.Megatron(distributed_optimizer=True), {"kind": "megatron", "distributed_optimizer": True}),
        (zsim.ReferenceZero(stage=2), {"kind": "reference", "stage": 2}),
    ],
)
def test_a_typed_strategy_is_its_table(typed: Any, table: dict[str, Any]) -> None:
    """Also after a change of another key, which goes through the dict of what is set."""
    one = zsim.Experiment(**JOB, training=zsim.Training(micro_batch_size=2), strategy=typed)
    other = zsim.Experiment(**JOB, training={"micro_batch_size": 2}, strategy=table)
    assert one.model_dump(exclude_unset=True) == other.model_dump(exclude_unset=True)
    more = {"training.sequence_length": 128}
    assert change_experiment(one, more).model_dump() == change_experiment(other, more).model_dump()


def test_a_typed_setting_gives_the_same_step() -> None:
    tables: dict[str, Any] = {"parallelism": zsim.Parallelism(tensor=2), "strategy": zsim.Fsdp2()}
    one = zsim.simulate(zsim.Experiment(**JOB, **tables)).report
    other = zsim.simulate(
        zsim.Experiment(**JOB, parallelism={"tensor": 2}, strategy={"kind": "fsdp2"})
    ).report
    assert one.step_seconds == other.step_seconds


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: zsim.Fsdp2(replicat=3), "Fsdp2: unknown key 'replicat'; did you mean 'replicate'?"),  # type: ignore[call-arg]
        (lambda: zsim.Fsdp2(replicate=0), "Fsdp2: replicate: found 0, expected greater than 0"),
        (lambda: zsim.Ddp(kind="fsdp2"), "Ddp: kind: found 'fsdp2', expected 'ddp'"),
    ],
)
def test_a_mistake_is_one_paragraph(make: Any, said: str) -> None:
    with pytest.raises(zsim.InputError) as error:
        make()
    assert str(error.value) == said


def test_settings_complete_their_keys() -> None:
    """In a process that has made none of them yet, as a notebook's is."""
    code = "import inspect, zsim; print(*inspect.signature(zsim.Fsdp2).parameters)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"replicate", "reshard_after_forward"} <= set(run.stdout.split())


def test_settings_load_no_study() -> None:
    names = ", ".join(f"zsim.{name}" for name in frameworks.__all__)
    code = f"import sys, zsim; {names}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not [
        name for name in run.stdout.split() if name.startswith(("zsim.study", "zsim.goodput", "zsim.ui"))
    ]


def test_settings_vary_in_a_sweep() -> None:
    strategies = [zsim.Fsdp2(), zsim.Ddp()]
    found = zsim.sweep(
        JOB, {"strategy": strategies}, overrides={"training": zsim.Training(sequence_length=64)}, jobs=1
    )
    assert [row["status"] for row in found.rows] == ["ok", "ok"]
    assert found.rows[0]["step_seconds"] != found.rows[1]["step_seconds"]
