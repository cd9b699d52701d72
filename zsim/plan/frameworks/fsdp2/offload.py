"""FSDP2 with `CPUOffloadPolicy`: sharded parameters, gradients and optimizer states in pinned host memory.

Transcribed from torch 2.13 `torch/distributed/fsdp/_fully_shard/_fsdp_param.py` (`all_gather_inputs`) and
`_fsdp_collectives.py` (`foreach_reduce`). fp32 shards go to the GPU on the copy-in stream of their gather;
reduced gradients come back in fp32, without waiting unless they must be added to earlier ones; the
optimizer runs on the CPU.
"""

from __future__ import annotations

from zsim.cost.kernels.update import cast_kernels
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.frameworks.fsdp2.reduce import Fsdp2Reducer, Fsdp2UnitGradient
from zsim.plan.frameworks.fsdp2.schedule import COPY_IN, Fsdp2Schedule, fsdp2_groups
from zsim.plan.frameworks.fsdp2.units import Unit
from zsim.plan.ops import HostWork, Memory, Plan
from zsim.plan.parts.host_side import CPU, HostSide
from zsim.plan.step import walk_step
from zsim.plan.workload.workload import Workload
from zsim.specs.strategy.frameworks import Fsdp2
from zsim.specs.strategy.training import Training


class OffloadedFsdp2Reducer(Fsdp2Reducer):
    """Sends every reduced shard to host memory."""

    def __init__(self, builder: PlanBuilder, strategy: Fsdp2, shard_size: int, host: HostSide) -> None:
        super().__init__(builder, strategy, shard_size)
        self.host = host
        self.in_host_memory: set[str] = set()
        self._copies: list[int] = []

    def _finish(self, unit: Unit, gradient: Fsdp2UnitGradient, shard: int, stream: str) -> int:
        """Cast to fp32, copy; add on the CPU when there is a gradient already."""
        builder = self.builder
        numel = shard // self.reduce_bytes
        needs_cast = self.strategy.reduce_dtype != "fp32"
        if needs_cast:
            builder.allocate("gradients", 4 * numel)
            kernels = cast_kernels(numel, self.strategy.reduce_dtype, "fp32")
            builder.kernels(f"cast gradients {unit.name}", kernels, stream=stream, module=unit.name)
            if self.is_hybrid:
                gradient.all_reduce_bytes = shard
            else:
                builder.free("buffers", shard, owner=unit.name)
        is_added = unit.name in self.in_host_memory
        event = self.host.copy(
            f"gradients {unit.name} to host", "d2h", 4 * numel, stream, is_blocking=is_added, module=unit.name
        )
        assert event is not None
        builder.free_when_done("gradients", 4 * numel, event)
        if is_added:
            added = HostWork("copy", 12 * numel, numel)
            builder.host_wait(builder.add(f"add gradients {unit.name}", CPU, added, module=unit.name))
        else:
            builder.allocate("gradients", 4 * numel, "host", is_pinned=True)
            self.in_host_memory.add(unit.name)
            self._copies.append(event)
        return event

    def wait_for_copies(self) -> None:
        """finalize_backward: the host waits until all gradients have arrived."""
        for event in self._copies:
            self.builder.host_wait(event)
        self._copies = []
        self.builder.host("gradients in host memory")


class OffloadedFsdp2Schedule(Fsdp2Schedule):
    """FSDP2 with parameters in host memory."""

    reducer: OffloadedFsdp2Reducer

    def __init__(
        self, builder: PlanBuilder, workload: Workload, strategy: Fsdp2, training: Training, world_size: int
    ) -> None:
        super().__init__(builder, workload, strategy, training, world_size)
        self.host = HostSide(builder)
        self.reducer = OffloadedFsdp2Reducer(builder, strategy, self.shard_size, self.host)

    def resident(self) -> list[Memory]:
        """Everything that is sharded is in host memory."""
        return [
            Memory(memory.category, memory.bytes, "host", is_pinned=memory.category == "parameters")
            for memory in super().resident()
        ]

    def _unshard(self, unit: Unit) -> None:
        """Bring the fp32 shards, unless a smaller group's shard on the GPU is gathered."""
        state, builder = self.states[unit.name], self.builder
        if state.all_gather is not None or state.is_unsharded:
            return
        if not state.is_sharded_post_forward:
            size = 4 * unit.shard_numel
            builder.allocate("buffers", size, owner=unit.name)
            event = self.host.copy(f"shards of {unit.name}", "h2d", size, COPY_IN, module=unit.name)
            assert event is not None
            if self.shard_size == 1:
                builder.stream_wait(COMPUTE, event)
            builder.free_when_done("buffers", size, event, owner=unit.name)
        super()._unshard(unit)

    def end_backward(self) -> None:
        super().end_backward()
        if self._is_last_micro_batch or not self.strategy.no_sync:
            self.reducer.wait_for_copies()

    def optimizer_step(self) -> None:
        """torch's AdamW on the CPU; clipping reads the gradients and scales them there too. What taking
        DTensors apart costs is not in it: milliseconds, beside seconds."""
        numel = sum(shard for unit in self.units for shard in unit.parameter_shards)
        if self.training.gradient_clipping > 0:
            norm = HostWork("copy", 4 * numel, numel)
            self.builder.host_wait(self.builder.add("gradient norm", CPU, norm))
            self.host.scale("clip gradients", numel)
        training = self.training
        self.host.optimizer("optimizer step", numel, training.optimizer, training.optimizer_implementation)
        self.builder.host("end of step")
        size = 4 * sum(unit.shard_numel for unit in self.units)
        self.builder.free("gradients", size, "host", is_pinned=True)


def offloaded_fsdp2_plan(workload: Workload, strategy: Fsdp2, training: Training, world_size: int) -> Plan:
    """One step of FSDP2 or HSDP with everything sharded in host memory."""
    builder = PlanBuilder(fsdp2_groups(strategy, world_size))
    schedule = OffloadedFsdp2Schedule(builder, workload, strategy, training, world_size)
    walk_step(schedule, workload, training.gradient_accumulation_steps)
    return builder.finish("fsdp2", world_size, schedule.resident())
