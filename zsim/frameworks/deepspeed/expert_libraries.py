"""Layers of routed experts that are DeepSpeed's: AutoEP's, and `deepspeed.moe.layer.MoE`.

Sources: DeepSpeed 0.19.8 `module_inject/auto_ep_layer.py` and `moe/sharded_moe.py`. Passes are
counted as [Note: rows that move] of `zsim.cost.kernels.moved_rows` says.
"""

from __future__ import annotations

from zsim.cost.kernels.moved_rows import (
    SORTED_INDEX_PUT,
    ExpertKernelSet,
    MoveCost,
    RowPasses,
    ScoreCost,
)
from zsim.specs.strategy.expert_library import ExpertLibrary

# module_inject/auto_ep_layer.py, moe/ep_kernels.py: a stable argsort and a gather, the rows by expert in one
# gather of a Triton kernel, and back in another, each with the indices made again, zeros and a copy in the
# first order, a product with the fp32 scores, their sum, a cast.
_AUTOEP_KERNELS = ExpertKernelSet(
    "autoep",
    permute=MoveCost(RowPasses(0, 2, 15), RowPasses(1, 0, 8, SORTED_INDEX_PUT)),
    sort=MoveCost(RowPasses(0, 2, 20), RowPasses(0, 2, 1)),
    unsort=MoveCost(RowPasses(0, 2, 8), RowPasses(0, 2, 1)),
    unpermute=MoveCost(RowPasses(5, 8, 6), RowPasses(3, 16, 8), kept_rows=1),
    unordered_rows="fp32",
)
# moe/sharded_moe.py `_sparse_encode`, `_sparse_decode`: a copy of the tokens with a row of zeros at its end
# and a gather into the slots. sort: the slices of each expert copied for both of its first products. unsort:
# their outputs joined. Back: the same copy and gather, a product with fp32 scores, their sum, a cast. Gates,
# counted op by op: `top1gating`, `top2gating`, `topkgating`. Masks are int64 (bool in the last), as are
# running sums of them. One and two experts draw random numbers.
_MOE_KERNELS = ExpertKernelSet(
    "deepspeed-moe",
    permute=MoveCost(RowPasses(2, 2, 10), RowPasses(1, 3, 3)),
    sort=MoveCost(RowPasses(0, 4, 2), RowPasses(0, 2, 1)),
    unsort=MoveCost(RowPasses(0, 2, 1), RowPasses(0, 2, 1)),
    unpermute=MoveCost(RowPasses(5, 9, 6), RowPasses(3, 18, 12), kept_rows=1),
    unordered_rows="fp32",
    gates=(ScoreCost(180, 34, 22, 10), ScoreCost(410, 60, 40, 16), ScoreCost(85, 30, 30, 12)),
)

AUTOEP = ExpertLibrary(
    name="autoep",
    title="DeepSpeed's AutoEP",
    owner="DeepSpeed",
    kernels=_AUTOEP_KERNELS,
    dispatch="rows",
    keeps_products_whole=True,
    has_expert_groups=True,
    sorts_local_rows=True,
    separates_gate=True,
    sorts_parameters=True,
    has_int32_counts=True,
)
DEEPSPEED_MOE = ExpertLibrary(
    name="deepspeed-moe",
    title="DeepSpeed's own MoE layer",
    owner="DeepSpeed",
    kernels=_MOE_KERNELS,
    dispatch="slots",
    has_tensor_lanes=True,
    drops_tokens=True,
    expert_list="deepspeed_experts",
    min_capacity=4,  # `min_capacity` of the layer
    has_expert_groups=True,
)
