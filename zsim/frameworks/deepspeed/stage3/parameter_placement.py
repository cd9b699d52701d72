"""The devices that keep ZeRO-3's shards of the 16-bit parameters between uses: GPU, host memory or NVMe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zsim.dtypes import DTYPE_BYTES
from zsim.errors import InputError
from zsim.frameworks.deepspeed.drive_files import aligned_numel, swap_floor_bytes
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.stage3.fetch_trace import ZeroParameter
from zsim.plan.ops import Memory

ParameterDevice = Literal["gpu", "host", "nvme"]


@dataclass(frozen=True)
class ParameterPlacement:
    """The device of each parameter's shard, and the buffers that serve the copies."""

    devices: tuple[ParameterDevice, ...]
    """The device of each parameter."""
    flat_numel: int
    """Elements of the pinned flat buffers in host memory."""
    swap_numel: int
    """Elements of the pinned buffers for reading."""
    pool_numel: int
    """Elements of the pinned buffers for writing back."""
    reads_directly: bool = False
    """Whether the buffers for reading are on the GPU (GPUDirect Storage)."""

    def comes_over_pcie(self, number: int) -> bool:
        """Whether a gather first copies this shard from host memory to the GPU."""
        return self.devices[number] == "host" or (self.devices[number] == "nvme" and not self.reads_directly)

    def memory(self, parameters: Sequence[ZeroParameter], element_bytes: int) -> list[Memory]:
        """The shards on each device, and the buffers."""
        numels = dict.fromkeys(("gpu", "host", "nvme"), 0)
        for device, parameter in zip(self.devices, parameters, strict=True):
            numels[device] += parameter.shard_numel
        host_numel = max(numels["host"], self.flat_numel)
        return [
            Memory("parameters", numels["gpu"] * element_bytes),
            Memory("parameters", host_numel * element_bytes, "host", is_pinned=self.flat_numel > 0),
            Memory("parameters", numels["nvme"] * element_bytes, "nvme"),
            Memory(
                "buffers",
                self.swap_numel * element_bytes,
                "gpu" if self.reads_directly else "host",
                is_pinned=not self.reads_directly,
            ),
            Memory("buffers", self.pool_numel * element_bytes, "host", is_pinned=True),
        ]


def place_parameters(
    parameters: Sequence[ZeroParameter], sub_groups: Sequence[Sequence[int]], config: DeepSpeedConfig
) -> ParameterPlacement:
    """DeepSpeed's choice of devices (stage3.py, `_create_fp16_partitions_with_defragmentation`).

    With NVMe, sub-groups move in order to a flat buffer in host memory, as long as complete sub-groups fit
    into `max_in_cpu`. In the other sub-groups, shards below the swap floor stay in host memory. Raises
    InputError where DeepSpeed's swapper fails: a shard larger than `buffer_size`.
    """
    offload = config.zero.offload_param
    if offload is None:
        return ParameterPlacement(tuple("gpu" for _ in parameters), 0, 0, 0)
    total = sum(parameter.shard_numel for parameter in parameters)
    if offload.device == "cpu":
        return ParameterPlacement(tuple("host" for _ in parameters), total, 0, 0)
    element_bytes = DTYPE_BYTES[config.param_dtype]
    floor = swap_floor_bytes(config.aio)
    flat = total if total <= offload.max_in_cpu else offload.max_in_cpu
    devices: list[ParameterDevice] = ["host"] * len(parameters)
    total_numel, needs_pool, largest, pool = 0, False, 0, 0
    for group in sub_groups:
        numel = sum(parameters[number].shard_numel for number in group)
        total_numel += numel
        if numel > largest:
            # the pool is sized by whole parameters, not shards (stage3.py, 0.10 to 0.19.8)
            largest = numel
            pool = sum(aligned_numel(parameters[number].numel, element_bytes, config.aio) for number in group)
        if total_numel <= flat:
            continue
        needs_pool = True
        for number in group:
            if parameters[number].shard_numel * element_bytes >= floor:
                devices[number] = "nvme"
    for number, device in enumerate(devices):
        parameter = parameters[number]
        if device == "nvme" and parameter.shard_numel > offload.buffer_size:
            raise InputError(
                f"{config.name}: zero_optimization.offload_param.buffer_size: found {offload.buffer_size} "
                f"elements, but the shard of '{parameter.name}' has {parameter.shard_numel}; expected at "
                "least that many"
            )
    swap = offload.buffer_count * aligned_numel(offload.buffer_size, element_bytes, config.aio)
    return ParameterPlacement(tuple(devices), flat, swap, pool if needs_pool else 0, config.aio.use_gds)
