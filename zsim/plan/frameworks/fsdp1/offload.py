"""FSDP1 with `CPUOffload(offload_params=True)`: shards, gradients and optimizer states in host memory.

Transcribed from torch 2.13 `torch/distributed/fsdp/_flat_param.py` (`pre_unshard`,
`init_flat_param_attributes`) and `_runtime_utils.py` (`_offload_grad`, `_post_backward_final_callback`). The
shard of a unit is copied, pinned, on the pre-unshard stream and cast there, also where the unit is still
whole. A reduced gradient is copied on the stream that made it, and its GPU memory stays until backward has
ended, when the host waits for all copies; the copy of NO_SHARD blocks. The optimizer runs on the CPU.
"""

from __future__ import annotations

from zsim.errors import InputError
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.frameworks.fsdp1.reduce import (
    ALL_REDUCE,
    POST_BACKWARD,
    UNSHARD,
    Fsdp1UnitGradient,
    GradientReducer,
)
from zsim.plan.frameworks.fsdp1.schedule import PRE_UNSHARD, Fsdp1Schedule, fsdp1_shape
from zsim.plan.frameworks.fsdp1.wrapping import FlatUnit
from zsim.plan.ops import HostWork, Memory, Plan
from zsim.plan.parts.host_side import CPU, HostSide
from zsim.plan.step import walk_step
from zsim.plan.workload.workload import Workload
from zsim.specs.strategy.frameworks import Fsdp1
from zsim.specs.strategy.training import Training


class OffloadedFsdp1Reducer(GradientReducer):
    """Copies every reduced gradient to host memory."""

    host: HostSide

    def _save_shard(self, unit: FlatUnit, gradient: Fsdp1UnitGradient, stream: str) -> None:
        super()._save_shard(unit, gradient, stream)
        size = unit.shard_numel * self.stored_bytes
        self.host.copy(f"gradients {unit.name} to host", "d2h", size, stream, module=unit.path)

    def _all_reduce_unsharded(self, unit: FlatUnit, gradient: Fsdp1UnitGradient) -> None:
        super()._all_reduce_unsharded(unit, gradient)
        size = unit.numel * self.stored_bytes
        self.host.copy(
            f"gradients {unit.name} to host", "d2h", size, POST_BACKWARD, is_blocking=True, module=unit.path
        )

    def wait(self) -> None:
        """The compute stream waits for all reductions and copies, and the host for the compute stream."""
        super().wait()
        builder = self.builder
        for stream in (COMPUTE, POST_BACKWARD, ALL_REDUCE):
            builder.host_wait(builder.record(stream))
        builder.host("gradients in host memory")


class OffloadedFsdp1Schedule(Fsdp1Schedule):
    """FSDP1 with parameters in host memory."""

    def __init__(
        self,
        builder: PlanBuilder,
        workload: Workload,
        strategy: Fsdp1,
        training: Training,
        shard_size: int,
        world_size: int,
    ) -> None:
        super().__init__(builder, workload, strategy, training, shard_size, world_size)
        self.host = HostSide(builder)
        reducer = OffloadedFsdp1Reducer(builder, strategy, shard_size, world_size, training.stored_dtype)
        reducer.host = self.host
        self.reducer = reducer

    @property
    def _stored_total(self) -> int:
        return self.stored_bytes * sum(unit.shard_numel for unit in self.units)

    def resident(self) -> list[Memory]:
        """Everything in host memory; parameters and gradients are pinned, the gradients' from the start."""
        states = [memory for memory in super().resident() if memory.category == "optimizer_states"]
        return [
            Memory("parameters", self._stored_total, "host", is_pinned=True),
            Memory("gradients", self._stored_total, "host", is_pinned=True),
            *(Memory(memory.category, memory.bytes, "host") for memory in states),
        ]

    def _unshard(self, unit: FlatUnit) -> None:
        """Bring the shard first; it is freed after the cast, or, gathered as it is, after the gather."""
        builder, size = self.builder, self.stored_bytes * unit.shard_numel
        was_unsharded = self.handles[unit.path].is_unsharded
        builder.allocate("buffers", size)
        event = self.host.copy(f"shard of {unit.name}", "h2d", size, PRE_UNSHARD, module=unit.path)
        assert event is not None
        builder.wait_stream(UNSHARD, PRE_UNSHARD)
        super()._unshard(unit)
        last = event
        if self.is_sharded and not self.casts_shards and not was_unsharded:
            gathered = builder.record(UNSHARD)
            assert gathered is not None
            last = gathered
        builder.free_when_done("buffers", size, last)

    def end_backward(self) -> None:
        """_finalize_params lets go of the gradients on the GPU."""
        super().end_backward()
        if self._is_syncing:
            self.builder.free("gradients", self._stored_total)

    def optimizer_step(self) -> None:
        """torch's AdamW on the CPU; clipping reads the gradients and scales them there too."""
        numel = sum(unit.shard_numel for unit in self.units)
        if self.training.gradient_clipping > 0:
            norm = HostWork("copy", self.stored_bytes * numel, numel)
            self.builder.host_wait(self.builder.add("gradient norm", CPU, norm))
            self.host.scale("clip gradients", numel)
        training = self.training
        self.host.optimizer("optimizer step", numel, training.optimizer, training.optimizer_implementation)
        self.builder.host("end of step")
        self.limiter.apply(self.builder.ops)


def offloaded_fsdp1_plan(workload: Workload, strategy: Fsdp1, training: Training, world_size: int) -> Plan:
    """One steady step of FSDP1 with everything sharded in host memory.

    Raises InputError as `fsdp1_plan` does, and where FSDP1 would lose gradients: it keeps only the newest of
    those reduced one micro-batch after another (torch's documentation of `CPUOffload`).
    """
    if training.gradient_accumulation_steps > 1 and not strategy.no_sync:
        raise InputError(
            "strategy.no_sync: FSDP1 with cpu_offload keeps only the newest reduced gradient; expected "
            "no_sync = true with gradient_accumulation_steps above 1"
        )
    shard_size, groups = fsdp1_shape(strategy, world_size)
    builder = PlanBuilder(groups)
    schedule = OffloadedFsdp1Schedule(builder, workload, strategy, training, shard_size, world_size)
    walk_step(schedule, workload, training.gradient_accumulation_steps)
    return builder.finish("fsdp1", world_size, schedule.resident())
