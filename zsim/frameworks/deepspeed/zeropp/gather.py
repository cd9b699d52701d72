"""ZeRO++'s gathers: from hpZ's secondary shards, and of qwZ's int8 weights.

Transcribed from DeepSpeed 0.19.8 `runtime/zero/partition_parameters.py` and
`partitioned_param_coordinator.py`.

# [Note: secondary shards]
When a gathered parameter is released, each rank keeps a copy of its shard in the hpZ group, unless it has one
(`_partition_param_sec`). From then on the parameter is gathered inside that group, from the copies. The step
frees all copies (`_post_step`). So the first forward after a step gathers over all ranks, its backward and
all later micro-batches inside the group. A parameter that forward keeps for its backward is released, and
copied, in backward.
"""

from __future__ import annotations

from collections.abc import Iterable

from zsim.cost.kernels.quantization import SCALE_BYTES, dequantize_kernels, quantize_kernels, weight_groups
from zsim.cost.kernels.update import cast_kernels, cat_launches, copy_kernels, fill_kernels
from zsim.errors import InputError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.stage3.coordinator import Fetch
from zsim.frameworks.deepspeed.stage3.fetch_trace import FetchTrace
from zsim.frameworks.deepspeed.stage3.gather import Gatherer, SplitFetch
from zsim.frameworks.deepspeed.stage3.parameter_store import ParameterStore
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.ops import Device, Group, Memory


class SecondaryShards:
    """hpZ's secondary shards: 1/`size` of every parameter per rank. See [Note: secondary shards].

    They are gathered over the ranks of `group` (None: MiCS writes them and never gathers from them). They are
    in host memory if the parameters of `store` are offloaded (`device=self.remote_device`). Releases before
    0.13.2 keep the copies that initialisation wrote, and gather from them in backward only.
    """

    def __init__(self, store: ParameterStore, size: int, group: Group | None) -> None:
        release, offload = store.config.release, store.config.zero.offload_param
        self.store, self.builder, self.trace = store, store.builder, store.trace
        self.size, self.group, self.param_bytes = size, group, store.param_bytes
        self.device: Device = "gpu" if offload is None else "host"
        self.is_pinned = offload is not None and offload.pin_memory
        self._is_refreshed = release.refreshes_secondary_shards
        self._blocks = release.waits_for_secondary_shards
        self._copied_parameters: set[int] = (
            set() if self._is_refreshed else set(range(len(self.trace.parameters)))
        )

    def numel(self, number: int) -> int:
        return self.trace.parameters[number].padded_numel // self.size

    def resident(self) -> list[Memory]:
        """The secondary shards that exist when a step begins."""
        if self._is_refreshed:
            return []
        shard_numel = sum(self.numel(number) for number in range(len(self.trace.parameters)))
        return [Memory("parameters", shard_numel * self.param_bytes, self.device, self.is_pinned)]

    def split(self, fetch: Fetch) -> list[Fetch]:
        """Split a fetch into parameters that are gathered from secondary shards and parameters that are
        not."""
        if self.group is None:
            return [fetch]
        name = self.group.name
        if not self._is_refreshed:
            return [Fetch(fetch.parameters, name if self.builder.phase == "backward" else fetch.group)]
        secondary = tuple(number for number in fetch.parameters if number in self._copied_parameters)
        primary = tuple(number for number in fetch.parameters if number not in self._copied_parameters)
        return [Fetch(part, group) for part, group in ((secondary, name), (primary, fetch.group)) if part]

    def bring(self, part: Fetch, stream: str) -> bool:
        """Copy the secondary shards of a part to the GPU before its gather, if they are in host memory.
        Returns whether the part is gathered from secondary shards.
        """
        if self.group is None or part.group != self.group.name:
            return False
        if self.device == "host":
            size = sum(self.numel(number) for number in part.parameters) * self.param_bytes
            parameters = [self.trace.parameters[number] for number in part.parameters]
            self.store.copy_in("secondary shard", parameters, size, stream)
        return True

    def keep(self, numbers: Iterable[int]) -> None:
        """Keep secondary shards of released parameters. In some releases the host waits for each copy."""
        for number in numbers:
            if number in self._copied_parameters:
                continue
            self._copied_parameters.add(number)
            size, name = self.numel(number) * self.param_bytes, self.trace.parameters[number].name
            self.builder.allocate("parameters", size, self.device, is_pinned=self.is_pinned)
            if self.device == "host":
                self._keep_in_host_memory(name, size)
                continue
            copy_event = self.builder.kernels(
                f"secondary shard of {name}", (*fill_kernels(size), *copy_kernels(size)), module=name
            )
            if self._blocks:
                self.builder.host_wait(copy_event)

    def _keep_in_host_memory(self, name: str, size: int) -> None:
        """Allocate a secondary shard in host memory (pinning copies it), zero it, and write it with a
        blocking copy."""
        host, clears = self.store.host, self.store.config.release.clears_secondary_shards
        host.fill(f"make secondary shard of {name}", (2 * self.is_pinned + clears) * size)
        host.copy(
            f"secondary shard of {name}", "d2h", size, COMPUTE,
            is_pinned=self.is_pinned, is_blocking=True, module=name,
        )  # fmt: skip

    def keep_all(self) -> list[Memory]:
        """Start with the secondary shards of all parameters that forwards release. Returns their memory."""
        if not self._is_refreshed:
            return self.resident()
        released = [n for n, parameter in enumerate(self.trace.parameters) if not parameter.is_persistent]
        self._copied_parameters.update(released)
        size = sum(map(self.numel, released)) * self.param_bytes
        return [Memory("parameters", size, self.device, self.is_pinned)]

    def drop(self) -> None:
        """_post_step: free the copies, as the weights are new."""
        if self._is_refreshed:
            size = sum(self.numel(number) for number in self._copied_parameters) * self.param_bytes
            self.builder.free("parameters", size, self.device, is_pinned=self.is_pinned)
            self._copied_parameters.clear()


