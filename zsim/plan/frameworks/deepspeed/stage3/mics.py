"""MiCS: states sharded inside groups, gradients all-reduced among the groups at the end of accumulation.

Transcribed from DeepSpeed 0.19.2 `runtime/zero/mics.py` and `mics_utils.py`; Zhang et al., MiCS, 2022
(arXiv 2205.00119), sections 3.2 (sharding groups), 3.3 (hierarchical gathers) and 3.4 (two-hop gradients).
"""

from __future__ import annotations

from zsim.dtypes import DTYPE_BYTES
from zsim.plan.builder import PlanBuilder, moves
from zsim.plan.frameworks.deepspeed.stage3.coordinator import Fetch
from zsim.plan.frameworks.deepspeed.stage3.gather import Gatherer
from zsim.plan.frameworks.deepspeed.stage3.gradients import GradientBucket
from zsim.plan.frameworks.deepspeed.stage3.schedule import Zero3Schedule
from zsim.plan.ops import Group, Plan
from zsim.plan.step import walk_step
from zsim.plan.workload.workload import Workload
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig
from zsim.specs.strategy.training import Training

SHARD, REPLICATE = "shard", "replicate"
INTRA, INTER = "shard intra", "shard inter"


class MicsGatherer(Gatherer):
    """Every parameter straight into its place, all of a fetch in one coalesced call."""

    def parts(self, fetch: Fetch) -> list[Fetch]:
        return [Fetch(fetch.parameters, SHARD)]

    def start(self, part: Fetch) -> None:
        size = self.padded_bytes(part)
        self.builder.allocate("buffers", size)
        if self.config.zero.mics_hierarchical_params_gather:
            self._in_two_stages(part, size)
        else:
            self._collective(part, size, "all_gather", self.config.param_dtype)

    def _in_two_stages(self, part: Fetch, size: int) -> None:
        """_hierarchical_all_gather_params: this GPU's pieces from the other nodes, to their places, then all
        pieces from the node's other GPUs."""
        builder, dtype = self.builder, self.config.param_dtype
        pieces = size // builder.groups[INTRA].size
        turns = len(part.parameters) * builder.groups[INTER].size
        builder.host("slice pieces", overhead="deepspeed_part", events=turns)
        self._collective(part, pieces, "all_gather", dtype, group=INTER)
        builder.allocate("buffers", pieces)
        placed = builder.kernels(
            f"place {self.parameters(part)[0].name}",
            moves(2 * pieces, 2 * pieces, launches=2 * len(part.parameters)),
            stream=self.stream,
        )
        builder.free_when_done("buffers", pieces, placed)
        self._collective(part, size, "all_gather", dtype, group=INTRA)

    def finish(self, part: Fetch) -> int:
        return self._started.pop(part.parameters[0])


class MicsSchedule(Zero3Schedule):
    """MiCS_Optimizer: ZeRO-3 inside the shard group."""

    shard_group = SHARD

    def _make_gatherer(self) -> Gatherer:
        return MicsGatherer(self.builder, self.trace, self.config, self.gather_stream)

    def begin_micro_batch(self, number: int, *, is_last: bool) -> None:
        super().begin_micro_batch(number, is_last=is_last)
        self._is_boundary = is_last

    def _keep_shards(self, bucket: GradientBucket) -> int:
        """allreduce_mics_shard_grads: at the boundary, this bucket's shards of all replicas."""
        kept = super()._keep_shards(bucket)
        if not self._is_boundary or self.builder.groups[REPLICATE].size == 1:
            return kept
        dtype, stream = self.config.grad_accum_dtype, self.reduce_stream
        size = bucket.shard_elements * DTYPE_BYTES[dtype]
        self.builder.kernels("average shards", moves(size, size, launches=bucket.num_tensors), stream=stream)
        return self.builder.collective(
            "all_reduce", size, dtype, REPLICATE, stream=stream, name="all_reduce shards"
        )


def mics_groups(config: DeepSpeedConfig, world_size: int) -> list[Group]:
    """Neighbours shard, equal places of the groups are replicas; for hierarchical gathers the neighbours
    split into as many parts as whole nodes fit into them (create_mics_comm_groups)."""
    size = config.zero.mics_shard_size
    groups = [
        Group.regular(SHARD, world_size, size),
        Group.regular(REPLICATE, world_size, world_size // size, size),
    ]
    if config.zero.mics_hierarchical_params_gather:
        span = size // config.gpus_per_node
        groups += [
            Group.regular(INTRA, world_size, size // span),
            Group.regular(INTER, world_size, span, size // span),
        ]
    return groups


def mics_plan(workload: Workload, config: DeepSpeedConfig, training: Training, world_size: int) -> Plan:
    """One steady step of MiCS."""
    builder = PlanBuilder(mics_groups(config, world_size))
    schedule = MicsSchedule(builder, workload, config, training, config.zero.mics_shard_size)
    walk_step(schedule, workload, training.gradient_accumulation_steps)
    return builder.finish("deepspeed", world_size, schedule.resident())
