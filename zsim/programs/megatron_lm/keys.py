"""The flags of Megatron's command line that say one setting each, and what `zsim tune` is told of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.programs.megatron_lm.flags import (
    NOT_SIMULATED,
    NOT_SIMULATED_ARCHITECTURES,
    NOT_SIMULATED_DEGREES,
    NOT_SIMULATED_EXPERTS,
    NOT_SIMULATED_PRECISIONS,
)
from zsim.specs.formats.program import ConfigMapping
from zsim.specs.formats.program_key import ProgramKey, declare, tuned_mappings
from zsim.specs.strategy.requirement import Refusal

_MEGATRON = "Megatron-Core 0.16.1, training/arguments.py"
_ON: Mapping[bool, bool | None] = {True: True, False: None}
_OFF: Mapping[bool, bool | None] = {True: False, False: None}
PRECISION_AWARE = ProgramKey(
    "--use-precision-aware-optimizer", bool, "whether optimizer states may be of lower precision",
    "strategy.precision_aware_optimizer", is_plain=True, values=_ON,
)  # fmt: skip
# Switches of data parallelism, each with the setting that it alone says.
ON_SWITCHES = (
    *declare(
        ("--use-distributed-optimizer", bool, "whether optimizer states are sharded",
         "strategy.distributed_optimizer"),
        ("--overlap-grad-reduce", bool, "whether gradients are reduced during the last backward",
         "strategy.overlap_grad_reduce"),
        ("--overlap-param-gather", bool, "whether parameters are gathered during the next forward",
         "strategy.overlap_param_gather"),
        ("--ddp-average-in-collective", bool, "whether the collective averages",
         "strategy.average_in_collective"),
        is_plain=True, values=_ON, tuned=(), source=_MEGATRON,
    ),
    PRECISION_AWARE,
    *declare(
        ("--distribute-saved-activations", bool, "whether tensor-parallel ranks share the inputs of layers",
         "strategy.distribute_saved_activations"),
        ("--deterministic-mode", bool, "whether kernels give the same bits every time",
         "strategy.deterministic_mode"),
        ("--test-mode", bool, "whether Megatron runs as in its tests", "strategy.test_mode"),
        is_plain=True, values=_ON,
    ),
)  # fmt: skip
OFF_SWITCHES = (
    ProgramKey(
        "--no-gradient-accumulation-fusion", bool, "whether gradients are added by kernels of their own",
        "strategy.gradient_accumulation_fusion", is_plain=True, values=_OFF, tuned=(), source=_MEGATRON,
    ),
    *declare(
        ("--no-check-for-nan-in-loss-and-grad", bool, "whether the host does not read every norm",
         "strategy.check_for_nan"),
        ("--no-rope-fusion", bool, "whether rotary positions are eager kernels", "strategy.rope_fusion"),
        ("--no-overlap-p2p-communication", bool, "whether stages wait for their messages",
         "strategy.overlap_p2p"),
        ("--no-align-grad-reduce", bool, "whether stages reduce gradients when each is done",
         "strategy.align_grad_reduce"),
        ("--no-align-param-gather", bool, "whether stages gather parameters when each needs them",
         "strategy.align_param_gather"),
        is_plain=True, values=_OFF,
    ),
)  # fmt: skip
# Flags whose setting depends on others.
_FLAGS = (
    *declare(
        ("--micro-batch-size", int, "sequences of a micro-batch", "training.micro_batch_size"),
        ("--global-batch-size", int, "sequences of a step", "training.gradient_accumulation_steps"),
        ("--recompute-method", str, "whole layers in groups, or the first of every stage",
         "training.recompute_method"),
        ("--recompute-num-layers", int, "layers of a group, or of a stage", "training.recompute_layers"),
        ("--recompute-modules", list, "modules that selective recomputation runs again",
         "training.recompute_modules"),
        ("--ddp-bucket-size", int, "elements in a bucket of gradients", "strategy.bucket_size"),
        ("--num-distributed-optimizer-instances", int, "groups of ranks that each hold all optimizer states",
         "strategy.optimizer_instances"),
        ("--make-vocab-size-divisible-by", int, "what the vocabulary is padded to a multiple of",
         "strategy.vocabulary_multiple"),
        ("--tensor-model-parallel-size", int, "ranks that share a layer's products", "parallelism.tensor"),
        ("--sequence-parallel", bool, "whether norms have a part of the sequence",
         "parallelism.sequence_parallel"),
        ("--tp-comm-overlap", bool, "whether products and their collectives overlap",
         "parallelism.async_tensor"),
        ("--no-async-tensor-model-parallel-allreduce", bool,
         "whether a reduction ends before the weights' gradients are computed",
         "parallelism.overlap_tensor_reduce"),
        ("--pipeline-model-parallel-size", int, "ranks of a pipeline", "parallelism.pipeline"),
        ("--num-virtual-stages-per-pipeline-rank", int, "virtual stages of a rank",
         "parallelism.virtual_stages"),
        ("--pipeline-model-parallel-layout", str, "layers of every stage", "parallelism.layers_per_stage"),
        ("--context-parallel-size", int, "ranks that share a sequence", "parallelism.context"),
        ("--cp-comm-type", str, "how they see the keys and values of others", "parallelism.context_method"),
        tuned=(), source=_MEGATRON,
    ),
    *(
        ProgramKey(key, kind, meaning, setting, tuned=tuned, source=_MEGATRON)
        for key, kind, meaning, setting, tuned in (
            ("--recompute-granularity", str, "what backward computes again",
             "training.activation_checkpointing", ("none", "selective", "full")),
            ("--attention-backend", str, "the kernels of attention", "training.attention",
             ("flash", "math")),
            ("--num-virtual-stages-per-pipeline-rank", int, "the order of forwards and backwards",
             "parallelism.schedule", ("1f1b", "interleaved-1f1b", None)),
            ("--account-for-embedding-in-pipeline-split", bool, "whether the first stage has a layer less",
             "parallelism.first_stage_less_layers", (0, 1, None)),
            ("--account-for-loss-in-pipeline-split", bool, "whether the last stage has a layer less",
             "parallelism.last_stage_less_layers", (0, 1, None)),
            ("--use-tp-pp-dp-mapping", bool, "which ranks are neighbours", "parallelism.order",
             ("tp-cp-dp-pp", "tp-cp-pp-dp", None)),
        )
    ),
    ProgramKey(
        "--grad-reduce-in-bf16", bool, "the type in which gradients are summed and reduced",
        "strategy.grad_reduce_dtype", tuned=(), source=_MEGATRON,
        instruction="--grad-reduce-in-bf16, --accumulate-allreduce-grads-in-fp32",
    ),
)  # fmt: skip
KEYS = (*ON_SWITCHES, *OFF_SWITCHES, *_FLAGS)

CONFIG_MAPPINGS: Sequence[ConfigMapping] = (
    *tuned_mappings(KEYS),
    ConfigMapping("training.checkpoint_every", "file", "every block", _MEGATRON, (1,)),
    ConfigMapping("parallelism.expert_tensor", "file", "--expert-tensor-parallel-size", _MEGATRON),
    ConfigMapping("parallelism.expert", "file", "--expert-model-parallel-size", _MEGATRON),
    ConfigMapping(
        "parallelism.dispatcher",
        "file",
        "--moe-token-dispatcher-type, --moe-flex-dispatcher-backend",
        _MEGATRON,
    ),
    ConfigMapping("training.precision", "file", "--fp8-format hybrid", _MEGATRON, ("fp8",)),
    ConfigMapping("training.fp8_recipe", "file", "--fp8-recipe, --fp4-recipe", _MEGATRON),
    *(
        ConfigMapping("training.cross_entropy", "file", flags, _MEGATRON, (value,))
        for value, flags in (
            ("fused", "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te"),
            ("megatron-fused", "--cross-entropy-loss-fusion"),
            ("megatron", "no --cross-entropy-loss-fusion"),
        )
    ),
)

REFUSALS = tuple(
    Refusal(f"--{flag}", feature)
    for flags in (
        NOT_SIMULATED,
        NOT_SIMULATED_ARCHITECTURES,
        NOT_SIMULATED_DEGREES,
        NOT_SIMULATED_EXPERTS,
        NOT_SIMULATED_PRECISIONS,
    )
    for flag, feature in flags.items()
)
