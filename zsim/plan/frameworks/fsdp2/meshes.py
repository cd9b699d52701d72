"""The meshes over which FSDP2 shards and replicates: of all parameters, and of routed experts."""

from __future__ import annotations

from zsim.plan.frameworks.fsdp2.param_groups import MeshInfo
from zsim.plan.stage import Stage
from zsim.specs.strategy.frameworks import Fsdp2Config


def experts_mesh(stage: Stage, strategy: Fsdp2Config) -> MeshInfo | None:
    """The mesh of expert-parallel routed experts ("efsdp" of torchtitan). None without expert parallelism."""
    if stage.experts is None:
        return None
    replicas = strategy.replicate
    size = stage.experts.size // replicas
    shard = stage.expert_group(size=size)
    replicate = stage.expert_group("expert_replicate", replicas, size) if replicas > 1 else None
    return MeshInfo(shard, replicate)


def dense_mesh(stage: Stage, strategy: Fsdp2Config) -> MeshInfo:
    """The mesh of all other parameters. Ranks that shard together are consecutive, and replicas are `shard
    size` apart.
    """
    size, reshard = stage.ranks // strategy.replicate, strategy.reshard_after_forward
    shard = stage.group("shard", size)
    replicate = stage.group("replicate", strategy.replicate, size) if strategy.replicate > 1 else None
    is_size = isinstance(reshard, int) and not isinstance(reshard, bool)
    return MeshInfo(shard, replicate, stage.group("post_forward", reshard) if is_size else None)
