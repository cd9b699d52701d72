"""MiCS: states sharded inside groups, gradients all-reduced between the groups at the end of accumulation.

Transcribed from DeepSpeed 0.19.2 `runtime/zero/mics.py` and `mics_utils.py`. Source: Zhang et al., MiCS, 2022
(arXiv 2205.00119), sections 3.2 (sharding groups), 3.3 (hierarchical gathers) and 3.4 (two-hop gradients).
"""

from __future__ import annotations

from zsim.dtypes import DTYPE_BYTES
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.stage3.bucket import GradientBucket
from zsim.frameworks.deepspeed.stage3.coordinator import Fetch
from zsim.frameworks.deepspeed.stage3.fetch_trace import FetchTrace
from zsim.frameworks.deepspeed.stage3.gather import Gatherer
from zsim.frameworks.deepspeed.stage3.schedule import Zero3Schedule
from zsim.frameworks.deepspeed.zeropp.gather import SecondaryShards
from zsim.frameworks.deepspeed.zeropp.quantized_reduce import QuantizedReducer
from zsim.plan.builder import PlanBuilder, move_kernels
from zsim.plan.ops import Group
from zsim.plan.stage import Stage


class MicsGatherer(Gatherer):
    """Gathers all parameters of a fetch in one coalesced call, in place. With `hierarchy` it gathers in two
    stages, over the group of the GPUs of a node and the group of the same GPU of every node.
    """

    def __init__(
        self,
        builder: PlanBuilder,
        trace: FetchTrace,
        config: DeepSpeedConfig,
        stream: str,
        group: Group,
        hierarchy: tuple[Group, Group] | None,
    ) -> None:
        super().__init__(builder, trace, config, stream, group)
        self.hierarchy = hierarchy

    def split_fetch(self, fetch: Fetch) -> list[Fetch]:
        return [fetch]

    def start(self, part: Fetch) -> None:
        size = self.padded_bytes(part)
        self.builder.allocate("buffers", size, stream=self.stream)
        if self.hierarchy is not None:
            self._gather_hierarchically(part, size, *self.hierarchy)
        else:
            self._collective(part, size, "all_gather", self.config.param_dtype)

    def _gather_hierarchically(
        self, part: Fetch, size: int, node_group: Group, cross_node_group: Group
    ) -> None:
        """_hierarchical_all_gather_params: gather this GPU's pieces from the other nodes, copy them to their
        places, then gather all pieces from the node's other GPUs."""
        builder, dtype = self.builder, self.config.param_dtype
        piece_bytes = size // node_group.size
        num_slices = len(part.parameters) * cross_node_group.size
        builder.host("slice pieces", overhead="deepspeed_part", events=num_slices)
        self._collective(
            part, piece_bytes, "all_gather", dtype, group=cross_node_group.name, is_blocking=True
        )
        builder.allocate("buffers", piece_bytes)
        placement = builder.kernels(
            f"place {self.parameters(part)[0].name}",
            move_kernels(2 * piece_bytes, 2 * piece_bytes, launches=2 * len(part.parameters)),
            stream=self.stream,
        )
        builder.free_when_done("buffers", piece_bytes, placement)
        self._collective(part, size, "all_gather", dtype, group=node_group.name)

    def _needs_split(self, part: Fetch) -> bool:
        return False


class MicsSchedule(Zero3Schedule):
    """MiCS_Optimizer: ZeRO-3 inside the shard group.

    Consecutive ranks form a shard group, and ranks of equal index in the groups are replicas. For
    hierarchical gathers a shard group is split into as many parts as complete nodes fit into it
    (create_mics_comm_groups).
    """

    def __init__(self, stage: Stage, config: DeepSpeedConfig) -> None:
        size = config.zero.mics_shard_size
        super().__init__(stage, config)
        self.replicate = stage.group("replicate", stage.ranks // size, size)

    def _make_group(self) -> Group:
        return self.stage.group("shard", self.zero.mics_shard_size)

    def _offload_ratio(self, ratio: float) -> float:
        """0 in releases that have a ratio: `_return_mics_optimizer` of engine.py does not pass the ratio on,
        and the default of DeepSpeedZeroOptimizer_Stage3 is 0."""
        if not self.config.release.has_partial_offload:
            return ratio
        self.builder.notes.append(
            f"{self.config.name}: zero_optimization.offload_optimizer: with mics_shard_size DeepSpeed "
            f"{self.config.release} does not pass the ratio on to its optimizer, so that all sub-groups' "
            "states stay on the GPU and only sums of gradients go to host memory"
        )
        return 0.0

    def _make_quantized(self) -> QuantizedReducer | None:
        """None: MiCS_Optimizer gets none of qgZ's groups."""
        return None

    def _make_secondary(self) -> SecondaryShards | None:
        size = min(self.zero.zero_hpz_partition_size, self.stage.ranks)
        if size <= 1 or self.world_size == 1:
            return None
        return SecondaryShards(self.store, size, None)

    def _make_gatherer(self) -> Gatherer:
        hierarchy = None
        if self.zero.mics_hierarchical_params_gather:
            num_nodes = self.group.size // self.config.gpus_per_node
            gpus_per_node = self.group.size // num_nodes
            hierarchy = (
                self.stage.group("shard intra", gpus_per_node),
                self.stage.group("shard inter", num_nodes, gpus_per_node),
            )
        return MicsGatherer(self.builder, self.trace, self.config, self.gather_stream, self.group, hierarchy)

    def _keep_shards(self, bucket: GradientBucket) -> int:
        """allreduce_mics_shard_grads: at the boundary, all-reduce the bucket's shards over the replicas."""
        last_event = super()._keep_shards(bucket)
        if not self._is_boundary or self.replicate.size == 1:
            return last_event
        dtype, stream = self.config.grad_accum_dtype, self.reduce_stream
        size = bucket.shard_elements * DTYPE_BYTES[dtype]
        self.builder.kernels(
            "average shards", move_kernels(size, size, launches=bucket.num_tensors), stream=stream
        )
        return self.builder.collective(
            "all_reduce", size, dtype, self.replicate.name, stream=stream, name="all_reduce shards"
        )
