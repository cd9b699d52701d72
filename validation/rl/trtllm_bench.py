"""Bounds that `trtllm-bench throughput` sets of an engine whose user sets none.

It takes the requests that the cache of all GPUs would hold, as the model's configuration says, as the
sequences of a rank, and the tokens of an iteration in which as many start as end (TensorRT-LLM 04cba882
`bench/build/tuning.py`, `calc_engine_setting` and `finetune_setting`). The estimate counts a latent cache as
if it had all heads, knows no window, and takes the type of the cache from the checkpoint: fp8 in those that
ModelOpt exported, 16 bits in DeepSeek's own.
"""

from __future__ import annotations

from math import ceil

from validation.rl.table import RlRow
from zsim.cost.inference.layers import EngineLayout
from zsim.specs.cluster.gpu import Gpu
from zsim.specs.model.spec import Attention, ModelSpec

BENCH_GRAPHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 1024, 2048, 4096, 8192)
"""Sizes of the captured graphs of every published row (docs/source/developer-guide/perf-overview.md)."""
_WEIGHT_BYTES = {"fp8": 1.0, "fp4": 0.5}  # as the estimate has them
_CACHE_FRACTION = 0.95  # "in many cases" of the page
_MOST_SEQUENCES, _MOST_TOKENS, _LEAST_SEQUENCES, _LEAST_TOKENS = 4096, 32768, 64, 2048


def bench_limits(row: RlRow, model: ModelSpec, layout: EngineLayout, gpu: Gpu) -> tuple[int, int]:
    """Sequences and tokens of an iteration of each rank."""
    prompt, response = row.number("input_len") or 1.0, row.number("output_len") or 1.0
    attentions = [
        module.op_spec
        for block in model.blocks
        for module in block.modules
        if isinstance(module.op_spec, Attention)
    ]
    heads = max(layout.gpus, max(spec.num_kv_heads for spec in attentions))
    width = attentions[0].qk_head_dim
    if attentions[0].is_latent:
        width = model.hidden_size // attentions[0].num_heads
    is_exported = layout.weight_dtype == "fp4" or not attentions[0].is_latent
    size = 1.0 if layout.cache_dtype == "fp8" and is_exported else 2.0
    token_bytes = 2 * len(attentions) * heads * width * size
    weights = model.numel * _WEIGHT_BYTES.get(layout.weight_dtype, 2.0)
    room = _CACHE_FRACTION * (layout.gpus * gpu.memory.capacity - weights)
    sequences = min(room / token_bytes / (prompt + response), _MOST_SEQUENCES)
    tokens = min(sequences * (1 + prompt / response), _MOST_TOKENS)
    return _rounded_sequences(sequences), max(_rounded_tokens(tokens), int(prompt))


def _rounded_sequences(count: float) -> int:
    if count < 256:
        return max(_LEAST_SEQUENCES, 32 * ceil(count / 32))
    step = 128 if count < 1024 else 256
    return step * ceil(count / step)


def _rounded_tokens(count: float) -> int:
    if count < 4096:
        return max(_LEAST_TOKENS, 256 * ceil(count / 256))
    step = 512 if count < 8192 else 1024
    return step * ceil(count / step)
