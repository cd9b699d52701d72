"""The reference engine with states, gradients and parameter shards in host memory or in files.

As in `validation/zero/places.py` and `nvme.py`, after ZeRO-Offload (arXiv 2101.06840) and ZeRO-Infinity
(2104.07857): a gradient shard is copied off the device when it is reduced, AdamW runs on the CPU, new
parameters are copied back, and stage 3's shards are copied to the device for every gather. From files: while
a unit is updated, the states of the next unit are read and those of the last unit written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.reference.settings import ReferenceConfig
from zsim.plan.builder import COMPUTE
from zsim.plan.ops import Device, Group, HostWork, Memory
from zsim.plan.shared.host_side import CPU, DriveAccess, HostSide
from zsim.plan.stage import Stage
from zsim.plan.workload.workload import Workload

_DEVICES: dict[str, Device] = {"device": "gpu", "host": "host", "nvme": "nvme"}
# validation/zero/files.py: one thread reads, one writes, a whole buffer at a time
_FILES = DriveAccess(2**20, 1, 1)
_STATE_BYTES = 12  # master weight and both moments


class ReferenceOffloadedShards:
    """The engine's `StateKeeper` and `ParameterKeeper`. `parameters` is the device of the parameter shards,
    and `states` that of gradients and optimizer states.
    """

    def __init__(
        self, stage: Stage, strategy: ReferenceConfig, units: Sequence[EngineUnit], group: Group
    ) -> None:
        self.builder, self.strategy, self.training = stage.builder, strategy, stage.training
        self.units, self.world_size = units, group.size
        self.host = HostSide(stage.builder, _FILES)
        self.parameters = _DEVICES[strategy.parameter_place]
        self.states = _DEVICES[strategy.optimizer_place]
        self.pins_states = self.states == "host"
        self.param_bytes = DTYPE_BYTES[strategy.param_dtype]
        self.reduce_bytes = DTYPE_BYTES[strategy.reduce_dtype]
        self._pending_fetches: dict[str, int | None] = {}  # shards on their way to the device
        self._pending_reads: dict[str, int | None] = {}  # states on their way from files
        self._pending_writes: list[int | None] = []

    def resident(self, parameters: Memory, states: Memory, owned_numel: int) -> list[Memory]:
        """Parameters and optimizer states on their devices. With offloading fp32 weights too have separate
        masters, of `owned_numel` elements.
        """
        masters = 4 * owned_numel if self.param_bytes == 4 else 0
        return [
            Memory("parameters", parameters.bytes, self.parameters, is_pinned=self.parameters == "host"),
            Memory("optimizer_states", states.bytes + masters, self.states, is_pinned=self.pins_states),
        ]

    # -- parameter shards -------------------------------------------------------------------------------

    def fetch_ahead(self, unit: EngineUnit) -> None:
        """Start to fetch the shard of a unit whose gather has not started."""
        if self.parameters != "gpu" and not unit.is_gathered and unit.gather_event is None:
            self._fetch(unit)

    def bring(self, unit: EngineUnit) -> None:
        """Bring the unit's shard to the device, for its gather."""
        if self.parameters == "gpu":
            return
        self._fetch(unit)
        event, size = self._pending_fetches.pop(unit.name), self._shard_bytes(unit)
        if self.parameters == "nvme":
            self.host.wait(event, f"shard of {unit.name} is read")
            self.builder.allocate("buffers", size, owner=unit.name)
            self.host.copy(f"fetch {unit.name}", "h2d", size, COMPUTE, module=unit.name, is_blocking=True)

    def drop(self, unit: EngineUnit, gather_event: int) -> None:
        """Free the shard that `bring` fetched, which is needed until event `gather_event`."""
        if self.parameters != "gpu":
            size = self._shard_bytes(unit)
            self.builder.free_when_done("buffers", size, gather_event, owner=unit.name)

    def _fetch(self, unit: EngineUnit) -> None:
        if unit.name in self._pending_fetches:
            return
        size = self._shard_bytes(unit)
        if self.parameters == "nvme":
            self._pending_fetches[unit.name] = self.host.read(f"read {unit.name}", size, module=unit.name)
        else:
            self.builder.allocate("buffers", size, owner=unit.name)
            fetch_event = self.host.copy(f"fetch {unit.name}", "h2d", size, COMPUTE, module=unit.name)
            self._pending_fetches[unit.name] = fetch_event

    def _shard_bytes(self, unit: EngineUnit) -> int:
        return unit.padded_numel // self.world_size * self.param_bytes

    # -- gradients --------------------------------------------------------------------------------------

    def keep_gradient(self, unit: EngineUnit, numel: int, *, is_first: bool) -> None:
        """Copy a reduced shard off the device. Unless `is_first`, it is added to the sum of earlier
        micro-batches.
        """
        builder, host, name, size = self.builder, self.host, unit.name, numel * self.reduce_bytes
        if is_first:
            builder.allocate("gradients", size, self.states, is_pinned=self.pins_states, owner=name)
        elif self.states == "nvme":
            host.wait(host.read(f"read sum {name}", size, module=name), f"sum of {name} is read")
        host.copy(f"gradients {name} to host", "d2h", size, COMPUTE, is_blocking=True, module=name)
        if not is_first:
            addition = HostWork("copy", 3 * size, numel)
            builder.host_wait(builder.add(f"add gradients {name}", CPU, addition, module=name))
        if self.states == "nvme":
            self._pending_writes.append(host.write(f"write gradients {name}", size, module=name))

    def finish_writes(self) -> None:
        """Make the host wait for all file writes."""
        for event in self._pending_writes:
            self.builder.host_wait(event)
        if self._pending_writes:
            self.builder.host("all is written")
        self._pending_writes = []

    def drop_gradients(self, owned_numels: Sequence[int]) -> None:
        for unit, numel in zip(self.units, owned_numels, strict=True):
            size = numel * self.reduce_bytes
            self.builder.free("gradients", size, self.states, is_pinned=self.pins_states, owner=unit.name)

    # -- the step ---------------------------------------------------------------------------------------

    def clip(self, owned_numels: Sequence[int]) -> bool:
        """Take the norm of the gradients on the CPU, reading them from files if they are there. Returns
        whether gradients are scaled at all.
        """
        if not self._scales:
            return False
        for numel in owned_numels:
            if self.states == "nvme":
                read = self.host.read("read gradients", numel * self.reduce_bytes)
                self.host.wait(read, "gradients are read")
            norm = HostWork("copy", numel * self.reduce_bytes, numel)
            self.builder.host_wait(self.builder.add("gradient norm", CPU, norm))
        return True

    @property
    def _scales(self) -> bool:
        return self.training.gradient_clipping > 0 or self.strategy.param_dtype == "fp16"

    def update(self, unit: EngineUnit, numel: int) -> None:
        """Run AdamW on the CPU on a unit's `numel` elements."""
        if self.states == "nvme":
            self._read_states(unit)
            for next_unit in self.units[self.units.index(unit) + 1 :][:1]:
                self._read_states(next_unit)
            self.host.wait(self._pending_reads.pop(unit.name), f"states of {unit.name} are read")
        if self._scales:
            self.host.scale(f"scale gradients {unit.name}", numel)
        self.host.optimizer(f"adamw {unit.name}", numel, self.training.optimizer)
        if self.states == "nvme":
            self._pending_writes.append(self.host.write(f"write states {unit.name}", _STATE_BYTES * numel))

    def _read_states(self, unit: EngineUnit) -> None:
        if unit.name not in self._pending_reads:
            owned_numel = unit.padded_numel // (self.world_size if self.strategy.stage else 1)
            size = (_STATE_BYTES + self.reduce_bytes) * owned_numel
            self._pending_reads[unit.name] = self.host.read(f"read states {unit.name}", size)

    def put(self, unit: EngineUnit, numel: int) -> None:
        """Copy the new parameters to the device that keeps them."""
        host, size, dtype = self.host, numel * self.param_bytes, self.strategy.param_dtype
        if self.states == "gpu":
            host.copy(f"keep {unit.name}", "d2h", size, COMPUTE, is_blocking=True, module=unit.name)
        elif self.parameters != "gpu" or dtype != "fp32":
            host.cast(f"keep {unit.name}", numel, "fp32", dtype)
        if self.parameters == "gpu":
            host.copy(f"parameters {unit.name}", "h2d", size, COMPUTE, module=unit.name)
        elif self.parameters == "nvme":
            self._pending_writes.append(host.write(f"write {unit.name}", size, module=unit.name))


