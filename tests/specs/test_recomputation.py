"""Recomputation as Megatron names it: modules, method and layers, resolved to a policy for every block."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.errors import InputError, NotSimulatedError
from zsim.specs.experiment.resolve import resolve
from zsim.specs.strategy.training import TrainingConfig


def training(
    parallelism: dict[str, Any] | None = None, version: str = "0.16.1", **table: Any
) -> TrainingConfig:
    """Of Llama 3 8B's 32 layers under Megatron."""
    experiment = zsim.Experiment(
        model="llama-3-8b",
        cluster="dgx-h100",
        nodes=2,
        training=table,
        parallelism=parallelism or {},
        strategy={"kind": "megatron", "version": version},
    )
    return resolve(experiment).training


def full(method: str, layers: int, **parallelism: Any) -> TrainingConfig:
    return training(
        parallelism, activation_checkpointing="full", recompute_method=method, recompute_layers=layers
    )


def test_block_checkpoints_the_first_layers_of_the_model() -> None:
    """5 of 32; and of all 32 every block alike, whatever is above."""
    assert full("block", 5).block_checkpointing == ("full",) * 5 + ("none",) * 27
    assert full("block", 40).block_checkpointing == ()
    assert full("block", 40).activation_checkpointing == "full"


def test_block_checkpoints_the_first_layers_of_every_virtual_stage() -> None:
    """4 ranks with 2 stages of 4 layers each: 1 of every 4."""
    found = full("block", 1, pipeline=4, virtual_stages=2)
    assert found.block_checkpointing == ("full", "none", "none", "none") * 8
    uneven = full("block", 2, pipeline=2, layers_per_stage=[31, 1])
    assert uneven.block_checkpointing == ("full", "full", *["none"] * 29, "full")


def test_uniform_with_one_layer_is_every_block() -> None:
    assert full("uniform", 1) == training(activation_checkpointing="full")


def test_uniform_groups_must_divide_a_stage() -> None:
    """8 layers a stage: 3 do not divide them, 2 and 4 do."""
    with pytest.raises(InputError, match=r"found 3, which does not divide the 8 layers.*that does is 2"):
        full("uniform", 3, pipeline=4)
    assert full("uniform", 4, pipeline=4).layers_per_checkpoint == 4


def test_several_layers_share_a_checkpoint_under_megatrons_ddp_only() -> None:
    table = {"activation_checkpointing": "full", "recompute_method": "uniform", "recompute_layers": 2}
    sharded = {"kind": "megatron", "distributed_optimizer": True, "fsdp_sharding": "optim_grads_params"}
    for strategy in ({"kind": "ddp"}, sharded):
        experiment = zsim.Experiment(
            model="llama-3-8b", cluster="dgx-h100", nodes=2, training=table, strategy=strategy
        )
        with pytest.raises(NotSimulatedError, match="one checkpoint around 2 layers"):
            resolve(experiment)


def test_selective_is_the_core_of_attention() -> None:
    assert training(activation_checkpointing="selective").activation_checkpointing == "selective"
    named = training(activation_checkpointing="selective", recompute_modules=["core_attn"])
    assert named == training(activation_checkpointing="selective")
    nothing = training(activation_checkpointing="selective", recompute_modules=[])
    assert nothing.activation_checkpointing == "none"


def test_a_fused_core_was_not_checkpointed_before_core() -> None:
    """megatron/model/transformer.py: only the other core may be checkpointed."""
    before = training(version="3.0", activation_checkpointing="selective", attention="flash")
    assert before.activation_checkpointing == "none"
    other = training(version="3.0", activation_checkpointing="selective", attention="math")
    assert other.activation_checkpointing == "selective"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"recompute_method": "block", "recompute_layers": 1}, "activation_checkpointing 'none'; expected"),
        ({"activation_checkpointing": "full", "recompute_layers": 1}, "found 1 without .*recompute_method"),
        ({"activation_checkpointing": "full", "recompute_modules": ["mlp"]}, "expected 'selective'"),
        (
            {"activation_checkpointing": "full", "recompute_method": "block", "checkpoint_every": 2},
            "recompute_method and training.checkpoint_every both say",
        ),
        (
            {
                "activation_checkpointing": "full",
                "recompute_method": "block",
                "block_checkpointing": {"0": "none"},
            },
            "recompute_method and training.block_checkpointing both say",
        ),
        ({"activation_checkpointing": "selective-op"}, "which is torch's; Megatron's"),
        ({"activation_checkpointing": "full", "recompute_method": "blocks"}, "did you mean 'block'"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        training(**table)
