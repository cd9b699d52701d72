"""ZeRO-3's gradients: collected in a bucket, reduced to their shards, added up.

Transcribed from DeepSpeed 0.19.8 `runtime/zero/stage3.py`; the reduction of quantised gradients is
`zsim.plan.frameworks.deepspeed.zeropp.quantized_reduce`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zsim.cost.kernels.update import accumulate_kernels
from zsim.dtypes import DTYPE_BYTES
from zsim.plan.builder import COMPUTE, PlanBuilder, moves
from zsim.plan.frameworks.deepspeed.stage3.coordinator import FetchTrace
from zsim.plan.frameworks.deepspeed.stage3.early import reduce_scatter_one_by_one
from zsim.plan.frameworks.deepspeed.stage3.reduce_scatter import reduce_scatter_coalesced
from zsim.plan.frameworks.deepspeed.zeropp.quantized_reduce import LOCAL, QuantizedReducer
from zsim.plan.step import Hooks
from zsim.plan.workload.workload import ModuleCall
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig

MAX_EVENTS = 2  # fetches and reductions that may be under way before the host blocks


@dataclass(slots=True)
class GradientBucket:
    """Gradients collected for the next reduction: padded shards, elements, and loose gradients' bytes."""

    elements: int = 0
    shard_elements: int = 0
    loose_bytes: int = 0
    parameters: list[int] = field(default_factory=list)

    @property
    def num_tensors(self) -> int:
        return len(self.parameters)


class Zero3Gradients(Hooks):
    """DeepSpeedZeroOptimizer_Stage3's gradient hooks; `world_size` ranks of `shard_group` share states."""

    shard_group = "world"

    def __init__(
        self, builder: PlanBuilder, trace: FetchTrace, config: DeepSpeedConfig, world_size: int
    ) -> None:
        super().__init__(builder)
        self.trace, self.config, self.zero, self.world_size = trace, config, config.zero, world_size
        self.param_bytes = DTYPE_BYTES[config.param_dtype]
        self.reduce_bytes = DTYPE_BYTES[config.communication_dtype]
        self.reduce_stream = "reduce_scatter" if self.zero.overlap_comm else COMPUTE
        self.quantized: QuantizedReducer | None = None
        if LOCAL in builder.groups:
            self.quantized = QuantizedReducer(builder, trace, config, self.reduce_stream)
        self._reduce_events: list[int] = []
        self._bucket = GradientBucket()
        self._numbers = {p.name: number for number, p in enumerate(trace.parameters)}
        self._micro_batch = 0

    def gradient_ready(self, call: ModuleCall) -> None:
        for parameter in reversed(call.parameters):
            self._add_gradient(self._numbers[f"{call.name}.{parameter.name}"], call.name)

    def _add_gradient(self, number: int, name: str) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads and __add_grad_to_ipg_bucket."""
        builder, bucket, zero = self.builder, self._bucket, self.zero
        numel = self.trace.parameters[number].numel
        size = numel * self.param_bytes
        builder.allocate("buffers", size)
        if bucket.elements and bucket.elements + numel > zero.reduce_bucket_size:
            self._reduce()
            bucket = self._bucket
        builder.host(f"gradient of {name}", overhead="deepspeed_gradient_hook", module=name)
        if self.reduce_stream != COMPUTE:
            builder.wait_stream(self.reduce_stream, COMPUTE)
        if zero.contiguous_gradients and bucket.elements + numel <= zero.reduce_bucket_size:
            copied = builder.kernels(
                f"bucket {name}",
                moves(size, numel * self.reduce_bytes),
                stream=self.reduce_stream,
                module=name,
            )
            builder.free_when_done("buffers", size, copied)
        else:
            bucket.loose_bytes += size
        bucket.elements += numel
        bucket.shard_elements += self.trace.parameters[number].shard_numel
        bucket.parameters.append(number)

    def _reduce(self) -> None:
        """__reduce_and_partition_ipg_grads: reduce-scatter the bucket, add the shard to the gradients."""
        builder, bucket, config, stream = self.builder, self._bucket, self.config, self.reduce_stream
        if not bucket.elements:
            return
        if len(self._reduce_events) > MAX_EVENTS:
            builder.host_wait(self._reduce_events.pop(0))
        builder.host("reduce bucket", overhead="deepspeed_reduce")
        if self.zero.enable_sanity_checks and self.world_size > 1:
            for count in (1, bucket.num_tensors):  # how many ids, then the ids, compared on the host
                check = builder.collective("broadcast", 8 * count, "int64", self.shard_group, stream=stream)
                builder.host_wait(check)
        keeps_buffer = (
            self.zero.contiguous_gradients
            and bucket.elements <= self.zero.reduce_bucket_size
            and not self.zero.reduce_scatter
        )
        made = 0
        if self.world_size > 1 and keeps_buffer:
            size = bucket.elements * self.reduce_bytes
            builder.kernels("average bucket", moves(size, size), stream=stream)
            builder.collective(
                "all_reduce", size, config.communication_dtype, self.shard_group, stream=stream
            )
        elif self.quantized is not None:
            made = self.quantized.reduce(bucket.parameters)
        elif self.world_size > 1 and config.fetches_one_by_one:
            size = bucket.elements * self.reduce_bytes
            builder.kernels("average bucket", moves(size, size), stream=stream)
            reduce_scatter_one_by_one(
                builder,
                self.trace,
                bucket.parameters,
                dtype=config.communication_dtype,
                group=self.shard_group,
                stream=stream,
            )
        elif self.world_size > 1:
            made = reduce_scatter_coalesced(
                builder,
                elements=bucket.elements,
                shard_elements=bucket.shard_elements,
                tensors=bucket.num_tensors,
                dtype=config.communication_dtype,
                group=self.shard_group,
                stream=stream,
            )
        done = self._keep_shards(bucket)
        builder.free_when_done("buffers", made + bucket.loose_bytes, done)
        self._reduce_events.append(done)
        self._bucket = GradientBucket()

    def _keep_shards(self, bucket: GradientBucket) -> int:
        """partition_grads: copy the reduced shards into the rank's gradients, or add them."""
        config = self.config
        if self._micro_batch == 0:
            size = bucket.shard_elements * DTYPE_BYTES[config.grad_accum_dtype]
            kernels = moves(bucket.shard_elements * self.reduce_bytes, size, launches=bucket.num_tensors)
        else:
            kernels = accumulate_kernels(
                bucket.shard_elements, config.grad_accum_dtype, config.communication_dtype
            )
        return self.builder.kernels("partition gradients", kernels, stream=self.reduce_stream)

    def end_backward(self) -> None:
        """independent_gradient_partition_epilogue: the last bucket, then the host waits for it."""
        self._reduce()
        self.builder.host_wait(self.builder.record(self.reduce_stream))
        self.builder.host("end of backward")
        self._reduce_events = []
