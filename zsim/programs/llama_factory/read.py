"""LLaMA-Factory's file -> an experiment.

Read in LLaMA-Factory 0.9.6.dev0 (ff6d4d12): hparams/parser.py, model/adapter.py, model/loader.py,
model/model_utils/checkpointing.py and quantization.py.

# [Note: the types of LLaMA-Factory's weights]
The model is loaded in the type that it computes in. What is trained is then cast to fp32, adapters or all
weights. With `pure_bf16` nothing is cast and nothing runs under autocast, and under ZeRO-3 the engine has
fp32 masters (model/adapter.py `init_adapter`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.errors import InputError
from zsim.programs.huggingface.adapters import (
    keep_adapters_in_bf16,
    name_linear_layers,
    write_adapters,
    write_quantisation,
)
from zsim.programs.huggingface.job import (
    note_full_length,
    precision_of,
    read_batch,
    read_liger,
    read_preferences,
    read_synchronisation,
    read_unpaired_preferences,
    write_release,
)
from zsim.programs.huggingface.models import freeze_tower, read_model, write_types
from zsim.programs.huggingface.optimizers import read_optimizer
from zsim.programs.huggingface.strategies import read_strategy
from zsim.programs.llama_factory.engine import read_engine
from zsim.programs.llama_factory.keys import ADAPTERS, ENGINE_MARKS, KEYS, RELEASE, SILENT
from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.file_values import FileValues

_STAGES = {
    "rm": "reward models, whose head has one output (stage: rm), yet; expected stage pt, sft or dpo",
    "ppo": "PPO, whose step has rollouts and four models (stage: ppo), yet; expected stage pt, sft or dpo",
}
_TYPES = {
    "freeze": "training of some layers (finetuning_type: freeze); expected lora or full, and training.frozen",
    "oft": "orthogonal adapters (finetuning_type: oft); expected lora or full",
}
_CUTOFF = 2048
_NOT_TRAINING = ("do_predict", "do_eval", "export_dir", "infer_backend")


def read_values(name: str, data: Mapping[str, Any]) -> TrainingFile:
    """The settings in LLaMA-Factory's values by key, of a file or a command line called `name`."""
    if any(data.get(mark) is not None for mark in ENGINE_MARKS):
        return read_engine(name, data)
    file = TrainingFile(name, program="llama-factory")
    values = FileValues(file, data, KEYS, SILENT, "LLaMA-Factory")
    _check_purpose(values)
    is_full = _is_full(values)
    is_quantised = _is_quantised(values, is_full=is_full)
    read_model(values, "model_name_or_path", is_quantised=is_quantised)
    read_batch(values)
    _read_length(values)
    _read_checkpointing(values)
    values.read("torch_compile")
    read_liger(values, "enable_liger_kernel")
    file.settings["training.precision"] = precision = _precision(values, is_full=is_full)
    read_strategy(values)
    read_optimizer(values, "optim")
    read_synchronisation(values)
    _read_attention(values)
    _write_types(values, precision, is_full=is_full)
    if not is_full:
        write_adapters(values, ADAPTERS, "all-linear")
        name_linear_layers(values)
        if not values.has("lora_alpha"):  # twice the rank
            file.settings["training.lora.alpha"] = 2.0 * file.settings["training.lora.rank"]
        if values.flag("pure_bf16"):
            keep_adapters_in_bf16(file.settings)
        elif file.settings["strategy.kind"] == "ddp" and "training.lora.modules_to_save" in file.settings:
            file.settings["training.lora.dtype"] = "fp32"
        if is_quantised:
            bits = values.count("quantization_bit") or 4
            write_quantisation(values, double=values.flag("double_quantization", True), bits=bits)
    # adapters are never on the projector (model/model_utils/misc.py `find_all_linear_modules`)
    freeze_tower(
        values,
        tower=values.flag("freeze_vision_tower", True),
        projector=values.flag("freeze_multi_modal_projector", True) or not is_full,
        is_full=is_full,
        aligners=("merger",),  # model_utils/visual.py `vision_model_keys` have the others
    )
    if values.get("stage") in ("dpo", "kto"):
        _read_preferences(values, is_full=is_full)
    if workers := values.count("ray_num_workers"):
        file.settings["gpus"] = workers
        file.note(f"ray_num_workers: {workers} GPUs, as under USE_RAY=1, without which it does not count")
    write_release(values)
    values.finish(RELEASE)
    return file


def _check_purpose(values: FileValues) -> None:
    """Raises for files of anything but a training that zsim simulates."""
    values.refuse_declared()
    if not values.flag("do_train") and (
        "do_train" in values.values
        or any(values.has(key) for key in _NOT_TRAINING)
        or not (values.has("dataset") or values.has("per_device_train_batch_size") or values.has("stage"))
    ):
        raise InputError(
            f"{values.file.name}: is LLaMA-Factory's, but trains nothing (do_train is not true); expected a "
            "file of a training"
        )
    stage = values.choose("stage", "sft", ("pt", "sft", "dpo", "kto", *_STAGES))
    if stage in _STAGES:
        raise values.lack("stage", _STAGES[stage])


