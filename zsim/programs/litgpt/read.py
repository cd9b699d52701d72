"""litgpt's YAML -> an experiment.

Read in litgpt 0.5.13 (26857050). On several GPUs full fine-tuning is FSDP1 with a unit and a checkpoint per
block (finetune/full.py), LoRA is FSDP2 with checkpoints (finetune/lora.py `parallelize_fn`), and pre-training
is FSDP1's HYBRID_SHARD without checkpoints, compiled and with a fused optimizer (pretrain.py). One GPU has
none of these. `-true` keeps everything in that type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.programs.huggingface.adapters import keep_adapters_in_bf16, refuse_parts_of_phi
from zsim.programs.huggingface.job import note_full_length, read_epochs
from zsim.programs.huggingface.models import write_model
from zsim.programs.litgpt.keys import KEYS, RELEASE, SILENT, TARGETS
from zsim.specs.formats.config_file import TrainingFile, flatten
from zsim.specs.formats.file_values import FileValues

_PRECISIONS = {
    "bf16-true": ("bf16", True), "bf16-mixed": ("bf16", False), "16-mixed": ("fp16", False),
    "32-true": ("fp32", True), "16-true": ("fp16", True),
}  # fmt: skip
_OPTIMIZERS = {
    "AdamW": "adamw", "Adam": "adam", "SGD": "sgd", "bitsandbytes.optim.AdamW8bit": "adamw-8bit",
    "bitsandbytes.optim.PagedAdamW": "paged-adamw", "bitsandbytes.optim.PagedAdamW8bit": "paged-adamw-8bit",
}  # fmt: skip


def read_values(name: str, data: Mapping[str, Any]) -> TrainingFile:
    """The settings in litgpt's values by key, of a file called `name`."""
    file = TrainingFile(name, program="litgpt")
    values = FileValues(file, dict(flatten(data, ("model_config",))), KEYS, SILENT, "litgpt")
    values.refuse_declared()
    is_pretraining = "model_name" in data
    has_adapters = "lora_r" in data
    key = "model_name" if is_pretraining else "checkpoint_dir"
    write_model(values, key, str(values.get(key)))
    world_size = _read_shape(values, is_pretraining=is_pretraining)
    _read_batch(values, is_pretraining=is_pretraining)
    _read_strategy(values, world_size, is_pretraining=is_pretraining, has_adapters=has_adapters)
    _read_types(values, has_adapters=has_adapters)
    quantize = values.get("quantize")
    _read_optimizer(values, is_pretraining=is_pretraining, is_quantised=quantize is not None)
    if has_adapters:
        _read_adapters(values, quantize, world_size)
    elif quantize is not None:
        raise values.lack("quantize", "quantised weights without adapters, which nothing trains")
    if is_pretraining:
        file.settings["training.compile"] = True
        file.settings["training.cross_entropy"] = "eager"
    values.finish(RELEASE)
    return file


def _read_shape(values: FileValues, *, is_pretraining: bool) -> int:
    """Write how many GPUs there are. 0 stands for all that the experiment has."""
    devices, nodes = values.get("devices", "auto" if is_pretraining else 1), values.count("num_nodes", 1) or 1
    if str(devices) in ("auto", "-1"):
        return 0
    world_size = (values.count("devices", 1) or 1) * nodes
    values.file.settings |= {"gpus": world_size} if nodes == 1 else {"gpus": world_size, "nodes": nodes}
    return world_size


def _read_batch(values: FileValues, *, is_pretraining: bool) -> None:
    file = values.file
    size = values.count("train.micro_batch_size") or values.assume(
        "train.micro_batch_size", 4 if is_pretraining else 1
    )
    file.settings["training.micro_batch_size"] = size
    file.global_batch_size = values.count("train.global_batch_size") or values.assume(
        "train.global_batch_size", 512 if is_pretraining else 16
    )
    if length := values.count("train.max_seq_length"):
        file.settings["training.sequence_length"] = length
    else:
        file.note("train.max_seq_length: none, so a sequence is as long as the experiment says")
    note_full_length(values, "train.max_seq_length", is_packed=is_pretraining)
    read_epochs(values, "train.epochs", 1 if is_pretraining else 5, "train.max_steps")
    norm = values.number("train.max_norm", 1.0 if is_pretraining else 0.0)
    file.settings["training.gradient_clipping"] = norm if is_pretraining else 0.0


