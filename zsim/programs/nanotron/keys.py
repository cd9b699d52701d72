"""The keys of nanotron's YAML that a step depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.specs.formats.file_values import silent_keys
from zsim.specs.formats.program import ConfigMapping
from zsim.specs.formats.program_key import ProgramKey, declare, tuned_mappings

_NANOTRON = "nanotron 2411b022, src/nanotron/config/"
_CONFIG = _NANOTRON + "config.py"
_DEGREES = _NANOTRON + "parallelism_config.py"

_KEYS = (
    ProgramKey(
        "tokens.sequence_length", int, "tokens of a sequence", "training.sequence_length", is_plain=True,
    ),
    *declare(
        ("tokens.micro_batch_size", int, "sequences of a micro-batch", "training.micro_batch_size"),
        ("tokens.batch_accumulation_per_replica", int, "micro-batches of a step",
         "training.gradient_accumulation_steps"),
        is_plain=True, tuned=(), source=_CONFIG,
    ),
    ProgramKey(
        "model.dtype", str, "the type of parameters and products", "training.precision", is_plain=True,
        values={"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}, default="bfloat16",
    ),
    ProgramKey("model.model_config", dict, "the model, by the names of transformers", "model"),
    ProgramKey(
        "model.make_vocab_size_divisible_by", int, "the vocabulary is padded to a multiple of it, times the "
        "tensor-parallel ranks", "strategy.vocabulary_multiple", is_plain=True, default=1,
    ),
    ProgramKey("model.ddp_bucket_cap_mb", int, "MiB of gradients in a bucket of DDP"),
    ProgramKey("parallelism.dp", int, "ranks with data of their own"),
    *declare(
        ("parallelism.tp", int, "ranks that share a layer's products", "parallelism.tensor"),
        ("parallelism.pp", int, "ranks of a pipeline", "parallelism.pipeline"),
        is_plain=True, tuned=(), source=_DEGREES,
    ),
    ProgramKey("parallelism.context_parallel_size", int, "ranks that share a sequence"),
    ProgramKey("parallelism.expert_parallel_size", int, "ranks that share the experts"),
    ProgramKey(
        "parallelism.pp_engine", str, "the order of forwards and backwards", "parallelism.schedule",
        values={"1f1b": "1f1b", "afab": "gpipe"}, tuned=(), source=_DEGREES,
    ),
    *declare(
        ("parallelism.tp_mode", str, "whether norms and residuals have a part of the sequence",
         "parallelism.sequence_parallel"),
        ("parallelism.tp_linear_async_communication", bool, "products and their collectives overlap",
         "parallelism.async_tensor"),
        tuned=(), source=_DEGREES,
    ),
    ProgramKey(
        "parallelism.tp_recompute_allgather", bool, "whether backward gathers a product's input again",
    ),
    ProgramKey(
        "parallelism.recompute_layer", bool, "whether backward computes every layer again",
        "training.activation_checkpointing", is_plain=True, values={True: "full", False: None},
        tuned=("none", "full"), source=_DEGREES,
    ),
    ProgramKey(
        "optimizer.zero_stage", int, "1: optimizer states are sharded", "strategy.distributed_optimizer",
        is_plain=True, values={0: False, 1: True}, default=0, is_default_stated=True, tuned=(),
        source=_CONFIG,
    ),
    ProgramKey("optimizer.accumulate_grad_in_fp32", bool, "whether micro-batches are summed in fp32"),
    ProgramKey(
        "optimizer.clip_grad", float, "norm that gradients are clipped to", "training.gradient_clipping",
    ),
    ProgramKey(
        "optimizer.optimizer_factory.name", str, "the optimizer", "training.optimizer", is_plain=True,
        values={"adamW": "adamw", "sgd": "sgd"}, default="adamW",
    ),
    ProgramKey(
        "optimizer.optimizer_factory.torch_adam_is_fused", bool, "its kernels",
        "training.optimizer_implementation", is_plain=True, values={True: "fused", False: "foreach"},
        default=True,
    ),
)  # fmt: skip
KEYS: Mapping[str, ProgramKey] = {key.key: key for key in _KEYS}
CONFIG_MAPPINGS: Sequence[ConfigMapping] = tuned_mappings(KEYS.values())
# Sections and keys without effect on a step.
IDLE = silent_keys(
    """
    checkpoints data_stages general lighteval logging metrics_logging profiler s3_upload tokenizer
    tokens.train_steps tokens.val_check_interval tokens.limit_val_batches tokens.limit_test_batches
    model.init_method optimizer.learning_rate_scheduler optimizer.weight_decay
    optimizer.weight_decay_exclude_named_params optimizer.optimizer_factory
    """
)