@dataclass
class EngineUnit:
    """Parameters that are gathered and reduced together."""

    name: str
    segments: tuple[str, ...]
    num_parameters: int
    numel: int
    padded_numel: int
    is_kept: bool = False
    is_gathered: bool = True
    gather_event: int | None = None
    """The event of a gather in flight, None if there is none."""
    autograd_bytes: int = 0


def make_engine_units(workload: Workload, world_size: int, strategy: ReferenceConfig) -> list[EngineUnit]:
    """The units: the root, then the blocks in forward order."""
    first_segment, *blocks, last_segment = workload.segments
    between = [segment for segment in blocks if segment.kind == "between"]
    block_segments = [segment for segment in blocks if segment.kind == "block"]
    named_segments = [
        ("root", (first_segment, *between, last_segment)),
        *((block.name, (block,)) for block in block_segments),
    ]
    units = []
    for name, segments in named_segments:
        parameters = [parameter for segment in segments for parameter in segment.parameters]
        numel = sum(parameter.numel for parameter in parameters)
        padded_numel = -(-numel // world_size) * world_size
        is_kept = strategy.keep_gathered and (name == "root" or name == named_segments[-1][0])
        names = tuple(segment.name for segment in segments)
        units.append(EngineUnit(name, names, len(parameters), numel, padded_numel, is_kept))
    return units
