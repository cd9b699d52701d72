"""Accelerate's `megatron_lm_config` -> settings of an experiment, by way of Megatron's flags.

It is read as `MegatronLMPlugin` of accelerate 1.15.0 (utils/dataclasses.py) reads what `accelerate launch`
passes on. Where a file does not mention them, the plugin recomputes every layer and splits every sequence
over 2 ranks. Few users mean that, so both keys are required here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.errors import InputError, did_you_mean
from zsim.programs.megatron_lm.arguments import Arguments
from zsim.programs.megatron_lm.degrees import read_degrees
from zsim.programs.megatron_lm.flags import SWITCHES
from zsim.programs.megatron_lm.read import settings_of
from zsim.specs.formats.config_file import TrainingFile

_PREFIX = "megatron_lm_"
_FLAGS = {
    "tp_degree": "tensor-model-parallel-size",
    "pp_degree": "pipeline-model-parallel-size",
    "sequence_parallelism": "sequence-parallel",
    "gradient_clipping": "clip-grad",
    "use_distributed_optimizer": "use-distributed-optimizer",
    "use_custom_fsdp": "use-megatron-fsdp",
    "use_precision_aware_optimizer": "use-precision-aware-optimizer",
    "optimizer_cpu_offload": "optimizer-cpu-offload",
    "overlap_cpu_optimizer_d2h_h2d": "overlap-cpu-optimizer-d2h-h2d",
    "decoder_last_pipeline_num_layers": "decoder-last-pipeline-num-layers",
    "recompute_activations": "recompute-activations",
    "recompute_granularity": "recompute-granularity",
    "recompute_method": "recompute-method",
    "recompute_num_layers": "recompute-num-layers",
    "context_parallel_size": "context-parallel-size",
    "expert_model_parallel_size": "expert-model-parallel-size",
    "expert_tensor_parallel_size": "expert-tensor-parallel-size",
    "no_load_optim": "no-load-optim",
    "no_save_optim": "no-save-optim",
    "eod_mask_loss": "eod-mask-loss",
    "attention_softmax_in_fp32": "attention-softmax-in-fp32",
    "calculate_per_token_loss": "calculate-per-token-loss",
}
# Of the network, which the script's model decides.
_NETWORK = ("attention_dropout", "hidden_dropout", "use_rotary_position_embeddings")
_SPECIAL_KEYS = ("num_micro_batches", "attention_backend")
_REQUIRED = {
    "context_parallel_size": "2 ranks for every sequence",
    "recompute_granularity": "recomputation of every layer",
}


def read_megatron_lm(file: TrainingFile, config: Mapping[str, Any]) -> None:
    """Write the strategy and its parallelism into `file`. The script decides the model, the batch and the
    sequence length.

    Raises InputError for unknown keys and for missing keys that Accelerate fills in surprisingly. Whatever
    Megatron's own flags raise passes through.
    """
    values = {str(key).removeprefix(_PREFIX): value for key, value in config.items() if value is not None}
    valid_keys = (*_FLAGS, *_NETWORK, *_SPECIAL_KEYS)
    for key in values:
        if key not in valid_keys:
            raise InputError(
                f"{file.name}: megatron_lm_config: unknown key "
                f"'{_PREFIX}{key}'{did_you_mean(key, valid_keys)}"
            )
    for key, default in _REQUIRED.items():
        if key not in values:
            raise InputError(
                f"{file.name}: megatron_lm_config: {_PREFIX}{key}: missing, for which Accelerate "
                f"takes {default}; expected it to be said"
            )
    arguments = _arguments(file, values)
    megatron_file = settings_of(arguments)
    file.settings |= megatron_file.settings
    file.defaults |= megatron_file.defaults
    file.notes += megatron_file.notes
    file.resolve_stages = _stage_resolver(arguments)


def _arguments(file: TrainingFile, values: Mapping[str, Any]) -> Arguments:
    arguments = Arguments(file.name)
    precision = file.settings.pop("training.precision", "fp32")
    if precision in ("bf16", "fp16"):
        arguments.values[precision] = True
    for key, value in values.items():
        flag = _FLAGS.get(key)
        if flag is None or str(value).lower() == "none":
            continue
        if flag not in SWITCHES:
            arguments.values[flag] = str(value)
        elif str(value).lower() not in ("true", "false"):
            raise InputError(
                f"{file.name}: megatron_lm_config: {_PREFIX}{key}: found {value!r}, expected true or false"
            )
        elif str(value).lower() == "true":
            arguments.values[flag] = True
    if str(values.get("attention_backend", True)).lower() == "true":
        arguments.values["attention-backend"] = "flash"
    if str(values.get("recompute_granularity")).lower() == "full":
        arguments.values.setdefault("recompute-method", "uniform")
        arguments.values.setdefault("recompute-num-layers", "1")
    count = values.get("num_micro_batches")
    if count is not None and int(arguments.values.get("pipeline-model-parallel-size", 1)) > 1:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise InputError(
                f"{file.name}: megatron_lm_config: {_PREFIX}num_micro_batches: found {count!r}, expected a "
                "whole number of at least 1"
            )
        file.settings["training.gradient_accumulation_steps"] = count
    idle = [f"{_PREFIX}{key}" for key in _NETWORK if key in values]
    if idle:
        file.note(f"megatron_lm_config: the model is the experiment's: {', '.join(idle)}")
    return arguments


def _stage_resolver(arguments: Arguments) -> Any:
    """The function from a number of layers to the split into stages, where the last stage has its own number
    of layers. None where it has not.
    """
    if not arguments.has("decoder-last-pipeline-num-layers"):
        return None

    def resolve_stages(num_layers: int) -> Mapping[str, Any]:
        layer_arguments = Arguments(arguments.where, {**arguments.values, "num-layers": str(num_layers)})
        layers = read_degrees(layer_arguments).get("layers_per_stage")
        return {} if layers is None else {"parallelism.layers_per_stage": layers}

    return resolve_stages
