"""The reference engine with states, gradients and parameter shards in host memory or in files.

As `validation/zero/places.py` and `nvme.py` have it, after ZeRO-Offload (arXiv 2101.06840) and ZeRO-Infinity
(2104.07857): a gradient shard leaves the device when it is reduced, AdamW runs on the CPU, new parameters
come back, and stage 3's shards come up for every gather. From files: while a unit is stepped, the next one's
states are read and the last one's written.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.frameworks.reference.schedule import WORLD, EngineUnit, ReferenceSchedule
from zsim.plan.ops import Category, Device, Group, HostWork, Memory, Plan
from zsim.plan.parts.host_side import CPU, HostSide
from zsim.plan.step import walk_step
from zsim.plan.workload.workload import Workload
from zsim.specs.strategy.deepspeed.config import AioConfig
from zsim.specs.strategy.frameworks import Reference
from zsim.specs.strategy.training import Training

_DEVICES: dict[str, Device] = {"device": "gpu", "host": "host", "nvme": "nvme"}
# validation/zero/files.py: one thread reads, one writes, a whole buffer at a time
_FILES = AioConfig(2**20, 1, 1, use_gds=False)
_STATE_BYTES = 12  # master weight and both moments


class OffloadedReferenceSchedule(ReferenceSchedule):
    """The engine's hooks, with a `StateKeeper` and a `ParameterKeeper` off the device."""

    def __init__(
        self,
        builder: PlanBuilder,
        workload: Workload,
        strategy: Reference,
        training: Training,
        world_size: int,
    ) -> None:
        super().__init__(builder, workload, strategy, training, world_size)
        self.host = HostSide(builder, _FILES)
        self.parameter_home = _DEVICES[strategy.parameter_place]
        self.state_home = _DEVICES[strategy.optimizer_place]
        self.pins_states = self.state_home == "host"
        self._coming: dict[str, int | None] = {}  # shards on their way to the device
        self._reads: dict[str, int | None] = {}  # states on their way from files
        self._writes: list[int | None] = []

    def resident(self) -> list[Memory]:
        """fp32 weights that are off the device, or whose states are, have masters of their own."""
        parameters, states = super().resident()
        owned = sum(self._owned(unit) for unit in self.units)
        masters = 4 * owned if self.param_bytes == 4 else 0
        return [
            Memory(
                "parameters", parameters.bytes, self.parameter_home, is_pinned=self.parameter_home == "host"
            ),
            Memory("optimizer_states", states.bytes + masters, self.state_home, is_pinned=self.pins_states),
        ]

    # -- parameter shards -------------------------------------------------------------------------------

    def _start_gather(self, unit: EngineUnit) -> None:
        if self.parameter_home == "gpu" or unit.is_gathered or unit.gathered is not None:
            super()._start_gather(unit)
            return
        self._fetch(unit)
        event, size = self._coming.pop(unit.name), self._shard_bytes(unit)
        if self.parameter_home == "nvme":
            self.host.wait(event, f"shard of {unit.name} is read")
            self.builder.allocate("buffers", size, owner=unit.name)
            self.host.copy(f"fetch {unit.name}", "h2d", size, COMPUTE, module=unit.name, is_blocking=True)
        super()._start_gather(unit)
        assert unit.gathered is not None
        self.builder.free_when_done("buffers", size, unit.gathered, owner=unit.name)

    def _gather_ahead(self, following: Sequence[EngineUnit]) -> None:
        """And begin to bring the shard of the unit after those."""
        super()._gather_ahead(following)
        ahead = self.strategy.prefetch
        for unit in following[ahead : ahead + 1]:
            if self.parameter_home != "gpu" and not unit.is_gathered and unit.gathered is None:
                self._fetch(unit)

    def _fetch(self, unit: EngineUnit) -> None:
        if unit.name in self._coming:
            return
        size = self._shard_bytes(unit)
        if self.parameter_home == "nvme":
            self._coming[unit.name] = self.host.read(f"read {unit.name}", size, module=unit.name)
        else:
            self.builder.allocate("buffers", size, owner=unit.name)
            fetched = self.host.copy(f"fetch {unit.name}", "h2d", size, COMPUTE, module=unit.name)
            self._coming[unit.name] = fetched

    def _shard_bytes(self, unit: EngineUnit) -> int:
        return unit.padded_numel // self.world_size * self.param_bytes

    # -- gradients --------------------------------------------------------------------------------------

    def _keep(self, units: Sequence[EngineUnit], name: str, size: int, part: int) -> None:
        if self.state_home == "gpu":
            super()._keep(units, name, size, part)
            return
        for unit in units:
            self._add_gradient(unit, self._owned(unit) * self.reduce_bytes)
        if self.strategy.stage:
            self._free_parts(units)

    def _output_category(self) -> Category:
        return "buffers" if self.state_home != "gpu" else super()._output_category()

    def _add_gradient(self, unit: EngineUnit, size: int) -> None:
        """A reduced shard leaves the device; on stages 2 and 3 it is added to earlier micro-batches'."""
        builder, host, name = self.builder, self.host, unit.name
        is_first = self._is_first or self.strategy.stage <= 1
        if is_first:
            builder.allocate("gradients", size, self.state_home, is_pinned=self.pins_states, owner=name)
        elif self.state_home == "nvme":
            host.wait(host.read(f"read sum {name}", size, module=name), f"sum of {name} is read")
        host.copy(f"gradients {name} to host", "d2h", size, COMPUTE, is_blocking=True, module=name)
        if not is_first:
            added = HostWork("copy", 3 * size, size // self.reduce_bytes)
            builder.host_wait(builder.add(f"add gradients {name}", CPU, added, module=name))
        if self.state_home == "nvme":
            self._writes.append(host.write(f"write gradients {name}", size, module=name))

    def _drop_gradients(self, owned: Sequence[int]) -> None:
        for event in self._writes:
            self.builder.host_wait(event)
        if self._writes:
            self.builder.host("all is written")
        self._writes = []
        if self.state_home == "gpu" or self.strategy.stage <= 1:
            super()._drop_gradients(owned)  # this rank's own
        if self.state_home != "gpu":
            for unit, numel in zip(self.units, owned, strict=True):
                size = numel * self.reduce_bytes
                self.builder.free(
                    "gradients", size, self.state_home, is_pinned=self.pins_states, owner=unit.name
                )

    # -- the step ---------------------------------------------------------------------------------------

    def _clip(self, owned: Sequence[int], group: str) -> None:
        """The CPU reads the gradients, from files first; one number goes round."""
        if self.state_home == "gpu":
            super()._clip(owned, group)
            return
        if not self._scales:
            return
        for numel in owned:
            if self.state_home == "nvme":
                self.host.wait(
                    self.host.read("read gradients", numel * self.reduce_bytes), "gradients are read"
                )
            norm = HostWork("copy", numel * self.reduce_bytes, numel)
            self.builder.host_wait(self.builder.add("gradient norm", CPU, norm))
        if group and self.world_size > 1:
            self.builder.host_wait(self._collective("all_reduce", 4, "fp32", "gradient norm"))

    @property
    def _scales(self) -> bool:
        return self.training.gradient_clipping > 0 or self.strategy.param_dtype == "fp16"

    def _update(self, unit: EngineUnit, numel: int) -> None:
        if self.state_home == "gpu":
            super()._update(unit, numel)
        else:
            self._update_on_cpu(unit, numel)
        self._put(unit, numel)

    def _update_on_cpu(self, unit: EngineUnit, numel: int) -> None:
        if self.state_home == "nvme":
            self._read_states(unit)
            for following in self.units[self.units.index(unit) + 1 :][:1]:
                self._read_states(following)
            self.host.wait(self._reads.pop(unit.name), f"states of {unit.name} are read")
        if self._scales:
            self.host.scale(f"scale gradients {unit.name}", numel)
        self.host.optimizer(f"adamw {unit.name}", numel, self.training.optimizer)
        if self.state_home == "nvme":
            self._writes.append(self.host.write(f"write states {unit.name}", _STATE_BYTES * numel))

    def _read_states(self, unit: EngineUnit) -> None:
        if unit.name not in self._reads:
            size = (_STATE_BYTES + self.reduce_bytes) * self._owned(unit)
            self._reads[unit.name] = self.host.read(f"read states {unit.name}", size)

    def _put(self, unit: EngineUnit, numel: int) -> None:
        """The new parameters go to where they are kept."""
        host, size, dtype = self.host, numel * self.param_bytes, self.strategy.param_dtype
        if self.state_home == "gpu":
            host.copy(f"keep {unit.name}", "d2h", size, COMPUTE, is_blocking=True, module=unit.name)
        elif self.parameter_home != "gpu" or dtype != "fp32":
            host.cast(f"keep {unit.name}", numel, "fp32", dtype)
        if self.parameter_home == "gpu":
            host.copy(f"parameters {unit.name}", "h2d", size, COMPUTE, module=unit.name)
        elif self.parameter_home == "nvme":
            self._writes.append(host.write(f"write {unit.name}", size, module=unit.name))


def offloaded_reference_plan(
    workload: Workload, strategy: Reference, training: Training, world_size: int
) -> Plan:
    """One step of the reference engine with something off the device."""
    builder = PlanBuilder([Group.regular(WORLD, world_size)])
    schedule = OffloadedReferenceSchedule(builder, workload, strategy, training, world_size)
    walk_step(schedule, workload, training.gradient_accumulation_steps)
    return builder.finish("reference", world_size, schedule.resident())
