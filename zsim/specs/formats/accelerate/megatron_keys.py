"""Accelerate's `megatron_lm_config` -> settings of an experiment, by way of Megatron's flags.

It is read as `MegatronLMPlugin` of accelerate 1.15.0 (utils/dataclasses.py) reads what `accelerate launch`
passes on. Where a file does not mention them, the plugin recomputes every layer and splits every sequence
over 2 ranks. Few users mean that, so both keys are required here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.errors import InputError, did_you_mean
from zsim.specs.formats.megatron.arguments import Arguments
from zsim.specs.formats.megatron.degrees import read_degrees
from zsim.specs.formats.megatron.flags import SWITCHES
from zsim.specs.formats.megatron.read import settings_of
from zsim.specs.formats.training_file import TrainingFile

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
_OWN = ("num_micro_batches", "attention_backend")
_ASKED = {
    "context_parallel_size": "2 ranks for every sequence",
    "recompute_granularity": "recomputation of every layer",
}


def read_megatron_lm(file: TrainingFile, config: Mapping[str, Any]) -> None:
    """Write the strategy and its parallelism into `file`. The script decides the model, the batch and the
    sequence length.

    Raises InputError for unknown keys and for missing keys that Accelerate fills in surprisingly. Whatever
    Megatron's own flags raise passes through.
    """
    given = {str(key).removeprefix(_PREFIX): value for key, value in config.items() if value is not None}
    known = (*_FLAGS, *_NETWORK, *_OWN)
    for key in given:
        if key not in known:
            raise InputError(
                f"{file.name}: megatron_lm_config: unknown key '{_PREFIX}{key}'{did_you_mean(key, known)}"
            )
    for key, what in _ASKED.items():
        if key not in given:
            raise InputError(
                f"{file.name}: megatron_lm_config: {_PREFIX}{key}: missing, for which Accelerate "
                f"takes {what}; expected it to be said"
            )
    found = _arguments(file, given)
    read = settings_of(found)
    file.says |= read.says
    file.assumes |= read.assumes
    file.notes += read.notes
    file.by_layers = _last_stage(found)


def _arguments(file: TrainingFile, given: Mapping[str, Any]) -> Arguments:
    found = Arguments(file.name)
    precision = file.says.pop("training.precision", "fp32")
    if precision in ("bf16", "fp16"):
        found.values[precision] = True
    for key, value in given.items():
        flag = _FLAGS.get(key)
        if flag is None or str(value).lower() == "none":
            continue
        if flag not in SWITCHES:
            found.values[flag] = str(value)
        elif str(value).lower() not in ("true", "false"):
            raise InputError(
                f"{file.name}: megatron_lm_config: {_PREFIX}{key}: found {value!r}, expected true or false"
            )
        elif str(value).lower() == "true":
            found.values[flag] = True
    if str(given.get("attention_backend", True)).lower() == "true":
        found.values["attention-backend"] = "flash"
    if str(given.get("recompute_granularity")).lower() == "full":
        found.values.setdefault("recompute-method", "uniform")
        found.values.setdefault("recompute-num-layers", "1")
    count = given.get("num_micro_batches")
    if count is not None and int(found.values.get("pipeline-model-parallel-size", 1)) > 1:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise InputError(
                f"{file.name}: megatron_lm_config: {_PREFIX}num_micro_batches: found {count!r}, expected a "
                "whole number of at least 1"
            )
        file.says["training.gradient_accumulation_steps"] = count
    idle = [f"{_PREFIX}{key}" for key in _NETWORK if key in given]
    if idle:
        file.note(f"megatron_lm_config: the model is the experiment's: {', '.join(idle)}")
    return found


def _last_stage(found: Arguments) -> Any:
    """The function from a number of layers to the split into stages, where the last stage has its own number
    of layers. None where it has not.
    """
    if not found.has("decoder-last-pipeline-num-layers"):
        return None

    def by_layers(num_layers: int) -> Mapping[str, Any]:
        whole = Arguments(found.where, {**found.values, "num-layers": str(num_layers)})
        layers = read_degrees(whole).get("layers_per_stage")
        return {} if layers is None else {"parallelism.layers_per_stage": layers}

    return by_layers
