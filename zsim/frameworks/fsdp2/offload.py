"""FSDP2 with `CPUOffloadPolicy`: sharded parameters, gradients and optimizer states in pinned host memory.

Transcribed from torch 2.13 `torch/distributed/fsdp/_fully_shard/_fsdp_param.py` (`all_gather_inputs`) and
`_fsdp_collectives.py` (`foreach_reduce`). Shards are copied to the GPU on the copy-in stream of their gather,
in the type that they are kept in. Reduced gradients are cast to that type on the GPU (`orig_dtype`) and
copied back, without blocking unless they are added to earlier gradients. The optimizer runs on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.cost.collectives.rounds import ring_rounds
from zsim.cost.kernels.update import cast_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.fsdp2.param_groups import ParamGroup, ParamGroupGradient
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.ops import HostWork, Memory
from zsim.plan.shared.host_side import CPU, HostSide
from zsim.specs.strategy.training import TrainingConfig


class Fsdp2OffloadedShards:
    """Keeps sharded parameters, gradients and optimizer states in host memory, in the type `stored`."""

    def __init__(self, builder: PlanBuilder, strategy: Fsdp2Config, stored: str) -> None:
        self.builder, self.strategy = builder, strategy
        self.stored, self.stored_bytes = stored, DTYPE_BYTES[stored]
        self.host = HostSide(builder)
        self._groups_with_gradient: set[str] = set()
        self._copies: list[int] = []

    def resident(self, states: Sequence[Memory]) -> list[Memory]:
        """`states`, moved from the GPU to host memory. Parameters are pinned."""
        return [
            Memory(memory.category, memory.bytes, "host", is_pinned=memory.category == "parameters")
            for memory in states
        ]

    def bring(self, group: ParamGroup, stream: str) -> None:
        """Copy the shards of a group to the GPU, for a gather whose inputs are copied on `stream`."""
        size, builder = group.stored_shard_bytes, self.builder
        builder.allocate("buffers", size, owner=group.name)
        event = self.host.copy(f"shards of {group.name}", "h2d", size, stream, module=group.name)
        assert event is not None
        if group.shard_size == 1:
            builder.stream_wait(COMPUTE, event)
        builder.free_when_done("buffers", size, event, owner=group.name)

    def keep_gradient(self, group: ParamGroup, gradient: ParamGroupGradient, shard: int, stream: str) -> int:
        """Cast a reduced shard of `shard` bytes to its type and copy it to the host on `stream`. It is added
        to an earlier gradient on the CPU, if there is one. Returns the copy's event.
        """
        builder, dtype = self.builder, self.strategy.reduce_dtype
        numel = shard // DTYPE_BYTES[dtype]
        size = numel * self.stored_bytes
        if dtype != self.stored:
            builder.allocate("gradients", size)
            kernels = cast_kernels(numel, dtype, self.stored)
            builder.kernels(f"cast gradients {group.name}", kernels, stream=stream, module=group.name)
            if group.mesh.replicate is not None:
                gradient.all_reduce_bytes = shard
            else:
                builder.free("buffers", shard, owner=group.name)
        is_added = group.name in self._groups_with_gradient
        event = self.host.copy(
            f"gradients {group.name} to host",
            "d2h",
            size,
            stream,
            is_blocking=is_added,
            module=group.name,
        )
        assert event is not None
        builder.free_when_done("gradients", size, event)
        if is_added:
            addition = HostWork("copy", 3 * size, numel)
            builder.host_wait(builder.add(f"add gradients {group.name}", CPU, addition, module=group.name))
        else:
            builder.allocate("gradients", size, "host", is_pinned=True)
            self._groups_with_gradient.add(group.name)
            self._copies.append(event)
        return event

    def wait(self) -> None:
        """finalize_backward: make the host wait until all gradients have arrived."""
        for event in self._copies:
            self.builder.host_wait(event)
        self._copies = []
        self.builder.host("gradients in host memory")

    def step(
        self, groups: Sequence[ParamGroup], training: TrainingConfig, norm_sums: Sequence[tuple[str, int]]
    ) -> None:
        """Run torch's AdamW on the CPU. Clipping reads and scales the gradients there too, and sums their
        norms in `norm_sums`. The cost of unwrapping DTensors is left out: milliseconds, compared with
        seconds.
        """
        numel = sum(sum(group.trainable_shards) for group in groups)
        if training.gradient_clipping > 0:
            norm = HostWork("copy", self.stored_bytes * numel, numel)
            self.builder.host_wait(self.builder.add("gradient norm", CPU, norm))
            for process_group, size in norm_sums:
                self._sum_on_hosts(process_group, size)
            self.host.scale("clip gradients", numel, self.stored)
        self.host.optimizer(
            "optimizer step", numel, training.optimizer, training.optimizer_implementation, self.stored
        )
        self.builder.host("end of step")
        self.builder.free("gradients", self.stored_bytes * numel, "host", is_pinned=True)

    def _sum_on_hosts(self, group: str, size: int) -> None:
        """# [Note: norms on the host]
        The norms of DTensors in host memory are host tensors, which the groups' gloo backend sums up while
        the host waits: torchtitan asks for "cpu:gloo" next to NCCL with `enable_cpu_offload` (v0.2.2
        distributed/utils.py `init_distributed`). Its ring's start and rounds are host time. The all-reduce
        itself makes the ranks wait for each other. Groups that the plan lacks have one rank.
        """
        groups, name = self.builder.groups, "all_reduce gradient norm"
        if group not in groups or groups[group].size == 1:
            return
        members = groups[group].members[0]
        nodes = len({int(rank) // self.strategy.job_gpus_per_node for rank in members})
        rounds = ring_rounds("all_reduce", len(members), nodes)
        self.builder.host(f"{name}: gloo", "gloo_call")
        for cost, count in (("gloo_round", rounds.intra), ("gloo_round_between_nodes", rounds.inter)):
            if count:
                self.builder.host(f"{name}: {count} rounds", cost, events=count)
        call = self.builder.collective("all_reduce", size, "fp32", group, stream=CPU, name=name)
        self.builder.host_wait(call)
