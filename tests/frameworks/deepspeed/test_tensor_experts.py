"""DeepSpeed's own MoE layer inside tensor parallelism (Singh et al. 2023, arXiv 2303.06318): who has
which experts, and what is sent.

Groups of 16 GPUs with tensor parallelism of 2 and experts on 4 ranks are those of the docstring of
`_create_expert_data_and_model_parallel` (DeepSpeed 0.19.8 utils/groups.py). Whole experts are on the
ranks of both tensor indices (`_create_expert_and_data_parallel` of the same file).
"""

from __future__ import annotations

from typing import Any

import pytest

from zsim import Experiment
from zsim.errors import InputError, NotSimulatedError
from zsim.plan.make import make_plan
from zsim.plan.ops import Collective, Kernels, Plan
from zsim.specs.experiment.resolve import resolve
from zsim.specs.strategy.parallelism import EXPERT, EXPERT_DATA

TOKENS, WIDTH, FEATURES, EXPERTS = 1024, 4096, 14336, 8


def experiment(parallelism: dict[str, Any]) -> Experiment:
    return Experiment(
        model={"extends": "mixtral-8x7b", "num_hidden_layers": 1}, cluster="dgx-h100", nodes=2,
        training={"sequence_length": TOKENS, "micro_batch_size": 1, "activation_checkpointing": "none"},
        strategy={"kind": "deepspeed", "stage": 2}, parallelism={"expert": 4, "tensor": 2, **parallelism},
    )  # fmt: skip


def sent(plan: Plan, kind: str, group: str, name: str = "experts") -> list[int]:
    """Bytes of the full tensor of a layer's collectives over a group."""
    return [
        op.work.bytes
        for op in plan.programs[0].ops
        if isinstance(op.work, Collective)
        and (op.work.kind, op.work.group) == (kind, group)
        and name in op.name
    ]


@pytest.mark.parametrize(("expert_tensor", "holders"), [(1, [0, 1, 8, 9]), (2, [0, 8])])
def test_experts_of_a_group_have_one_tensor_index(expert_tensor: int, holders: list[int]) -> None:
    mesh = resolve(experiment({"expert_tensor": expert_tensor})).parallelism.expert_mesh(16)
    groups = sorted(mesh.groups(EXPERT).tolist())
    assert groups == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert holders in mesh.groups(EXPERT_DATA).tolist()


@pytest.mark.parametrize("expert_tensor", [1, 2])
def test_a_rank_sends_its_part_of_the_slots(expert_tensor: int) -> None:
    """1,024 tokens have two slots each, of 4,096 bf16 numbers. Half of them go to other ranks and back, in
    forward and backward. All are gathered once forward and once backward, and once more in each around
    experts that are cut.
    """
    plan = make_plan(resolve(experiment({"expert_tensor": expert_tensor})))
    slots = 2 * TOKENS * WIDTH * 2
    assert sent(plan, "all_to_all", "expert") == [slots // 2] * 4
    assert sent(plan, "all_gather", "tensor") == [slots] * (2 * expert_tensor)
    sums = sent(plan, "all_reduce", "tensor")  # of each of two experts, forward and backward
    assert sums == ([slots // 2] * 4 if expert_tensor == 2 else [])


@pytest.mark.parametrize(
    ("expert_tensor", "copies"),
    [(1, ["drop", "gather"]), (2, ["drop", "gather rows", "drop outputs", "gather"])],
)
def test_every_cut_and_every_gather_of_slots_is_a_copy(expert_tensor: int, copies: list[str]) -> None:
    """A gather ends in a torch.cat of all slots (moe/mappings.py `_gather_tokens`), and an exchange makes the
    half that `_drop_tokens` narrows contiguous. Each is read and written.
    """
    plan = make_plan(resolve(experiment({"expert_tensor": expert_tensor})))
    slots = 2 * TOKENS * WIDTH * 2
    moved = [
        (op.module.rpartition(".")[2], sum(kernel.hbm_bytes for kernel in op.work.kernels))
        for op in plan.programs[0].ops
        if isinstance(op.work, Kernels)
        and op.phase == "forward"
        and (".drop" in op.name or ".gather" in op.name)
    ]
    assert moved == [(copy, slots * (1 if "drop" in copy else 2)) for copy in copies]


@pytest.mark.parametrize(("expert_tensor", "ranks"), [(1, 4), (2, 2)])
def test_states_of_experts_are_sharded_over_those_that_hold_them(expert_tensor: int, ranks: int) -> None:
    """12 bytes of a parameter: 2 of the layer's 8 experts over their ranks, the rest over 8 of data
    parallelism."""
    job = resolve(experiment({"expert_tensor": expert_tensor}))
    plan = make_plan(job)
    experts = 2 * 3 * WIDTH * FEATURES // expert_tensor
    all_experts = EXPERTS * 3 * WIDTH * FEATURES
    dense = (job.model.numel - all_experts) // 2  # all but the norms and the router is cut in two
    states = sum(
        memory.bytes for memory in plan.programs[0].resident if memory.category == "optimizer_states"
    )
    assert states == pytest.approx(12 * (experts / ranks + dense / 8), rel=1e-3)


def test_whole_experts_are_counted_with_the_tensor_ranks_that_send_to_them() -> None:
    with pytest.raises(InputError, match="8 ranks x tensor 4 do not divide the 16 GPUs"):
        resolve(experiment({"expert": 8, "tensor": 4}))


def test_sequence_parallelism_around_the_layer_is_refused() -> None:
    with pytest.raises(NotSimulatedError, match="and sequence_parallel, which zsim does not simulate"):
        resolve(experiment({"sequence_parallel": True}))
