"""ZeRO-3's handling of shards of the 16-bit parameters that are off the GPU between uses.

Transcribed from DeepSpeed 0.19.8 `runtime/zero/stage3.py` and `partition_parameters.py`.

# [Note: blocking shard copies]
A gather first copies the rank's own shards to the GPU with `.to(device)`, which is not `non_blocking`: the
host waits for the copy, and for all gathers before it on the same stream, even for pinned memory. So a
prefetch overlaps with the kernels issued before it and never with the kernels of the module that issues it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.deepspeed.drive_files import aligned_numel, drive_access
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.stage3.fetch_trace import FetchTrace, ZeroParameter
from zsim.frameworks.deepspeed.stage3.parameter_placement import place_parameters
from zsim.frameworks.deepspeed.stage3.parameter_swapper import ParameterSwapper
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.ops import Memory
from zsim.plan.shared.host_side import HostSide


class ParameterStore:
    """The shards at their devices (GPU, host memory, NVMe). It brings them to the GPU for a gather and takes
    new weights. If `is_single_rank`, the shards are whole parameters.
    """

    def __init__(
        self,
        builder: PlanBuilder,
        trace: FetchTrace,
        groups: Sequence[Sequence[int]],
        config: DeepSpeedConfig,
        *,
        is_single_rank: bool,
    ) -> None:
        self.builder, self.trace, self.groups, self.config = builder, trace, groups, config
        self.host = HostSide(builder, drive_access(config.aio))
        self.placement = place_parameters(trace.parameters, groups, config)
        self.param_bytes = DTYPE_BYTES[config.param_dtype]
        self.is_single_rank = is_single_rank
        offload = config.zero.offload_param
        self.is_on_gpu = offload is None
        self._swapper: ParameterSwapper | None = None
        if offload is not None and offload.device == "nvme":
            self._swapper = ParameterSwapper(self.host, trace, self.placement, config)

    def resident(self) -> list[Memory]:
        """The shards on each device, and the buffers."""
        return self.placement.memory(self.trace.parameters, self.param_bytes)

    # -- to the GPU -------------------------------------------------------------------------------------

    def needs_read(self, number: int) -> bool:
        """Whether a shard is on NVMe and not being read."""
        return self._swapper is not None and self._swapper.needs_read(number)

    def bring(self, numbers: Sequence[int], stream: str) -> None:
        """Read the shards from NVMe and copy them to the GPU, before a gather on `stream`. See [Note:
        blocking shard copies].
        """
        if self.is_on_gpu:
            return
        if self._swapper is not None:
            self._swapper.ensure(numbers)
        parameters = [
            self.trace.parameters[number] for number in numbers if self.placement.comes_over_pcie(number)
        ]
        size = sum(parameter.shard_numel for parameter in parameters) * self.param_bytes
        if size:
            self.copy_in("shard", parameters, size, stream)

    def copy_in(self, kind: str, parameters: Sequence[ZeroParameter], size: int, stream: str) -> None:
        """Copy `size` bytes of shards of kind `kind` to the GPU, for a gather."""
        first = parameters[0].name
        if not self.is_single_rank:  # else the copy is the parameter, and does not block
            self.builder.allocate("buffers", size)
        suffix = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
        event = self.host.copy(
            f"{kind} of {first}{suffix}",
            "h2d",
            size,
            stream,
            is_blocking=not self.is_single_rank,
            module=first,
        )
        if not self.is_single_rank:
            assert event is not None
            self.builder.host(f"copied {first}")
            self.builder.free_when_done("buffers", size, event)

    def read_ahead(self, in_flight: Collection[int], upcoming: Iterable[int]) -> None:
        """Start to read `upcoming` shards from NVMe, after the fetches of a module."""
        if self._swapper is not None and self.config.zero.prefetch_bucket_size > 0:
            self._swapper.prefetch(in_flight, upcoming)

    def release(self, numbers: Sequence[int]) -> None:
        """Release the buffers of shards from NVMe, as their gathered parameters are released."""
        if self._swapper is not None:
            self._swapper.release(numbers)

    def bring_persistent(self) -> None:
        """Bring the shards of persistent parameters to the GPU, which gathers them after the step
        (`_allgather_params_coalesced`)."""
        persistent_numbers = [
            number
            for number, parameter in enumerate(self.trace.parameters)
            if parameter.is_persistent and self.placement.devices[number] != "gpu"
        ]
        size = (
            sum(self.trace.parameters[number].shard_numel for number in persistent_numbers) * self.param_bytes
        )
        self.host.copy("shards of persistent parameters", "h2d", size, COMPUTE, is_blocking=True)

    # -- new weights ------------------------------------------------------------------------------------

    def put_from_gpu(self, group: int) -> None:
        """Move the new weights of a sub-group, updated on the GPU, to their devices."""
        numels = self._split(group)
        offloaded_bytes = (numels["host"] + numels["nvme"]) * self.param_bytes
        self.host.copy(f"weights of sub-group {group}", "d2h", offloaded_bytes, COMPUTE, is_blocking=True)
        self._write(group)

    def put_from_cpu(self, group: int) -> None:
        """Move the new weights of a sub-group, cast by the CPU, to their devices. The copy to the GPU is
        pageable.
        """
        numels, dtype = self._split(group), self.config.param_dtype
        master = self.config.master_weights_dtype
        if dtype != master or not numels["gpu"]:
            self.host.cast(f"cast weights of sub-group {group}", sum(numels.values()), master, dtype)
        self.host.copy(
            f"weights of sub-group {group}", "h2d", numels["gpu"] * self.param_bytes, COMPUTE, is_pinned=False
        )
        self._write(group)

    def _split(self, group: int) -> dict[str, int]:
        """This rank's elements of a sub-group by the device of its 16-bit weights."""
        numels = {"gpu": 0, "host": 0, "nvme": 0}
        for number in self.groups[group]:
            numels[self.placement.devices[number]] += self.trace.parameters[number].shard_numel
        return numels

    def _write(self, group: int) -> None:
        """swap_out_partitioned_params: one submission of writes, for which the host waits."""
        size = sum(
            self._file_bytes(number)
            for number in self.groups[group]
            if self.placement.devices[number] == "nvme"
        )
        event = self.host.write(f"write weights of sub-group {group}", size)
        self.host.wait(event, f"wait for weights of sub-group {group}")

    def _file_bytes(self, number: int) -> int:
        shard = self.trace.parameters[number].shard_numel
        return aligned_numel(shard, self.param_bytes, self.config.aio) * self.param_bytes
