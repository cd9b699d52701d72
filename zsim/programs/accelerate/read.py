"""Accelerate's YAML (`accelerate config`) -> settings of an experiment.

The rules of `accelerate launch` 1.15.0: commands/launch.py and utils/launch.py turn keys into environment
variables, utils/dataclasses.py (`DeepSpeedPlugin`, `FullyShardedDataParallelPlugin`) read them,
utils/fsdp_utils.py (`fsdp2_prepare_model`) wraps the model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zsim.errors import InputError, NotSimulatedError, did_you_mean
from zsim.programs.accelerate.fsdp_keys import (
    note_idle_keys,
    note_unknown_keys,
    read_fsdp,
    read_sequence_parallelism,
)
from zsim.programs.accelerate.keys import TOP_KEYS
from zsim.programs.accelerate.megatron_keys import read_megatron_lm
from zsim.specs.experiment.programs import listed_programs
from zsim.specs.formats.config_file import TrainingFile, read_file

# ClusterConfig's keys that name machines or belong to other hardware; they have no effect on a step here.
_IDLE = (
    "compute_environment", "debug", "downcast_bf16", "enable_cpu_affinity", "gpu_ids", "machine_rank",
    "main_process_ip", "main_process_port", "main_training_function", "rdzv_backend", "same_network",
    "tpu_env", "tpu_name", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_zone", "use_cpu", "command_file",
    "commands", "ipex_config", "mpirun_config",
)  # fmt: skip
_FP8_IDLE = (
    "margin", "interval", "format", "amax_history_len", "amax_compute_algo", "use_autocast_during_eval",
    "pad_inner_dim", "opt_level",
)  # fmt: skip
_DEEPSPEED_IDLE = (
    "zero3_init_flag", "deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter", "zero3_save_16bit_model",
)  # fmt: skip
_DEEPSPEED = (
    "deepspeed_config_file", "zero_stage", "gradient_accumulation_steps", "gradient_clipping",
    "offload_optimizer_device", "offload_param_device", "offload_optimizer_nvme_path",
    "offload_param_nvme_path", "deepspeed_moe_layer_cls_names",
)  # fmt: skip


def read_accelerate(path: str) -> TrainingFile:
    """The settings in an Accelerate YAML.

    Raises InputError for keys that Accelerate would refuse, NotSimulatedError for other parallelisms.
    """
    return read_file(path, read_values)


def read_values(path: str, data: Mapping[str, Any]) -> TrainingFile:
    """The settings in Accelerate's values by key, of a file or a command line called `path`."""
    file = TrainingFile(path, program="accelerate")
    if not any(key in (*TOP_KEYS, *_IDLE) for key in data):
        words = ", ".join(program.reads for program in listed_programs() if program.reads)
        raise InputError(
            f"{path}: is no file of a program that zsim reads (it has {', '.join(map(str, [*data][:4]))}); "
            f"expected {words}"
        )
    for key in data:  # ClusterConfig refuses them
        if key not in (*TOP_KEYS, *_IDLE):
            raise InputError(f"{path}: unknown key '{key}'{did_you_mean(str(key), (*TOP_KEYS, *_IDLE))}")
    if data.get("use_cpu") is True:
        raise NotSimulatedError(f"{path}: use_cpu: zsim does not simulate training on CPUs; expected false")
    note_idle_keys(file, "", data, _IDLE)
    read_machines(file, data)
    read_precision(file, data)
    read_compiler(file, data)
    kind = str(data.get("distributed_type", "")).upper()
    if kind == "DEEPSPEED":
        _read_deepspeed(file, _section(file, data, "deepspeed_config"), Path(path).parent)
        read_sequence_parallelism(file, _section(file, data, "parallelism_config"))
    elif kind == "FSDP":
        read_fsdp(file, _section(file, data, "fsdp_config"), _section(file, data, "parallelism_config"))
    elif kind == "MEGATRON_LM":
        read_megatron_lm(file, _section(file, data, "megatron_lm_config"))
    elif kind in ("MULTI_GPU", "NO", "FALSE"):
        file.settings["strategy.kind"] = "ddp"
    elif not kind:
        raise InputError(
            f"{path}: distributed_type: missing; expected DEEPSPEED, FSDP, MEGATRON_LM, MULTI_GPU or NO"
        )
    else:
        raise NotSimulatedError(
            f"{path}: distributed_type: zsim does not simulate {kind}; expected DEEPSPEED, FSDP, "
            "MEGATRON_LM, MULTI_GPU or NO"
        )
    _read_fp8(file, _section(file, data, "fp8_config"))
    return file


