"""The settings that Megatron's command line says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zsim.specs.formats.program import ConfigMapping

_MEGATRON = "Megatron-Core 0.16.1, training/arguments.py"
_MEGATRON_FLAGS: Sequence[tuple[str, str, tuple[Any, ...]]] = (
    ("training.micro_batch_size", "--micro-batch-size", ()),
    ("training.gradient_accumulation_steps", "--global-batch-size", ()),
    ("training.activation_checkpointing", "--recompute-granularity", ("none", "selective", "full")),
    ("training.checkpoint_every", "every block", (1,)),
    ("training.recompute_method", "--recompute-method", ()),
    ("training.recompute_layers", "--recompute-num-layers", ()),
    ("training.recompute_modules", "--recompute-modules", ()),
    ("training.attention", "--attention-backend", ("flash", "math")),
    ("training.cross_entropy", "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", ("fused",)),
    ("training.cross_entropy", "--cross-entropy-loss-fusion", ("megatron-fused",)),
    ("training.cross_entropy", "no --cross-entropy-loss-fusion", ("megatron",)),
    ("strategy.distributed_optimizer", "--use-distributed-optimizer", ()),
    ("strategy.overlap_grad_reduce", "--overlap-grad-reduce", ()),
    ("strategy.overlap_param_gather", "--overlap-param-gather", ()),
    ("strategy.grad_reduce_dtype", "--grad-reduce-in-bf16, --accumulate-allreduce-grads-in-fp32", ()),
    ("strategy.average_in_collective", "--ddp-average-in-collective", ()),
    ("strategy.bucket_size", "--ddp-bucket-size", ()),
    ("strategy.optimizer_instances", "--num-distributed-optimizer-instances", ()),
    ("strategy.gradient_accumulation_fusion", "--no-gradient-accumulation-fusion", ()),
    ("strategy.vocabulary_multiple", "--make-vocab-size-divisible-by", ()),
    ("parallelism.tensor", "--tensor-model-parallel-size", ()),
    ("parallelism.sequence_parallel", "--sequence-parallel", ()),
    ("parallelism.async_tensor", "--tp-comm-overlap", ()),
    ("parallelism.overlap_tensor_reduce", "--no-async-tensor-model-parallel-allreduce", ()),
    ("parallelism.pipeline", "--pipeline-model-parallel-size", ()),
    ("parallelism.schedule", "--num-virtual-stages-per-pipeline-rank", ("1f1b", "interleaved-1f1b", None)),
    ("parallelism.virtual_stages", "--num-virtual-stages-per-pipeline-rank", ()),
    ("parallelism.first_stage_less_layers", "--account-for-embedding-in-pipeline-split", (0, 1, None)),
    ("parallelism.last_stage_less_layers", "--account-for-loss-in-pipeline-split", (0, 1, None)),
    ("parallelism.layers_per_stage", "--pipeline-model-parallel-layout", ()),
    ("parallelism.context", "--context-parallel-size", ()),
    ("parallelism.context_method", "--cp-comm-type", ()),
    ("parallelism.order", "--use-tp-pp-dp-mapping", ("tp-cp-dp-pp", "tp-cp-pp-dp", None)),
)

CONFIG_MAPPINGS: Sequence[ConfigMapping] = tuple(
    ConfigMapping(key, "file", flags, _MEGATRON, values) for key, flags, values in _MEGATRON_FLAGS
)
