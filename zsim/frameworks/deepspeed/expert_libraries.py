"""Layers of routed experts that are DeepSpeed's: AutoEP's, and `deepspeed.moe.layer.MoE`.

Sources: DeepSpeed 0.19.8 `module_inject/auto_ep_layer.py` and `moe/sharded_moe.py`.
"""

from __future__ import annotations

from zsim.specs.strategy.expert_library import ExpertLibrary

AUTOEP = ExpertLibrary(
    name="autoep",
    title="DeepSpeed's AutoEP",
    owner="DeepSpeed",
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
    dispatch="slots",
    keeps_products_whole=True,
    drops_tokens=True,
    expert_list="deepspeed_experts",
    min_capacity=4,  # `min_capacity` of the layer
    has_expert_groups=True,
)
