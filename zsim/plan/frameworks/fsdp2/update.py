"""The update of FSDP2's shards, which are DTensors. Python unwraps them before torch works on them, once per
list of tensors, or for every operator in an optimizer that loops over tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.cost.optimizers.tensors import UpdatedTensor
from zsim.dtypes import DTYPE_BYTES
from zsim.plan.frameworks.fsdp2.muon import DTensorCosts, update_matrix
from zsim.plan.frameworks.fsdp2.param_groups import MeshInfo, ParamGroup
from zsim.plan.frameworks.fsdp2.scales import precompute_scales
from zsim.plan.shared.optimizer import clip_gradients, update
from zsim.plan.stage import Stage
from zsim.specs.strategy.frameworks import Fsdp2Config
from zsim.specs.strategy.mesh import EXPERT, EXPERT_TENSOR, PIPELINE, TENSOR


def update_param_groups(
    stage: Stage,
    strategy: Fsdp2Config,
    meshes: tuple[MeshInfo, MeshInfo | None],
    groups: Sequence[ParamGroup],
    updated: Sequence[UpdatedTensor],
) -> None:
    """Clip the gradients of `groups` and update the tensors `updated`. `meshes` is as in `norm_sums`."""
    builder, training, mesh = stage.builder, stage.training, meshes[0]
    numels = [shard for group in groups for shard in group.trainable_shards]
    if training.gradient_clipping > 0:
        builder.host("norm of DTensors", "dtensor_in_list", events=len(numels))
    clip_gradients(builder, training, numels, norm_sums(meshes, groups))
    is_loop = training.optimizer_implementation == "for_loop"
    cost = "dtensor_update" if is_loop else "dtensor_in_list"
    builder.host("update of DTensors", cost, events=len(numels))
    if training.optimizer == "muon" and mesh.shard.size > 1:
        _update_matrices(stage, strategy, mesh, [tensor for tensor in updated if tensor.is_matrix])
        updated = [tensor for tensor in updated if not tensor.is_matrix]
    update(builder, training, updated)
    precompute_scales(builder, strategy, groups)
    builder.free("gradients", DTYPE_BYTES[training.stored_dtype] * sum(numels))


def norm_sums(
    meshes: tuple[MeshInfo, MeshInfo | None], groups: Sequence[ParamGroup]
) -> list[tuple[str, int]]:
    """(group, bytes) of the all-reduces of a gradient norm, in order. `meshes` are the mesh of the dense
    parameters and that of the experts, if they have one.

    The norm of a DTensor is summed over each dimension of its mesh, one number per tensor, and torchtitan
    sums the results over the pipeline (v0.2.2 distributed/utils.py `clip_grad_norm_`).
    """
    mesh, experts = meshes
    expert_bytes = 4 * sum(len(group.parameters) for group in groups if group.calls is not None)
    size = 4 * sum(len(group.trainable_shards) for group in groups) - expert_bytes
    sums = [(mesh.shard.name, size), (TENSOR, size), (PIPELINE, 4)]
    if experts is not None:
        expert_groups = [experts.shard.name, EXPERT, EXPERT_TENSOR]
        sums[-1:-1] = [(name, expert_bytes) for name in expert_groups]
    return sums


def _update_matrices(
    stage: Stage, strategy: Fsdp2Config, mesh: MeshInfo, matrices: Sequence[UpdatedTensor]
) -> None:
    """Issue Muon's update, which moves matrices between ranks. Their states and gradients are fp32."""
    shard = mesh.shard
    costs = DTensorCosts(shard.size, stage.ranks <= strategy.gpus_per_node)
    for matrix in matrices:
        update_matrix(stage.builder, matrix, shard.name, costs, stored_dtype="fp32", gradient_dtype="fp32")
