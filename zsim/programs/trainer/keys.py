"""The keys of TrainingArguments, the settings that they say, and those of its script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.programs.deepspeed.keys import EVERY_BLOCK, JSON_KEYS
from zsim.programs.huggingface.arguments import ARGUMENT_KEYS, ARGUMENTS, TRANSFORMERS
from zsim.specs.formats.program import ConfigMapping
from zsim.specs.formats.program_key import ProgramKey, declare, tuned_mappings

_LIGER = TRANSFORMERS + "training_args.py, integrations/liger.py"

# Names that scripts have for the tokens of a sequence: transformers' examples', and those of people's own.
LENGTHS = (
    "block_size", "model_max_length", "max_seq_length", "max_seq_len", "max_length", "seq_length",
    "cutoff_len",
)  # fmt: skip
# Keys of the example scripts that are started with such a file (transformers, examples/pytorch).
_SCRIPT_KEYS = (
    ProgramKey("model_name_or_path", str, "the model, as an id of the Hub or a folder", "model"),
    ProgramKey("torch_dtype", str, "the type in which weights are loaded", "training.stored_dtype"),
    ProgramKey("dtype", str, "the same, in newer scripts", "training.stored_dtype"),
    ProgramKey("attn_implementation", str, "the kernels of attention", "training.attention"),
    ProgramKey(
        "activation_checkpointing",
        bool,
        "whether backward computes every block again",
        "training.activation_checkpointing",
        is_plain=True,
        values={True: "full", False: None},
    ),
    *declare(*((name, int, "tokens of a sequence", "training.sequence_length") for name in LENGTHS)),
    *declare(
        ("use_lora", (bool, int), "adapters of a script's own"),
        ("use_qlora", (bool, int), "adapters of a script's own"),
        ("use_lisa", (bool, int), "LISA, which trains a few layers at a time"),
        treatment="refused", neutral=(0,),
    ),
)  # fmt: skip
KEYS: Mapping[str, ProgramKey] = {**ARGUMENT_KEYS, **{key.key: key for key in _SCRIPT_KEYS}}

CONFIG_MAPPINGS: Sequence[ConfigMapping] = (
    JSON_KEYS,
    *tuned_mappings(KEYS.values()),
    EVERY_BLOCK,
    ConfigMapping(
        "training.cross_entropy", "file",
        "use_liger_kernel: true, of liger_kernel_config only fused_linear_cross_entropy", _LIGER,
        ("fused_linear",),
    ),
    ConfigMapping(
        "training.cross_entropy", "file", "use_liger_kernel: true, of liger_kernel_config only cross_entropy",
        _LIGER, ("liger",),
    ),
    ConfigMapping(
        "strategy.reshard_after_forward", "file", "fsdp_config.reshard_after_forward", ARGUMENTS,
        (True, False),
    ),
    ConfigMapping("strategy.replicate", "file", "no replicas", ARGUMENTS, (1, None)),
    # A ParallelismConfig is an object, which YAML cannot hold.
    ConfigMapping(
        "strategy.replicate", "script", "TrainingArguments(parallelism_config=ParallelismConfig(...))",
        ARGUMENTS, kinds=("fsdp2",),
    ),
    ConfigMapping(
        "strategy.replicate", "script", "a device mesh for FullyShardedDataParallelPlugin",
        "accelerate 1.15.0, utils/dataclasses.py", kinds=("fsdp1",),
    ),
    ConfigMapping(
        "strategy.no_sync", "file", "accelerator_config.gradient_accumulation_kwargs.sync_each_batch",
        TRANSFORMERS + "trainer_pt_utils.py",
    ),
    *(
        ConfigMapping(f"strategy.{key}", "file", f"fsdp_config.{key}", ARGUMENTS)
        for key in ("cpu_offload", "backward_prefetch", "forward_prefetch", "limit_all_gathers")
    ),
)  # fmt: skip
