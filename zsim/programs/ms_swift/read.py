"""ms-swift's file -> an experiment.

Read in ms-swift 4.6.0.dev0 (3602360a): arguments/sft_args.py, base_args/, tuner_args.py,
trainers/arguments.py, pipelines/train/tuner.py, config/. Weights are loaded in `torch_dtype`, also where all
of them are trained, and `bf16` or `fp16` follows it (base_args/model_args.py `_init_mixed_precision`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.operations.operation import operations_of
from zsim.programs.huggingface.adapters import name_linear_layers, write_adapters, write_quantisation
from zsim.programs.huggingface.job import (
    note_full_length,
    precision_of,
    read_attention,
    read_batch,
    read_checkpointing,
    read_labels,
    read_liger,
    read_preferences,
    read_rewards,
    read_synchronisation,
    read_unpaired_preferences,
    write_release,
)
from zsim.programs.huggingface.models import (
    freeze_tower,
    present_names,
    read_model,
    weights_type,
    write_types,
)
from zsim.programs.huggingface.optimizers import read_optimizer
from zsim.programs.huggingface.strategies import read_strategy
from zsim.programs.ms_swift.keys import ADAPTERS, KEYS, MEGATRON_MARKS, RELEASE, SILENT, TUNER_KEYS
from zsim.programs.ms_swift.megatron import read_megatron
from zsim.programs.ms_swift.rollout import read_rollout
from zsim.specs.formats.config_file import TrainingFile, load_table, locate_named_file
from zsim.specs.formats.file_values import FileValues
from zsim.specs.model.huggingface import load_model
from zsim.specs.model.spec import Attention

_SEQUENCES = 16  # of a step, where no accumulation is said


FSDP_FILES: Mapping[str, Mapping[str, Any]] = {
    "fsdp2": {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"fsdp_version": 2, "reshard_after_forward": True, "activation_checkpointing": True},
    }
}


def read_values(name: str, data: Mapping[str, Any]) -> TrainingFile:
    """The settings in ms-swift's values by key, of a file or a command line called `name`."""
    if any(data.get(mark) is not None for mark in MEGATRON_MARKS):
        return read_megatron(name, data)
    file = TrainingFile(name, program="ms-swift")
    values = FileValues(file, _expand_sharding(name, data), KEYS, SILENT, "ms-swift")
    values.refuse_declared()
    is_full = _is_full(values)
    is_quantised = _is_quantised(values, is_full=is_full)
    read_model(values, "model", is_quantised=is_quantised)
    if values.has("reward_funcs") and not values.has("rlhf_type"):
        values.values["rlhf_type"] = "grpo"
        file.note("rlhf_type: taken as grpo, the only one that has reward_funcs")
    is_grpo = values.get("rlhf_type") == "grpo"
    _read_batch(values, is_grpo=is_grpo)
    weights = weights_type(values, "torch_dtype")
    if not values.has("torch_dtype"):
        weights = values.assume("torch_dtype", "the checkpoint's, taken as bfloat16") and "bf16"
    precision = precision_of(values, "bf16" if weights == "bf16" else "fp16")
    file.settings["training.precision"] = precision
    read_checkpointing(values, default=True)
    values.read("torch_compile")
    read_liger(values)
    if not is_grpo:
        _read_length(values)
    read_strategy(values)
    if not values.has("gradient_checkpointing_kwargs") and file.settings["strategy.kind"] != "ddp":
        # trainers/mixin.py `_fix_gradient_checkpointing`
        file.defaults["training.checkpoint_is_reentrant"] = values.flag("gradient_checkpointing", True)
    _change_json(values)
    read_optimizer(values, "optim")
    read_synchronisation(values)
    read_attention(values, "attn_impl")
    write_types(values.file, precision, weights, has_adapters=not is_full)
    if frozen := present_names(values, "freeze_parameters"):
        file.settings["training.frozen"] = [f"{beginning}*" for beginning in frozen]
    if not is_full:
        _read_adapters(values, is_quantised=is_quantised)
    freeze_tower(
        values,
        tower=values.flag("freeze_vit", True),
        projector=values.flag("freeze_aligner", True),
        is_full=is_full,
    )
    if is_grpo:
        read_rollout(values)
    else:
        if values.has("external_plugins"):
            file.note("external_plugins: code of one's own is left out, though a step may depend on it")
        _read_preferences(values, is_full=is_full)
    _read_task(values, is_full=is_full)
    _read_machines(values)
    write_release(values)
    values.finish(RELEASE)
    return file