def _read_strategy(values: FileValues, world_size: int, *, is_pretraining: bool, has_adapters: bool) -> None:
    settings = values.file.settings
    if world_size == 1:
        settings["strategy.kind"] = "ddp"
        return
    if has_adapters:
        settings |= {"strategy.kind": "fsdp2", "strategy.no_sync": True}
        values.file.defaults["strategy.wrapping"] = "huggingface"
    else:
        settings |= {
            "strategy.kind": "fsdp1", "strategy.wrapping": "huggingface", "strategy.no_sync": True,
            "strategy.sharding_strategy": "HYBRID_SHARD" if is_pretraining else "FULL_SHARD",
        }  # fmt: skip
    if not is_pretraining:
        settings["training.activation_checkpointing"] = "full"


def _read_types(values: FileValues, *, has_adapters: bool) -> None:
    settings = values.file.settings
    precision = values.get("precision")
    if precision is None:
        values.assume("precision", "bf16-mixed")
    dtype, is_true = values.choose("precision", "bf16-mixed", _PRECISIONS)
    if dtype == "fp16" and is_true:
        raise values.lack("precision", "weights that are kept in fp16")
    settings["training.precision"] = dtype
    if settings["strategy.kind"] != "ddp":
        settings |= {"strategy.param_dtype": dtype, "strategy.reduce_dtype": dtype}
    if dtype == "bf16" and is_true:
        if has_adapters:
            keep_adapters_in_bf16(settings)
        else:
            settings["training.stored_dtype"] = "bf16"
    elif has_adapters and dtype != "fp32" and settings["strategy.kind"] == "ddp":
        settings["training.frozen_dtype"] = "fp32"  # autocast over weights that are loaded in fp32


def _read_optimizer(values: FileValues, *, is_pretraining: bool, is_quantised: bool) -> None:
    key = "optimizer.class_path" if values.has("optimizer.class_path") else "optimizer"
    name = str(values.get(key, "AdamW")).removeprefix("torch.optim.")
    if name not in _OPTIMIZERS:
        raise values.lack(key, f"that optimizer; expected one of {', '.join(_OPTIMIZERS)}")
    optimizer = "paged-adamw" if is_quantised else _OPTIMIZERS[name]
    values.file.settings["training.optimizer"] = optimizer
    if not is_pretraining and optimizer in ("adamw", "adam", "sgd"):
        values.file.settings["training.optimizer_implementation"] = "foreach"


def _read_adapters(values: FileValues, quantize: Any, world_size: int) -> None:
    settings = values.file.settings
    defaults = {"lora_query": True, "lora_value": True}
    targets = [
        name for key, names in TARGETS.items() if values.flag(key, defaults.get(key, False)) for name in names
    ]
    name = str(values.get("checkpoint_dir", "")).rpartition("/")[2]
    refuse_parts_of_phi(values, "checkpoint_dir", name, targets, "lora_projection")
    settings |= {
        "training.lora.rank": values.count("lora_r", 8),
        "training.lora.alpha": values.number("lora_alpha", 16.0),
        "training.lora.dropout": values.number("lora_dropout", 0.05),
        "training.lora.targets": targets,
    }
    if quantize is None:
        return
    if str(quantize) not in ("bnb.nf4", "bnb.nf4-dq", "bnb.fp4", "bnb.fp4-dq"):
        raise values.lack("quantize", "that quantisation; expected bnb.nf4 or bnb.nf4-dq")
    if world_size != 1:
        raise values.lack("quantize", "quantised weights on several GPUs, which litgpt refuses")
    settings |= {
        "training.lora.quantized": "nf4",
        "training.lora.double_quantization": str(quantize).endswith("-dq"),
        "training.lora.preparation": "none",
    }
