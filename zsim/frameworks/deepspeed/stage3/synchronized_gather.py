"""ZeRO-3 of DeepSpeed before 0.6: one call per parameter, with the device synchronized around each.

Transcribed from DeepSpeed 0.4.0 `runtime/zero/partition_parameters.py` (`_allgather_param`,
`_reduce_scatter_gradient`) and `stage3.py` (`_synchronize_communication`). Pull request 1453 of 0.6 gathers
the parameters of one fetch together, and waits on events.

# [Note: a trace one step off]
From 0.3.14 on (pull request 867) a hook on the model resets the step of the trace after the model's own entry
has been counted (`stage3.py`, `_pre_forward_hook`). No later module is then the one that the trace has at its
step: `get_params_to_prefetch` fetches nothing ahead and `get_reuse_distance_in_numel` keeps nothing (issue
1069). So no gather overlaps with a product, and a recomputed module is gathered again for its backward. It
is so until 0.6. Only the two releases of stage 3 before, of March 2021, fetch ahead.

# [Note: a synchronized device]
Before every gather, and once a module's parameters are gathered, the host waits for all streams. So every
fetch waits for reductions.

# [Note: a list of parts]
`dist.all_gather` and `dist.reduce_scatter` take lists with a tensor for every rank. Python slices them, and
NCCL's process group copies them from and to a temporary tensor: both costs grow with the number of ranks.
"""

from __future__ import annotations

from zsim.cost.kernels.update import fill_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.deepspeed.settings.config import ZeroConfig
from zsim.frameworks.deepspeed.stage3.coordinator import Fetch
from zsim.frameworks.deepspeed.stage3.fetch_trace import FetchTrace
from zsim.frameworks.deepspeed.stage3.gather import Gatherer
from zsim.plan.builder import COMPUTE, PlanBuilder, move_kernels


def drop_trace(zero: ZeroConfig) -> ZeroConfig:
    """The settings that act as DeepSpeed's do. See [Note: a trace one step off]."""
    return zero.model_copy(update={"prefetch_bucket_size": 0, "max_reuse_distance": 0})


class SynchronizedGatherer(Gatherer):
    """Gathers parameter by parameter. See the module's notes."""

    def split_fetch(self, fetch: Fetch) -> list[Fetch]:
        return [Fetch((number,), fetch.group) for number in fetch.parameters]

    def start(self, part: Fetch) -> None:
        """_allgather_param: zeros, a device synchronization, the slices, the call, the copies."""
        builder, size, (number,) = self.builder, self.padded_bytes(part), part.parameters
        ranks, name = builder.groups[part.group].size, self.trace.parameters[number].name
        builder.allocate("buffers", size)
        builder.kernels(f"zeros for {name}", fill_kernels(size))
        builder.synchronize()
        builder.host(f"slice {name}", overhead="deepspeed_part", events=ranks)
        builder.wait_stream(self.stream, COMPUTE)
        builder.allocate("buffers", size)
        self._collective(part, size, "all_gather", self.config.param_dtype, is_blocking=True)
        kernels = move_kernels(size, size, launches=ranks)
        self._started[number] = builder.kernels(f"copy parts of {name}", kernels, stream=self.stream)
        builder.free_when_done("buffers", size, self._started[number])

    def finish(self, part: Fetch) -> int:
        """Run `_synchronize_communication` and return the event of the gathered parameter."""
        self.builder.synchronize()
        return self._started.pop(part.parameters[0])


def reduce_scatter_per_parameter(
    builder: PlanBuilder, trace: FetchTrace, parameters: list[int], *, dtype: str, group: str, stream: str
) -> None:
    """_reduce_scatter_gradients: one call per parameter, whose list of parts is joined before. The caller
    averages the bucket.
    """
    ranks = builder.groups[group].size
    for number in parameters:
        parameter = trace.parameters[number]
        size = parameter.padded_numel * DTYPE_BYTES[dtype]
        builder.allocate("buffers", size)
        builder.kernels(
            f"join parts of {parameter.name}", move_kernels(size, size, launches=ranks), stream=stream,
            overhead="deepspeed_part", events=ranks,
        )  # fmt: skip
        name = f"reduce_scatter {parameter.name}"
        done = builder.collective(
            "reduce_scatter", size, dtype, group, stream=stream, name=name, module=parameter.name
        )
        builder.free_when_done("buffers", size, done)


def all_reduce_bucket(
    builder: PlanBuilder, size: int, num_tensors: int, *, dtype: str, group: str, stream: str
) -> int:
    """buffered_reduce_fallback, without `contiguous_gradients`: the bucket of `size` bytes is flattened,
    averaged and all-reduced, and copied back. Returns the bytes of the flattened copy.
    """
    builder.allocate("buffers", size)
    builder.move("flatten bucket", size, size, stream=stream)
    builder.move("average bucket", size, size, stream=stream)
    builder.collective("all_reduce", size, dtype, group, stream=stream)
    builder.move("copy bucket back", size, size, num_tensors, stream=stream)
    return size