def _expand_sharding(name: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values with what the file or the name at `fsdp` says of FSDP (sft_args.py `_init_fsdp`)."""
    words = data.get("fsdp")
    content: Any = FSDP_FILES.get(words, words) if isinstance(words, str) else words
    if isinstance(content, str) and content.endswith(".json"):
        expected = f"a JSON, or {', '.join(FSDP_FILES)}"
        content = load_table(locate_named_file(content, Path(name).parent, f"{name}: fsdp", expected))
    if not isinstance(content, Mapping):
        return data
    keys = ("fsdp", "fsdp_config")
    return {**data, "fsdp": "full_shard auto_wrap", **{key: content[key] for key in keys if key in content}}


def _read_machines(values: FileValues) -> None:
    """Read the GPUs that Ray gives to training (ray_utils/resource_manager.py): a number, ranks, or the
    `list(range(0, 4))` that ms-swift evaluates.
    """
    groups = values.table("device_groups")
    if not values.flag("use_ray"):
        return
    for name, group in groups.items():
        if not isinstance(group, Mapping) or "default" not in (group.get("workers") or ()):
            continue
        ranks = group.get("ranks")
        count = _rank_count(ranks)
        if count < 1:
            raise InputError(
                f"{values.file.name}: device_groups.{name}.ranks: found {ranks!r}, expected a number, a list "
                "or list(range(0, 4))"
            )
        per_node = groups.get("nproc_per_node")
        nodes = -(-count // per_node) if isinstance(per_node, int) and per_node > 0 else 1
        values.file.settings |= {"nodes": nodes, "gpus": count}


def _rank_count(ranks: Any) -> int:
    """The number of ranks that are a number, a list or a range. Zero for anything else."""
    if isinstance(ranks, list):
        return len(ranks)
    if re.fullmatch(r"\d{1,9}", text := str(ranks).strip()):
        return int(text)
    span = re.fullmatch(r"list\(range\(\s*(\d{1,9}(?:\s*,\s*\d{1,9}){0,2})\s*\)\)", text)
    numbers = [int(number) for number in span[1].split(",")] if span else [0]
    return 0 if numbers[2:] == [0] else len(range(*numbers))


def _read_task(values: FileValues, *, is_full: bool) -> None:
    """Read `task_type`: of seq_cls the head has `num_labels` outputs."""
    task = str(values.get("task_type", "causal_lm"))
    if task == "seq_cls":
        read_labels(
            values, values.count("num_labels") or values.assume("num_labels", 2), has_adapters=not is_full
        )
    elif task != "causal_lm":
        raise values.lack("task_type", "embeddings and rerankers; expected causal_lm or seq_cls")


def _read_preferences(values: FileValues, *, is_full: bool) -> None:
    """Read `swift rlhf`, whose reference is a copy, or the base of the adapters."""
    loss = values.get("rlhf_type")
    if loss is None:
        return
    if loss == "rm":
        read_rewards(values, has_adapters=not is_full)
        return
    if loss == "kto" and not values.has("ref_model"):
        read_unpaired_preferences(values, reference="copy" if is_full else "base")
        return
    if loss not in ("dpo", "orpo", "cpo", "simpo", "kto"):
        raise values.lack(
            "rlhf_type", "it (swift rlhf) yet; expected one of dpo, kto, orpo, cpo, simpo, rm, grpo, or none"
        )
    if values.has("ref_model"):
        raise values.lack("ref_model", "another model than the trained one as the reference")
    reference = ("copy" if is_full else "base") if loss == "dpo" else None
    read_preferences(values, str(loss).upper(), reference=reference)


def _is_full(values: FileValues) -> bool:
    key = next((key for key in TUNER_KEYS if values.has(key)), "tuner_type")
    kind = str(values.get(key, "lora"))
    if kind not in ("lora", "full"):
        raise values.lack(key, f"{key} {kind}; expected lora or full")
    if not values.has(key):
        values.assume(key, "lora")
    return kind == "full"


def _is_quantised(values: FileValues, *, is_full: bool) -> bool:
    if not values.has("quant_method") and not values.has("quant_bits"):
        return False
    if values.get("quant_method") != "bnb" or values.count("quant_bits") not in (4, 8):
        raise values.lack(
            "quant_method", "quantised weights besides bitsandbytes' (quant_method bnb, quant_bits 4 or 8)"
        )
    if is_full:
        raise values.lack("quant_bits", "quantised weights without an adapter, which nothing trains")
    return True


def _read_batch(values: FileValues, *, is_grpo: bool) -> None:
    read_batch(values)
    if is_grpo or values.has("gradient_accumulation_steps"):
        return
    size = values.count("per_device_train_batch_size") or 1
    values.file.defaults.pop("training.gradient_accumulation_steps", None)
    values.file.note(
        f"gradient_accumulation_steps: ms-swift makes a step of at least {_SEQUENCES} sequences where the "
        f"file does not say; simulated as {math.ceil(_SEQUENCES / size / 8)}, which it is on 8 GPUs"
    )
    values.file.defaults["training.gradient_accumulation_steps"] = math.ceil(_SEQUENCES / size / 8)


def _read_length(values: FileValues) -> None:
    is_packed = values.flag("packing")
    key = "packing_length" if is_packed and values.has("packing_length") else "max_length"
    if length := values.count(key):
        values.file.settings["training.sequence_length"] = length
        note_full_length(values, key, is_packed=is_packed)
        return
    values.file.note(
        f"{key}: none, so documents are as long as they are, up to the model's; training.sequence_length "
        "says what is simulated"
    )


def _change_json(values: FileValues) -> None:
    """Write what arguments change in DeepSpeed's file, and the ranks that share a sequence."""
    settings = values.file.settings
    if (context := values.count("sequence_parallel_size") or 1) > 1:
        _refuse_ring(values, context)
        settings |= {"parallelism.context": context, "parallelism.context_method": "all-to-all"}
    config = settings.get("strategy.config")
    for key, feature in (
        ("zero_hpz_partition_size", "zero_hpz_partition_size"),
        ("deepspeed_autotp_size", "autotp_size"),
    ):
        if not values.has(key):
            continue
        if not isinstance(config, dict):
            raise values.lack(key, f"a change of the file that deepspeed names; write {feature} into it")
        section = "zero_optimization" if key == "zero_hpz_partition_size" else "tensor_parallel"
        config = {**config, section: {**config.get(section, {}), feature: values.count(key)}}
        settings["strategy.config"] = config


def _refuse_ring(values: FileValues, ranks: int) -> None:
    """Refuse what ranks share beside heads (sequence_parallel/sequence_parallel.py `prepare`).

    A ring has the ranks that do not divide the heads of keys and values.
    """
    name = values.file.defaults.get("model")
    model = load_model(name) if isinstance(name, str) else None
    if model is None:
        return
    modules = (module for block in model.unique_blocks for module in block.modules)
    for attention in operations_of(modules, Attention):
        if attention.num_kv_heads % ranks:
            raise values.lack(
                "sequence_parallel_size",
                f"a ring of ranks, which ms-swift has where {ranks} do not divide "
                f"the {attention.num_kv_heads} heads of keys and values",
            )


def _read_adapters(values: FileValues, *, is_quantised: bool) -> None:
    write_adapters(values, ADAPTERS, "all-linear")
    name_linear_layers(values)
    if pattern := values.get("target_regex"):
        values.file.settings["training.lora.targets"] = str(pattern)
    dtype = weights_type(values, "lora_dtype")
    if dtype in ("bf16", "fp32"):
        values.file.settings["training.lora.dtype"] = dtype
    if is_quantised:
        bits = values.count("quant_bits") or 4
        write_quantisation(values, double=values.flag("bnb_4bit_use_double_quant", True), bits=bits)
