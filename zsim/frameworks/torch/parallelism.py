"""Tensor, pipeline and context parallelism as torch has it, with torchtitan's defaults.

Sources: torchtitan v0.2.2 `config/job_config.py`, `distributed/pipeline_parallel.py`, and
`distributed/context_parallel.py` (`apply_cp_to_attention_module`, which gives every layer FlexAttention where
one has a window). Of other mixers it cuts Gated DeltaNet's heads (torchtitan b5bcd76c
models/qwen3_5/parallelize.py, which raises NotImplementedError for context parallelism).

Programs that patch transformers' attention have Ulysses under any of torch's engines, which shard over all
ranks all the same. As DeepSpeed's it repeats heads of K and V, gathers the tokens' positions in every layer,
and exchanges heads in line (verl b178a3cd models/transformers/monkey_patch.py
`_ulysses_flash_attention_forward`, utils/ulysses.py, ms-swift 4.6 sequence_parallel/ulysses.py, prime-rl
559b4477 trainer/models/layers/ulysses_attn.py).
"""

from __future__ import annotations

from dataclasses import replace

from zsim.specs.strategy.style import ModelParallelStyle

TORCH = ModelParallelStyle(
    title="torchtitan",
    has_dtensors=True,
    is_sequence_parallel=True,
    cuts_products=True,
    gathers_for_experts=True,
    reads_schedule_files=True,
    has_passes=True,
    missing_end_layers=1,
    has_zigzag=True,
    masks_windows=True,
    dispatchers=("all-to-all", "deepep"),
    splits_expert_tokens=True,
    tensor_mixers=("Gated DeltaNet",),
)
ULYSSES = replace(
    TORCH,
    title="Ulysses",
    has_zigzag=False,
    masks_windows=False,
    context_library="ulysses",
    context_methods=("all-to-all",),
    repeats_kv_heads_in_context=True,
)
DATA_PARALLEL = replace(TORCH, splits_models=False)
"""Of engines whose data parallelism is simulated alone."""
