"""qgZ: gradients reduced in int4 by two all-to-alls, inside the node and between the nodes.

Transcribed from DeepSpeed 0.19.8 `runtime/comm/coalesced_collectives.py` (all_to_all_quant_reduce), and for
LoCo's error feedback from 0.16.9 (all_to_all_loco_quant_reduce). Tensors are reduced one after another,
whatever their bucket. Vectors, and tensors that two hops cannot divide, are reduce-scattered one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.kernels.quantization import (
    SCALE_BYTES,
    dequantize_kernels,
    gradient_groups,
    quantize_kernels,
    reduce_kernels,
    sum_kernels,
    swizzle_kernels,
)
from zsim.errors import InputError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.stage3.bucket import reduce_scatter_coalesced
from zsim.frameworks.deepspeed.stage3.fetch_trace import FetchTrace, ZeroParameter
from zsim.plan.ops import Group, Memory
from zsim.plan.stage import Stage


class QuantizedReducer:
    """Reduces a bucket's gradients over the ranks of `group` on `stream`. `node_group` is the GPUs of a node,
    and `cross_node_group` the same GPU of every node (_get_local_all_to_all_group).
    """

    def __init__(
        self, stage: Stage, trace: FetchTrace, config: DeepSpeedConfig, stream: str, group: Group
    ) -> None:
        self.builder, self.trace, self.config, self.stream = stage.builder, trace, config, stream
        self.group, self.world_size, self.gpus_per_node = group, group.size, config.gpus_per_node
        self.num_nodes = self.world_size // self.gpus_per_node
        self.node_group = stage.group("local", self.gpus_per_node)
        self.cross_node_group = stage.group("global", self.num_nodes, self.gpus_per_node)
        self._scatters_indivisible = config.release.scatters_indivisible_gradients
        self._has_error = config.zero.zeropp_loco_param is not None
        self._variable_bytes: dict[str, int] = {}  # bytes by variable of the function, until the next tensor

    def resident(self) -> list[Memory]:
        """LoCo's quantisation errors in int8: of every whole gradient, and of the node's sum."""
        if not self._has_error:
            return []
        size = 0
        for parameter in self.trace.parameters:
            if not self._is_scattered(parameter):
                node_groups, cross_node_groups = self._groups_of(parameter)
                size += (
                    parameter.numel
                    + parameter.numel // self.gpus_per_node
                    + (node_groups + cross_node_groups) * SCALE_BYTES
                )
        return [Memory("buffers", size)]

    def reduce(self, numbers: Sequence[int]) -> int:
        """Reduce the gradients of a bucket. Returns the bytes of the shards, which the caller frees."""
        shards = 0
        for number in sorted(numbers):
            parameter = self.trace.parameters[number]
            if self._is_scattered(parameter):
                shards += self._scatter(parameter)
            else:
                shards += self._reduce_in_two_hops(parameter)
        self.builder.free("buffers", sum(self._variable_bytes.values()))
        self._variable_bytes.clear()
        return shards

    def _is_scattered(self, parameter: ZeroParameter) -> bool:
        if len(parameter.shape) == 1:
            return True
        if parameter.numel % (2 * self.world_size) == 0:
            return False
        if self._scatters_indivisible:
            return True
        raise InputError(
            f"{self.config.name}: zero_optimization.zero_quantized_gradients: {parameter.name} has "
            f"{parameter.numel:,} elements, which two hops over {self.world_size} GPUs cannot divide (they "
            f"need a multiple of {2 * self.world_size}); DeepSpeed {self.config.release} fails, 0.13.2 and "
            "later reduce-scatter it"
        )

    def _groups_of(self, parameter: ZeroParameter) -> tuple[int, int]:
        """Quantisation groups of a gradient inside and across nodes. Raises InputError where torch's
        all_to_all_single cannot divide the scales."""
        node_groups, cross_node_groups = gradient_groups(parameter.shape, self.world_size, self.gpus_per_node)
        for groups, ranks, peers in (
            (node_groups, self.gpus_per_node, "node's GPUs"),
            (cross_node_groups, self.num_nodes, "nodes"),
        ):
            if groups % ranks:
                raise InputError(
                    f"{self.config.name}: zero_optimization.zero_quantized_gradients: the gradient of "
                    f"{parameter.name} {parameter.shape} has {groups} scales, which torch's "
                    f"all_to_all_single cannot divide among {ranks} {peers}; expected a padded vocabulary, "
                    "or another number of GPUs"
                )
        return node_groups, cross_node_groups

    def _scatter(self, parameter: ZeroParameter) -> int:
        return reduce_scatter_coalesced(
            self.builder,
            elements=parameter.numel,
            shard_elements=parameter.shard_numel,
            num_tensors=1,
            dtype=self.config.communication_dtype,
            group=self.group.name,
            stream=self.stream,
            parameter_name=parameter.name,
        )

    def _reduce_in_two_hops(self, parameter: ZeroParameter) -> int:
        """Quantise, all-to-all inside the node, sum and quantise again, all-to-all between nodes, sum.
        Returns the bytes of the shard.
        """
        numel, node_numel = parameter.numel, parameter.numel // self.gpus_per_node
        node_groups, cross_node_groups = groups = self._groups_of(parameter)
        if self._has_error:
            self._assign("intra_err", 2 * numel)
            self._assign("inter_err", 2 * node_numel)
            restore_kernels = (
                *dequantize_kernels(numel, node_groups),
                *dequantize_kernels(node_numel, cross_node_groups),
            )
            self._kernels("restore errors of", parameter, restore_kernels)
        self._assign("intra_quant", numel // 2 + node_groups * SCALE_BYTES)
        self._kernels("quantize", parameter, swizzle_kernels(numel, node_groups, has_error=self._has_error))
        self._assign("local_output", numel // 2 + node_groups * SCALE_BYTES)
        self._exchange(parameter, numel // 2, node_groups, self.node_group.name)
        if self._has_error:
            self._kernels("keep error of", parameter, quantize_kernels(numel, "fp16", node_groups))
        self._assign("global_input", node_numel // 2 + cross_node_groups * SCALE_BYTES)
        reduction_kernels = reduce_kernels(numel, self.gpus_per_node, groups, has_error=self._has_error)
        self._kernels("reduce", parameter, reduction_kernels)
        self._assign("global_output", node_numel // 2 + cross_node_groups * SCALE_BYTES)
        self._exchange(parameter, node_numel // 2, cross_node_groups, self.cross_node_group.name)
        if self._has_error:
            self._kernels(
                "keep node's error of", parameter, quantize_kernels(node_numel, "fp16", cross_node_groups)
            )
        shard = 2 * parameter.shard_numel
        self._assign("final_output", 2 * node_numel)
        self.builder.allocate("buffers", shard)
        self._kernels("dequantize", parameter, sum_kernels(node_numel, self.num_nodes, cross_node_groups))
        return shard

    def _assign(self, variable: str, size: int) -> None:
        """Assign a variable: the new tensor is allocated before the old tensor is freed."""
        self.builder.allocate("buffers", size)
        self.builder.free("buffers", self._variable_bytes.get(variable, 0))
        self._variable_bytes[variable] = size

    def _kernels(self, action: str, parameter: ZeroParameter, kernels: Sequence[Kernel]) -> None:
        name = f"{action} gradient of {parameter.name}"
        self.builder.kernels(name, kernels, stream=self.stream, module=parameter.name)

    def _exchange(self, parameter: ZeroParameter, size: int, groups: int, group: str) -> None:
        """All-to-all of the int4 values, then of their scales."""
        for prefix, num_bytes, dtype in (("", size, "int4"), ("scales of ", groups * SCALE_BYTES, "fp32")):
            self.builder.collective(
                "all_to_all", num_bytes, dtype, group, stream=self.stream,
                name=f"all_to_all {prefix}{parameter.name}", module=parameter.name,
            )  # fmt: skip
