"""Tensor, pipeline and context parallelism of Megatron's layers, and of nanotron's.

Sources: Megatron-Core 0.16.1 `training/arguments.py` and `core/tensor_parallel/layers.py`, with the pieces of
Transformer Engine 2.17 `pytorch/module/base.py` (`num_splits`), and nanotron's
`config/parallelism_config.py` (2411b022). Mixers: Megatron-LM d98e8a64 core/ssm/.
"""

from __future__ import annotations

from zsim.specs.strategy.style import ModelParallelStyle

MEGATRON = ModelParallelStyle(
    name="megatron",
    title="Megatron",
    schedule_title="Megatron",
    fused_projections="always",
    repeats_kv_heads=True,
    tensor_overlap="always",
    cuts_products=True,
    scattered_pieces=4,
    cuts_towers=True,
    schedules=("1f1b", "interleaved-1f1b"),
    has_equal_stages=True,
    empties_outputs=True,
    context_library="te",
    context_methods=("p2p", "all-gather", "all-to-all", "a2a+p2p"),
    has_zigzag=True,
    dispatchers=("all-gather", "all-to-all", "deepep", "hybridep"),
    mixers=(
        "Gated DeltaNet",
        "Mamba-2",
        "DeepSeek's sparse attention",
        "compressed sparse attention",
        "attention over blocks of keys",
        "Kimi delta attention",
    ),
    tensor_mixers=("Gated DeltaNet", "Mamba-2", "DeepSeek's sparse attention"),
    context_mixers=("Gated DeltaNet", "Mamba-2"),
)
NANOTRON = ModelParallelStyle(
    name="nanotron",
    title="nanotron",
    schedule_title="nanotron",
    fused_projections="always",
    tensor_overlap="async_tensor",
    runs_local_rows_first=True,
    reduces_in_line=True,
    schedules=("gpipe", "1f1b"),
    schedule="gpipe",
    empties_outputs=True,
    has_simulated_context=False,
    context_methods=("p2p",),
    mixers=(),
)
