"""The comparison of norms that `--test-mode` of Megatron-Core makes in every layer.

`SelfAttention.run_realtime_tests` (Megatron-LM d98e8a64, megatron/core/transformer/attention.py), in each
forward of a layer whose queries and keys have norms, also where it is recomputed: their weights and biases,
put together, are gathered over the data parallel group and then over the tensor parallel one, and each of
every rank's is compared with the rank's own: equality, whether all are, and the host waits for the answer.
"""

from __future__ import annotations

from zsim.dtypes import DTYPE_BYTES
from zsim.plan.builder import COMPUTE, PlanBuilder, move_kernels
from zsim.plan.ops import Group
from zsim.plan.shared.host_reads import read_scalar
from zsim.plan.workload.workload import ModuleCall
from zsim.specs.strategy.megatron import MegatronConfig
from zsim.specs.strategy.mesh import TENSOR

_PAIR = 2  # the norms of queries and of keys have parameters alike


def run_realtime_tests(
    builder: PlanBuilder, strategy: MegatronConfig, call: ModuleCall, data_group: Group
) -> None:
    """Issue the comparison after the norm of the keys, if the layer has one. `data_group` is the
    data-parallel ranks.
    """
    is_forward = builder.phase in ("forward", "recompute")
    if not (strategy.test_mode and is_forward and call.name.endswith("k_layernorm")):
        return
    dtype = strategy.param_dtype
    sizes = _PAIR * [parameter.numel * DTYPE_BYTES[dtype] for parameter in call.module.parameters]
    total = sum(sizes)
    builder.kernels("stack norms", move_kernels(total, total))
    for group in (data_group, builder.groups.get(TENSOR)):
        ranks = 1 if group is None else group.size
        if group is not None and ranks > 1:
            builder.collective(
                "all_gather", ranks * total, dtype, group.name, stream=COMPUTE, name="all_gather norms"
            )
        builder.kernels("copy gathered norms", move_kernels(ranks * total, ranks * total, launches=ranks))
        for _ in range(ranks):
            for size in sizes:
                builder.kernels(
                    "compare norms", move_kernels(2 * size, size, launches=3), overhead="module_call"
                )
                read_scalar(builder, "whether norms are equal", dtype, [])