def _read_preferences(values: FileValues, *, is_full: bool) -> None:
    """Read stages dpo and kto. Their reference is a copy in 16 bits, or the base of the adapters."""
    loss = str(values.get("pref_loss", "sigmoid"))
    if values.has("ref_model"):
        raise values.lack("ref_model", "another model than the trained one as the reference")
    is_unpaired = values.get("stage") == "kto"
    reference: str | None = "copy" if is_full else "base"
    if not is_unpaired and loss in ("orpo", "simpo"):
        reference = None
    precision = values.file.settings["training.precision"]
    if reference == "copy" and precision != "fp32" and values.file.settings["strategy.kind"] == "ddp":
        values.file.settings["training.frozen_dtype"] = precision
    if reference is not None and is_unpaired:
        read_unpaired_preferences(values, reference=reference)
    else:
        read_preferences(values, f"stage dpo ({loss})", reference=reference)


def _is_full(values: FileValues) -> bool:
    kind = values.choose("finetuning_type", "lora", ("lora", "full", *_TYPES))
    if kind in _TYPES:
        raise values.lack("finetuning_type", _TYPES[kind])
    if not values.has("finetuning_type"):
        values.assume("finetuning_type", "lora")
    return kind == "full"


def _is_quantised(values: FileValues, *, is_full: bool) -> bool:
    bits = values.count("quantization_bit")
    if bits is None:
        return False
    method = str(values.get("quantization_method", "bnb"))
    if method not in ("bnb", "bitsandbytes"):
        raise values.lack("quantization_method", "weights in 4 bits of other libraries than bitsandbytes")
    if bits not in (4, 8):
        raise values.lack("quantization_bit", f"frozen weights in {bits} bits; expected 4 or 8")
    if is_full:
        raise InputError(
            f"{values.file.name}: quantization_bit: found {bits} with finetuning_type full, which "
            "LLaMA-Factory refuses; expected lora"
        )
    return True


def _read_length(values: FileValues) -> None:
    length = values.count("cutoff_len") or values.assume("cutoff_len", _CUTOFF)
    values.put("training.sequence_length", length, "cutoff_len")
    is_packed = values.flag("packing", values.get("stage") == "pt") or values.flag("neat_packing")
    note_full_length(values, "cutoff_len", is_packed=is_packed)


def _read_checkpointing(values: FileValues) -> None:
    """Read the checkpoints, which are on and reentrant where the file does not say."""
    if values.flag("disable_gradient_checkpointing"):
        values.file.settings["training.activation_checkpointing"] = "none"
        return
    values.put("training.activation_checkpointing", "full", "disable_gradient_checkpointing")
    if not values.has("disable_gradient_checkpointing"):
        values.assumptions.append("gradient checkpointing on")
    if values.flag("use_unsloth_gc"):
        # a non-blocking `to("cpu")`, whose memory is pinned (model/model_utils/checkpointing.py)
        values.file.settings["training.checkpoint_offload"] = "pinned"
    if values.flag("use_reentrant_gc", True):
        values.put("training.checkpoint_is_reentrant", True, "use_reentrant_gc")


def _precision(values: FileValues, *, is_full: bool) -> str:
    """The type of products. With neither bf16 nor fp16 frozen weights compute in the checkpoint's type, and
    trained ones in fp32 (model/patcher.py `patch_config`, model/adapter.py `init_adapter`).
    """
    precision = "bf16" if values.flag("pure_bf16") else precision_of(values)
    if precision == "fp32" and not is_full and not values.has("deepspeed"):
        values.file.note("neither bf16 nor fp16: frozen weights are in the checkpoint's type, taken as bf16")
        return "bf16"
    return precision


def _write_types(values: FileValues, precision: str, *, is_full: bool) -> None:
    """Write the types, see [Note: the types of LLaMA-Factory's weights]."""
    if values.flag("pure_bf16"):
        write_types(values.file, "fp32" if is_full else "bf16", "bf16", has_adapters=not is_full)
    else:
        write_types(values.file, precision, "fp32" if is_full else precision, has_adapters=not is_full)


def _read_attention(values: FileValues) -> None:
    word = str(values.get("flash_attn", "auto")).lower()
    if word in ("disabled", "false"):
        values.file.settings["training.attention"] = "math"
    elif word == "fa3":
        values.file.settings["training.attention"] = "flash3"
    elif word not in ("auto", "sdpa", "fa2", "true"):
        raise values.error("flash_attn", "one of auto, disabled, sdpa, fa2, fa3")