class QuantizedGatherer(Gatherer):
    """The gatherer of qwZ, with or without hpZ: two calls, of int8 values and of fp32 scales."""

    def __init__(
        self,
        builder: PlanBuilder,
        trace: FetchTrace,
        config: DeepSpeedConfig,
        stream: str,
        group: Group,
        split: SplitFetch | None,
    ) -> None:
        super().__init__(builder, trace, config, stream, group, split)
        self._casts = config.release.casts_before_quantizing
        self._is_cast = self._casts and config.param_dtype != "fp16"
        self._groups: dict[int, int] = {}  # elements of an input -> groups

    def start(self, part: Fetch) -> None:
        """Join the shards, cast and quantise them. Then gather the int8 values and the scales."""
        builder, ranks = self.builder, self.builder.groups[part.group].size
        numel = self._shard_numel(part)
        groups = self._groups_of(part, numel)
        builder.allocate("buffers", numel * ranks)
        joined_bytes = numel * self.param_bytes if len(part.parameters) > 1 else 0
        cast_bytes = 2 * numel if self._is_cast else 0
        local_bytes = numel + groups * SCALE_BYTES
        builder.allocate("buffers", joined_bytes)
        builder.allocate("buffers", cast_bytes)
        builder.allocate("buffers", local_bytes)
        builder.kernels(
            f"quantize {self.parameters(part)[0].name}",
            (
                *copy_kernels(joined_bytes),
                *quantize_kernels(numel, self.config.param_dtype, groups, casts=self._casts),
            ),
            stream=self.stream,
        )
        builder.free("buffers", joined_bytes + cast_bytes)
        builder.allocate("buffers", groups * SCALE_BYTES * ranks, stream=self.stream)
        self._collective(part, numel * ranks, "all_gather", "int8")
        last = self._collective(part, groups * SCALE_BYTES * ranks, "all_gather", "fp32", prefix="scales of ")
        builder.free_when_done("buffers", local_bytes, last)

    def finish(self, part: Fetch) -> int:
        """Dequantise to fp16, split into the parameters, cast to their type, and return the event."""
        builder, ranks = self.builder, self.builder.groups[part.group].size
        builder.stream_wait(self.stream, self._started.pop(part.parameters[0]))
        shard = self._shard_numel(part)
        groups = self._groups_of(part, shard)
        parameters = self.parameters(part)
        is_single = len(parameters) == 1
        numel = parameters[0].numel if is_single else shard * ranks
        parameter_numel = sum(parameter.numel for parameter in parameters)
        builder.allocate("buffers", 2 * numel)
        kernels = list(dequantize_kernels(numel, groups * ranks))
        temporary = 2 * numel
        if is_single and not self._is_cast:
            temporary = 0  # the dequantised tensor is the parameter
        else:
            builder.allocate("buffers", parameter_numel * (self.param_bytes if self._is_cast else 2))
        if not is_single:
            largest = 2 * max(parameter.numel for parameter in parameters) if self._is_cast else 0
            builder.allocate("buffers", largest)
            builder.free("buffers", largest)
            kernels += copy_kernels(2 * parameter_numel, launches=len(parameters) * cat_launches(ranks))
            name, count = f"slice {parameters[0].name}", len(parameters)
            builder.host(name, overhead="deepspeed_part", events=ranks)
            builder.host(name, overhead="deepspeed_gathered_part", events=count * ranks)
        if self._is_cast:
            kernels += cast_kernels(parameter_numel, "fp16", self.config.param_dtype)
        event = builder.kernels(f"dequantize {parameters[0].name}", kernels, stream=self.stream)
        received = shard * ranks + groups * SCALE_BYTES * ranks
        builder.free_when_done("buffers", received + temporary, event)
        return event

    def gathered_bytes(self, number: int) -> int:
        return self.trace.parameters[number].numel * (self.param_bytes if self._is_cast else 2)

    def _shard_numel(self, part: Fetch) -> int:
        """Elements of this rank's input of the gather."""
        ranks = self.builder.groups[part.group].size
        return sum(parameter.padded_numel // ranks for parameter in self.parameters(part))

    def _groups_of(self, part: Fetch, numel: int) -> int:
        """The number of quantisation groups. Raises InputError where CUDAQuantizer asserts."""
        cached_groups = self._groups.get(numel)
        if cached_groups is not None:
            return cached_groups
        groups = weight_groups(numel)
        if groups is None:
            first, *other_parameters = self.parameters(part)
            suffix = f" and {len(other_parameters)} more" if other_parameters else ""
            ranks = self.builder.groups[part.group].size
            key = f"{self.config.name}: zero_optimization.zero_quantized_weights"
            raise InputError(
                f"{key}: {first.name}{suffix} has shards of {numel:,} elements on {ranks} GPUs, and "
                "DeepSpeed quantises multiples of 8; expected another number of GPUs, or a "
                "stage3_param_persistence_threshold that keeps it"
            )
        return self._groups.setdefault(numel, groups)
