"""The files of LLaMA-Factory's newer engine (`USE_V1=1`) -> an experiment.

Read in LLaMA-Factory 0.9.6.dev0 (ff6d4d12), v1/: config/, core/base_trainer.py, plugins/.

# [Note: the types of the newer engine's weights]
A model is loaded in its checkpoint's type, and nothing casts what is trained (core/model_engine.py). FSDP2
gathers in bf16 and reduces in fp32 (`get_mp_policy`), and reduces in every micro-batch. Without
`dist_config` the model is in DDP without autocast, so `bf16` has no effect there. DeepSpeed takes its type
from the JSON alone, and is in bf16 where that says "auto" (`infer_deepspeed_mixed_precision`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zsim.errors import InputError
from zsim.programs.huggingface.adapters import name_linear_layers, write_adapters, write_quantisation
from zsim.programs.huggingface.job import (
    note_full_length,
    read_epochs,
    read_preferences,
    read_rewards,
    write_release,
)
from zsim.programs.huggingface.models import read_model
from zsim.programs.huggingface.strategies import read_strategy
from zsim.programs.llama_factory.keys import ENGINE_ADAPTERS, ENGINE_KEYS, ENGINE_SILENT
from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.file_values import FileValues

RELEASE = "LLaMA-Factory's v1 engine (0.9.6)"
_CUTOFF = 2048
_STAGES = ("train", "sft", "dpo", "rm")
_PLUGINS = ("dist_config", "peft_config", "kernel_config", "quant_config", "optim_config")
_LIGER, _AUTO = "liger_kernel", "auto"


def read_engine(name: str, data: Mapping[str, Any]) -> TrainingFile:
    """The settings in values by key of a file called `name`, whose key `stage` is the launcher's word.

    Raises NotSimulatedError for plugins that zsim lacks, InputError for a file that trains nothing.
    """
    file = TrainingFile(name, program="llama-factory")
    values = FileValues(file, data, ENGINE_KEYS, ENGINE_SILENT, "LLaMA-Factory")
    values.refuse_declared()
    for key in _PLUGINS:
        if values.has(key) and "name" not in values.table(key):
            raise values.error(key, "a key `name` below it")
    peft, quantisation = values.table("peft_config"), values.table("quant_config")
    if "export_dir" in peft:
        raise InputError(f"{name}: is LLaMA-Factory's, but trains nothing (peft_config.export_dir)")
    kind = peft.get("name")
    if kind not in (None, "lora"):
        raise values.lack("peft_config", f"adapters of kind {kind}; expected lora, or none for all weights")
    if peft.get("use_dora"):
        raise values.lack("peft_config", "DoRA, which norms every adapted weight")
    read_model(values, "model", is_quantised=bool(quantisation))
    file.settings["training.micro_batch_size"] = values.count("micro_batch_size", 1)
    file.global_batch_size = values.count("global_batch_size")
    length = values.count("cutoff_len") or values.assume("cutoff_len", _CUTOFF)
    values.put("training.sequence_length", length, "cutoff_len")
    note_full_length(values, "cutoff_len", is_packed=False)
    read_epochs(values, "num_train_epochs", 3)
    values.read("max_grad_norm")
    is_checkpointed = values.flag("enable_activation_checkpointing", True)
    file.settings["training.activation_checkpointing"] = "full" if is_checkpointed else "none"
    if values.get("flash_attn") == "eager":
        file.settings["training.attention"] = "math"
    _read_distribution(values, has_adapters=kind == "lora")
    _read_kernels(values)
    if kind == "lora":
        adapters = FileValues(file, peft, values.keys, values.silent, values.title)
        write_adapters(adapters, ENGINE_ADAPTERS, "all-linear")
        name_linear_layers(values)
        if quantisation:
            bits = quantisation.get("quantization_bit", 4)
            if bits not in (4, 8):
                raise values.lack("quant_config", f"frozen weights in {bits} bits; expected 4 or 8")
            is_double = bool(quantisation.get("double_quantization", True))
            write_quantisation(values, double=is_double, bits=bits)
    elif quantisation:
        raise values.lack("quant_config", "quantised weights without an adapter, which nothing trains")
    _read_stage(values, has_adapters=kind == "lora")
    write_release(values)
    values.finish(RELEASE)
    return file


def _read_distribution(values: FileValues, *, has_adapters: bool) -> None:
    """Read the plugin that shards, see [Note: the types of the newer engine's weights]."""
    settings, config = values.file.settings, values.table("dist_config")
    plugin = config.get("name")
    if values.get("optim_config") and values.table("optim_config").get("name") != "adamw":
        raise values.lack("optim_config", 'the Muon of LLaMA-Factory; expected training.optimizer = "muon"')
    context = values.count("cp_size", 1) or 1
    if plugin == "deepspeed":
        values.values["deepspeed"] = config.get("config_file")
        read_strategy(values)
        settings["training.precision"] = "bf16"
        return
    settings["training.optimizer_implementation"] = "foreach"
    is_low = plugin is None or values.flag("bf16", True)
    settings["training.precision"] = "bf16" if is_low else "fp32"
    if not has_adapters and is_low:
        settings["training.stored_dtype"] = "bf16"
    elif not is_low:
        values.file.note("bf16 false: weights that wait in bf16 are simulated as fp32, as they compute")
    if plugin is None:
        settings["strategy.kind"] = "ddp"
    elif plugin == "fsdp2":
        settings |= {
            "strategy.kind": "fsdp2", "strategy.wrapping": "huggingface", "strategy.no_sync": False,
            "strategy.param_dtype": settings["training.precision"], "strategy.reduce_dtype": "fp32",
        }  # fmt: skip
        if (replicas := values.count("mp_replicate_size", 1)) != 1:
            settings["strategy.replicate"] = replicas
        if config.get("reshard_after_forward") is not None:
            settings["strategy.reshard_after_forward"] = bool(config["reshard_after_forward"])
        if config.get("offload_params"):
            settings["strategy.cpu_offload"] = True
        values.file.note(
            "units of FSDP2 are simulated as blocks and the rest; the engine has adapters, and an embedding "
            "that is not tied, in units of their own"
        )
    else:
        raise values.lack("dist_config", f"its plugin {plugin}; expected fsdp2, deepspeed, or none")
    if context > 1:
        settings |= {"parallelism.context": context, "parallelism.context_method": "all-to-all"}


def _read_kernels(values: FileValues) -> None:
    """Read `kernel_config`, of which `auto` is nothing on GPUs (kernels/interface.py `_AUTO_KERNELS`).

    The loss is of log-probabilities of all logits, also with Liger (core/base_trainer.py).
    """
    settings = values.file.settings
    settings["training.cross_entropy"] = "eager"
    names = str(values.table("kernel_config").get("name", _AUTO)).replace(" ", "").split(",")
    if _LIGER in names:
        settings["training.liger"] = True
    others = [name for name in names if name not in (_LIGER, _AUTO)]
    if others:
        values.file.note(f"kernel_config: left out, though a step depends on it: {', '.join(others)}")


def _read_stage(values: FileValues, *, has_adapters: bool) -> None:
    stage = values.choose("stage", "dpo" if values.has("pref_loss") else "sft", _STAGES)
    if not values.has("stage") and not values.has("pref_loss"):
        values.file.note("the command says the trainer (sft, dpo, rm); taken as sft")
    if stage == "rm":
        read_rewards(values, has_adapters=has_adapters)
    elif stage == "dpo":
        loss = values.get("pref_loss", "sigmoid")
        reference = ("base" if has_adapters else "copy") if loss == "sigmoid" else None
        read_preferences(values, f"dpo ({loss})", reference=reference)