def _section(file: TrainingFile, data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The keys below `key`. The mapping is empty where the file has none."""
    section = data.get(key) or {}
    if not isinstance(section, Mapping):
        raise InputError(f"{file.name}: {key}: found {section!r}, expected keys and values below it")
    return section


def read_machines(file: TrainingFile, data: Mapping[str, Any]) -> None:
    """Read the number of nodes and GPUs.

    Without `num_processes`, or with its default of -1, each node has as many GPUs as the cluster's.
    """
    nodes, processes = data.get("num_machines", 1), data.get("num_processes", -1)
    for key, value in (("num_machines", nodes), ("num_processes", processes)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise InputError(f"{file.name}: {key}: found {value!r}, expected a whole number")
    if nodes < 1:
        raise InputError(f"{file.name}: num_machines: found {nodes}, expected a whole number of at least 1")
    if processes < -1 or processes == 0:
        raise InputError(
            f"{file.name}: num_processes: found {processes}, expected at least 1, or -1 for all GPUs of "
            "the machines"
        )
    if processes == -1 and "num_machines" in data:
        file.settings["nodes"] = nodes
    elif processes > 0:
        file.settings |= {"gpus": processes} if nodes == 1 else {"nodes": nodes, "gpus": processes}


def read_precision(file: TrainingFile, data: Mapping[str, Any]) -> None:
    """Read the type of products."""
    mixed_precision = data.get("mixed_precision")
    word = (
        "fp16"
        if mixed_precision is None and data.get("fp16")
        else str(mixed_precision if mixed_precision is not None else "no").lower()
    )
    word = "no" if word == "false" else word  # YAML 1.1 reads no as false
    if word not in ("no", "fp16", "bf16", "fp8"):
        raise InputError(
            f"{file.name}: mixed_precision: found {mixed_precision!r}, expected no, fp16, bf16 or fp8"
        )
    config_file = _section(file, data, "deepspeed_config").get("deepspeed_config_file")
    if word != "no":
        file.settings["training.precision"] = word
    elif str(data.get("distributed_type")).upper() != "DEEPSPEED" or not config_file:  # else the JSON says it
        file.settings["training.precision"] = "fp32"


def _read_fp8(file: TrainingFile, config: Mapping[str, Any]) -> None:
    """Read the library of fp8 and its recipe (accelerate 1.15.0 utils/dataclasses.py: `AORecipeKwargs`,
    `TERecipeKwargs`).
    """
    keys = {str(key).removeprefix("fp8_"): value for key, value in config.items()}
    if file.settings.get("training.precision") != "fp8":
        if keys:
            file.note("fp8_config: no effect without mixed_precision fp8")
        return
    backend = str(keys.get("backend", "")).upper()
    if backend == "AO":
        file.settings["training.fp8_recipe"] = "torchao-tensorwise"
        gathers = keys.get("enable_fsdp_float8_all_gather", True) is True
        if gathers and file.settings.get("strategy.kind") == "fsdp2":
            file.settings["strategy.param_dtype"] = "fp8"
        elif "enable_fsdp_float8_all_gather" in keys and gathers:
            file.note("fp8_config.enable_fsdp_float8_all_gather: no effect without FSDP2")
    elif backend == "TE":
        file.settings["training.fp8_recipe"] = "delayed"
        if str(keys.get("override_linear_precision", "")).lower().count("true"):
            raise NotSimulatedError(
                f"{file.name}: fp8_config.override_linear_precision: zsim does not simulate some products "
                "of a layer in bf16"
            )
    elif backend == "MSAMP":
        raise NotSimulatedError(f"{file.name}: fp8_config.backend: zsim does not simulate MS-AMP yet")
    elif backend:
        raise InputError(f"{file.name}: fp8_config.backend: found '{backend}', expected AO, TE or MSAMP")
    else:
        file.note("fp8_config.backend: left out, and Accelerate takes the library that is installed")
    known_keys = ("backend", "enable_fsdp_float8_all_gather", "override_linear_precision", *_FP8_IDLE)
    if unknown := [key for key in keys if key not in known_keys]:
        file.note(f"fp8_config: not read: {', '.join(unknown)}")


def read_compiler(file: TrainingFile, data: Mapping[str, Any]) -> None:
    """Read whether torch.compile is used."""
    config = _section(file, data, "dynamo_config")
    backend = str(data.get("dynamo_backend", config.get("dynamo_backend", "no"))).upper()
    if backend == "INDUCTOR":
        file.settings["training.compile"] = True
    elif backend not in ("NO", "FALSE", "EAGER", "AOT_EAGER"):
        raise NotSimulatedError(
            f"{file.name}: dynamo_backend: zsim does not simulate {backend}, only INDUCTOR"
        )
    idle = [str(key) for key in config if key != "dynamo_backend"]
    if idle and backend == "INDUCTOR":
        file.note(f"dynamo_config: taken as torch.compile with its defaults: {', '.join(idle)}")


def _read_deepspeed(file: TrainingFile, config: Mapping[str, Any], folder: Path) -> None:
    """Read the JSON that is named, or the one that DeepSpeedPlugin writes from the keys."""
    note_idle_keys(file, "deepspeed_config: ", config, _DEEPSPEED_IDLE)
    note_unknown_keys(file, "deepspeed_config: ", config, (*_DEEPSPEED, *_DEEPSPEED_IDLE))
    file.settings["strategy.kind"] = "deepspeed"
    if classes := config.get("deepspeed_moe_layer_cls_names"):
        file.settings["strategy.leaf_modules"] = [
            class_name.strip() for class_name in str(classes).split(",")
        ]
    config_file = config.get("deepspeed_config_file")
    if config_file:
        compatible_keys = ("deepspeed_config_file", "deepspeed_moe_layer_cls_names")
        extra_keys = [key for key in _DEEPSPEED if key in config and key not in compatible_keys]
        if extra_keys:
            raise InputError(
                f"{file.name}: deepspeed_config: {', '.join(extra_keys)}: Accelerate refuses them together "
                "with deepspeed_config_file; set them in the JSON"
            )
        sibling = folder / str(config_file)
        file.settings["strategy.config"] = str(sibling if os.path.isfile(sibling) else config_file)
        return
    zero: dict[str, Any] = {"stage": config.get("zero_stage", 2)}
    for name in ("optimizer", "param"):
        device = str(config.get(f"offload_{name}_device", "none")).lower()
        path = config.get(f"offload_{name}_nvme_path")
        zero[f"offload_{name}"] = {"device": device, **({"nvme_path": path} if device == "nvme" else {})}
    file.settings["strategy.config_name"] = file.name
    file.settings["strategy.config"] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": config.get("gradient_accumulation_steps", "auto"),
        "gradient_clipping": config.get("gradient_clipping", "auto"),
        "zero_optimization": zero,
    }
