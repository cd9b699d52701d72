"""DeepSpeed's swapper of parameters: shards on NVMe are read through a few pinned buffers.

Transcribed from DeepSpeed 0.19.8 `swap_tensor/partitioned_param_swapper.py` and
`partitioned_param_coordinator.py`. A shard takes a buffer when its read starts and returns it when the
gathered parameter is released.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from zsim.dtypes import DTYPE_BYTES
from zsim.errors import InputError
from zsim.frameworks.deepspeed.drive_files import aligned_numel
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.stage3.fetch_trace import FetchTrace
from zsim.frameworks.deepspeed.stage3.parameter_placement import ParameterPlacement
from zsim.plan.shared.host_side import HostSide


class ParameterSwapper:
    """The state of the shards (on NVMe, being read, in a buffer) and the number of free buffers."""

    def __init__(
        self, host: HostSide, trace: FetchTrace, placement: ParameterPlacement, config: DeepSpeedConfig
    ) -> None:
        assert config.zero.offload_param is not None
        self.host = host
        self.parameters = trace.parameters
        self.placement = placement
        self.config = config
        self.num_buffers = config.zero.offload_param.buffer_count
        self._num_free = self.num_buffers
        self._element_bytes = DTYPE_BYTES[config.param_dtype]
        self._buffered_shards: set[int] = set()  # in a buffer, or being read into it
        self._reading: dict[int, int] = {}  # parameter -> event of its read

    def needs_read(self, number: int) -> bool:
        """Whether a shard is on NVMe and not being read."""
        return self.placement.devices[number] == "nvme" and number not in self._buffered_shards

    def ensure(self, numbers: Sequence[int]) -> None:
        """Read missing shards and wait, before a gather. If none is missing but one is being read, wait for
        all reads.
        """
        missing = [number for number in numbers if self.needs_read(number)]
        if missing:
            if len(missing) > self._num_free:
                self._fail(missing)
            self._read(missing)
            self._wait()
        elif any(number in self._reading for number in numbers):
            self._wait()

    def _fail(self, missing: Sequence[int]) -> None:
        names = self.parameters
        busy = self.num_buffers - self._num_free
        raise InputError(
            f"{self.config.name}: zero_optimization.offload_param.buffer_count: found {self.num_buffers}, "
            f"but '{names[missing[0]].name}' needs {len(missing)} while {busy} are taken; expected at least "
            f"{busy + len(missing)}, or a smaller stage3_max_reuse_distance"
        )

    def prefetch(self, in_flight: Collection[int], upcoming: Iterable[int]) -> None:
        """Start reading `upcoming` shards: of up to twice the elements being gathered, while buffers are
        free."""
        parameters = self.parameters
        limit = 2 * sum(parameters[number].numel for number in in_flight)
        considered_numel = 0
        chosen: list[int] = []
        for number in upcoming:
            if considered_numel > limit or len(chosen) >= self._num_free:
                break
            if self.needs_read(number) and number not in chosen:
                chosen.append(number)
            considered_numel += parameters[number].numel
        if chosen:
            self._read(chosen)

    def release(self, numbers: Sequence[int]) -> None:
        """Return the buffers of the shards of released parameters."""
        for number in numbers:
            if number in self._buffered_shards:
                self._buffered_shards.remove(number)
                self._num_free += 1

    def _read(self, numbers: Sequence[int]) -> None:
        """Issue one submission of reads. Each read takes a buffer."""
        parameters = self.parameters
        size = sum(
            aligned_numel(parameters[number].shard_numel, self._element_bytes, self.config.aio)
            for number in numbers
        )
        first = parameters[numbers[0]].name
        suffix = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
        event = self.host.read(
            f"read {first}{suffix}",
            size * self._element_bytes,
            module=first,
            is_direct=self.config.aio.use_gds,
        )
        assert event is not None
        for number in numbers:
            self._buffered_shards.add(number)
            self._reading[number] = event
        self._num_free -= len(numbers)

    def _wait(self) -> None:
        """synchronize_reads: make the host wait for all reads in flight."""
        for event in dict.fromkeys(self._reading.values()):
            self.host.builder.host_wait(event)
        self._reading = {}
        self.host.builder.host("wait for reads")
