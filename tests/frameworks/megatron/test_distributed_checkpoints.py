"""`--distribute-saved-activations`: tensor-parallel ranks share the inputs of recomputed layers.

Llama-3.2-1B, 16 blocks, 1,024 tokens of 2,048 features in bf16: inputs of 4 MiB, of which each of two ranks
keeps 2 MiB.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import zsim
from zsim.errors import InputError
from zsim.plan.memory.tensors import tensor_changes
from zsim.plan.ops import Collective, Program

INPUT = 1024 * 2048 * 2


def experiment(
    parallelism: dict[str, Any], training: dict[str, Any] | None = None, **strategy: Any
) -> zsim.Experiment:
    settings = {
        "sequence_length": 1024,
        "gradient_accumulation_steps": 4,
        "activation_checkpointing": "full",
        **(training or {}),
    }
    return zsim.Experiment(
        model="llama-3.2-1b",
        cluster="dgx-h100",
        training=settings,
        parallelism=parallelism,
        strategy={"kind": "megatron", "distribute_saved_activations": True, **strategy},
    )


def gathers(program: Program) -> list[str]:
    return [
        op.module
        for op in program.ops
        if op.name.startswith("all_gather checkpoint")
        and isinstance(op.work, Collective)
        and (op.work.bytes, op.work.group) == (INPUT, "tensor")
    ]


def check_ends_empty(program: Program) -> None:
    held: Counter[str] = Counter()
    for change in program.memory:
        held[change.category] += change.bytes
    assert not any(held.values())
    changes = tensor_changes(program)
    assert {change.tensor for change in changes if change.bytes} == {
        change.tensor for change in changes if not change.bytes
    }


@pytest.mark.parametrize("fsdp", [None, "optim_grads_params"])
def test_every_layer_is_gathered_before_it_runs_again_in_every_micro_batch(fsdp: str | None) -> None:
    """Also where micro-batches are repeats of the first."""
    strategy: dict[str, Any] = {} if fsdp is None else {"fsdp_sharding": fsdp, "distributed_optimizer": True}
    (program,) = zsim.make_plan(experiment({"tensor": 2}, **strategy)).programs
    layers = [f"model.layers.{number}" for number in reversed(range(16))]
    assert gathers(program) == layers * 4
    check_ends_empty(program)


def test_layers_of_a_group_share_one_part() -> None:
    """Groups of four layers on two pipeline ranks: the gathers are of the first layer of each."""
    training = {"recompute_method": "uniform", "recompute_layers": 4}
    first, last = zsim.make_plan(experiment({"tensor": 2, "pipeline": 2}, training)).programs
    assert gathers(first) == ["model.layers.4", "model.layers.0"] * 4
    assert gathers(last) == ["model.layers.12", "model.layers.8"] * 4
    check_ends_empty(first)
    check_ends_empty(last)


def test_a_rank_holds_half_of_the_inputs_at_the_end_of_forward() -> None:
    """16 x 2 MiB less than without."""

    def level(distributes: bool) -> int:
        plan = zsim.make_plan(experiment({"tensor": 2}, distribute_saved_activations=distributes))
        first = next(number for number, op in enumerate(plan.ops) if op.phase == "backward")
        return sum(
            change.bytes for change in plan.memory if change.op < first and "checkpoint" in change.owner
        )

    assert (level(False), level(True)) == (16 * INPUT, 16 * INPUT // 2)


@pytest.mark.parametrize(
    ("parallelism", "training", "strategy", "message"),
    [
        ({"tensor": 1}, {}, {}, "without tensor parallelism"),
        ({"tensor": 2, "sequence_parallel": True}, {}, {}, "with sequence parallelism"),
        ({"tensor": 2}, {"activation_checkpointing": "selective"}, {}, "inputs of whole layers"),
        ({"tensor": 2}, {}, {"engine": "nanotron"}, "belongs to engine 'megatron'"),
    ],
)
def test_what_megatron_refuses_is_an_error(
    parallelism: dict[str, Any], training: dict[str, Any], strategy: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=f"distribute_saved_activations: .*{message}"):
        zsim.make_plan(experiment(parallelism, training, **strategy))
