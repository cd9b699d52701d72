"""The lower bounds of Megatron.

# [Note: reduced behind the last backward]
Megatron reduces what it does not overlap after the last backward, and gathers parameters after the update.
With overlap a stage is one bucket (but for the first: `MegatronSchedule`), which is complete when the stage's
last backward ends. The rank with stage 0 does so behind the drain. The others are done before it, but where
the norm of the gradients is taken over all ranks none goes on until all are done.
"""

from __future__ import annotations

from collections.abc import Iterator

from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.plan.ops import CollectiveKind
from zsim.specs.experiment.job import Job
from zsim.study.tune.framework_bounds import FrameworkBounds


class MegatronBounds(FrameworkBounds[MegatronConfig]):
    """Reductions behind the last backward, blocks' Python, and the model states."""

    counts_stages = True
    waits_for_messages = True
    calls_modules_eagerly = False

    def exposed_collectives(
        self, job: Job, config: MegatronConfig, numel: int, numel_of_last: int
    ) -> Iterator[tuple[CollectiveKind, int, str]]:
        """See [Note: reduced behind the last backward]. None where several optimizers or experts spread
        states over fewer ranks.
        """
        if config.optimizer_instances > 1 or job.parallelism.experts.ranks > 1:
            return
        if not config.is_contiguous or config.has_whole_tensor_owners or config.fsdp is not None:
            return
        reduced = numel_of_last if config.overlap_grad_reduce else numel
        yield "reduce_scatter" if config.distributed_optimizer else "all_reduce", reduced, config.grad_dtype
        if config.distributed_optimizer and not config.overlap_param_gather:
            yield "all_gather", numel, "fp8" if config.fp8_param_gather else config.param_dtype

    def checkpoint_share(self, job: Job, config: MegatronConfig) -> float:
        return 1 / job.parallelism.tensor if config.distributes_checkpoints else 1.0

    def block_overhead(self, config: MegatronConfig) -> str | None:
        return config.block_overhead

    def bytes_per_parameter(self, job: Job, config: MegatronConfig, moments: int) -> float:
        ranks = job.data_parallel_size * job.parallelism.context
        master = 0 if config.param_dtype == "fp32" else 4
        configured_states = config.precision_aware
        if config.offload is not None:
            states = 0.0
        elif configured_states is not None:
            moment = sum(DTYPE_BYTES[dtype] for dtype in configured_states.moment_dtypes)
            states = (
                moment + (configured_states.master_bytes if configured_states.has_masters else master)
            ) / ranks
        else:
            states = (master + 4 * moments) / (ranks if config.shards_states else 1)
        parameter = 1 if config.fp8_param_gather else DTYPE_BYTES[config.param_dtype]
        gradient = DTYPE_BYTES[config.grad_dtype]
        if config.fsdp is None:
            return parameter + gradient + states
        fsdp = config.fsdp
        shared = ranks // config.optimizer_instances
        num_shards = 1 if not fsdp.shards_states else ranks if fsdp.outer_sharding == "optim" else shared
        states = (4 + 4 * moments) / num_shards
        states += gradient / (shared if fsdp.shards_gradients else 1)
        return states + parameter / (shared if fsdp.shards_parameters else 1)


BOUNDS = MegatronBounds()
