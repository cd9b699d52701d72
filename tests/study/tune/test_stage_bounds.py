"""Bounds of steps with model parallelism never exceed the simulation."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

import zsim
from tests.study.tune.conftest import tiny
from tests.study.tune.test_degrees import with_degrees
from zsim.engine.micro_batches import simulate_step
from zsim.specs.experiment.resolve import resolve
from zsim.study.tune.bounds import Bounds

WIDE = {"n_embd": 4096, "n_head": 32, "n_layer": 8}  # its kernels take longer than the host needs
ULYSSES = {
    "kind": "deepspeed",
    "config": {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
    },
}
_SLACK = 0.995  # of the search


def grid() -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """(degrees, strategy, training), on 16 GPUs."""
    degrees: list[dict[str, Any]] = [
        {},
        {"tensor": 4, "sequence_parallel": True},
        {"pipeline": 4},
        {"tensor": 2, "pipeline": 2, "virtual_stages": 2, "sequence_parallel": True},
        {"tensor": 2, "pipeline": 4, "context": 2},
    ]
    strategies = [
        {"distributed_optimizer": True},
        {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        {"overlap_grad_reduce": True},
        {"distributed_optimizer": True, "fsdp_sharding": "optim_grads_params", "overlap_grad_reduce": True},
        {"distributed_optimizer": True, "precision_aware_optimizer": True, "exp_avg_dtype": "bf16"},
    ]
    trainings = [{}, {"activation_checkpointing": "full", "gradient_clipping": 0.0}]
    return list(product(degrees, strategies, trainings))


@pytest.mark.parametrize("is_wide", [False, True], ids=["host-bound", "compute-bound"])
def test_bounds_never_exceed_the_step_and_the_peak(*, is_wide: bool) -> None:
    """Of steps of 8 micro-batches; the best of the bounds is above four fifths of its step, so that they are
    worth something."""
    bounds, shares = Bounds(has_degrees=True), []
    for degrees, strategy, training in grid():
        made = tiny({"kind": "megatron", **strategy}, gradient_accumulation_steps=8, **training)
        model = {**made.model, **WIDE} if is_wide else {**made.model, "n_layer": 8}  # type: ignore[dict-item]
        experiment = with_degrees(made.model_copy(update={"model": model}), **degrees)
        job = resolve(zsim.Experiment.model_validate(experiment.model_dump(exclude_defaults=True)))
        step, bound = simulate_step(job), bounds.bound(job)
        case = f"{degrees} {strategy} {training}"
        assert bound.seconds * _SLACK <= step.seconds, case
        assert bound.gpu_bytes <= step.peak_bytes, case
        shares.append(bound.seconds / step.seconds)
    assert max(shares) > 0.8


@pytest.mark.parametrize(
    ("strategy", "degrees", "training"),
    [
        (ULYSSES, {"context": 4}, {}),
        ({"kind": "megatron"}, {"context": 4, "context_method": "all-to-all"}, {}),
        ({"kind": "fsdp2"}, {"context": 4}, {"activation_checkpointing": "selective"}),
        ({"kind": "fsdp2"}, {"tensor": 4}, {"compile": True}),
    ],
)
def test_bounds_of_layers_that_are_shared_by_exchanges_and_gathers(
    strategy: dict[str, Any], degrees: dict[str, Any], training: dict[str, Any]
) -> None:
    """Whose all-to-alls DeepSpeed's Ulysses and Megatron run in line, and whose launches all pay."""
    job = resolve(with_degrees(tiny(strategy, **training), **degrees))
    assert 0 < Bounds(has_degrees=True).bound(job).seconds <= simulate_step(job).seconds
