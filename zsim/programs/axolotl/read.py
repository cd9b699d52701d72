"""axolotl's YAML -> an experiment.

Read in axolotl 067b021c: utils/config/__init__.py (`normalize_config`, `resolve_dtype`), loaders/model.py,
loaders/adapter.py, core/builders/base.py, utils/trainer.py (`setup_fsdp_envs`), utils/schemas.

# [Note: the types of axolotl's weights]
The model is loaded in the type of `bf16`, `bfloat16` or `fp16` (`resolve_dtype`), also where all of it is
trained. PEFT's preparation casts to fp32, and axolotl casts embedding, norms and head back afterwards
(`_configure_embedding_dtypes`), so that the residual stream stays in 16 bits.

# [Note: dropout before experts]
Where PEFT takes names for stacked weights, axolotl lets their adapters go without the dropout that the others
have (`_patch_peft_param_wrapper_dropout`). PEFT alone refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zsim.errors import InputError
from zsim.programs.accelerate.fsdp_keys import read_fsdp
from zsim.programs.axolotl.keys import ADAPTERS, KEYS, RELEASE, SILENT
from zsim.programs.huggingface.adapters import (
    load_mixture,
    name_linear_layers,
    write_adapters,
    write_quantisation,
)
from zsim.programs.huggingface.job import (
    note_full_length,
    read_attention,
    read_epochs,
    read_preferences,
    read_rewards,
    read_unpaired_preferences,
    write_release,
)
from zsim.programs.huggingface.models import freeze_tower, read_model, write_types
from zsim.programs.huggingface.optimizers import read_optimizer
from zsim.programs.huggingface.strategies import read_strategy
from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.file_values import FileValues
from zsim.specs.model.huggingface import load_model

_OPTIMIZERS = {
    "ao_adamw_8bit": ("adamw-8bit-torchao", "fused"),
    "ao_adamw_4bit": ("adamw-4bit-torchao", "fused"),
    "ao_adamw_fp8": ("adamw-fp8-torchao", "fused"),
    "muon": ("muon", "fused"),
}
_CHECKPOINT_COPIES = {"legacy": "pinned", "hidden_states": "stream", "true": "stream"}
_ALL_ON_HOST = (
    "all activations on the host until backward; expected true, with activation_offloading legacy or "
    "hidden_states where checkpoints alone are kept there"
)
_ADAPTER_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
# Patterns of `unfrozen_parameters`, whose dots are literal (utils/freeze.py `LayerNamePattern`).
_LANGUAGE = re.compile(r"\^?model\\?\.language_model(\\?\.\*?)?\$?")
_HEAD = re.compile(r"\^?(lm_head|(model\\?\.(language_model\\?\.)?)?embed_tokens)(\\?\.(\*|weight)?)?\$?")
_PREFERENCES = ("dpo", "ipo", "orpo", "kto")
_CUT_PLUGIN, _LIGER_PLUGIN = "cut_cross_entropy", "liger"
_LIGER_KERNELS = ("liger_rms_norm", "liger_layer_norm", "liger_glu_activation", "liger_swiglu", "liger_rope")


def read_values(name: str, data: Mapping[str, Any]) -> TrainingFile:
    """The settings in axolotl's values by key, of a file called `name`."""
    file = TrainingFile(name, program="axolotl")
    values = FileValues(file, data, KEYS, SILENT, "axolotl")
    if values.table("model_quantization_config_kwargs").get("dequantize"):
        del values.values["model_quantization_config"]  # its weights are 16 bits once they are loaded
    values.refuse_declared()
    adapter = values.get("adapter")
    if adapter not in (None, "", "lora", "qlora"):
        raise values.lack("adapter", "adapters besides lora and qlora")
    is_quantised = values.flag("load_in_4bit") or adapter == "qlora"
    is_int8 = values.flag("load_in_8bit")
    if (is_quantised or is_int8) and not adapter:
        key = "load_in_8bit" if is_int8 else "load_in_4bit"
        raise values.lack(key, "quantised weights without an adapter, which nothing trains")
    if is_quantised and is_int8:
        raise values.error("load_in_8bit", "false beside qlora or load_in_4bit, as axolotl asks for")
    read_model(values, "base_model", is_quantised=is_quantised)
    _read_batch(values)
    _read_strategy(values)
    precision, weights = _types(values)
    _read_checkpointing(values)
    values.read("torch_compile")
    read_optimizer(values, "optimizer", extra=_OPTIMIZERS)
    _read_attention(values)
    _read_plugins(values)
    _read_degrees(values)
    write_types(values.file, precision, weights, has_adapters=bool(adapter))
    if adapter:
        _read_adapters(values, is_quantised=is_quantised)
        if is_int8:
            write_quantisation(values, double=False, bits=8)
    is_frozen = values.flag("freeze_mm_modules") or _trains_language_alone(
        values, is_full=not adapter
    )  # adapters on a tower are frozen with it (utils/freeze.py)
    freeze_tower(values, tower=is_frozen, projector=is_frozen, is_full=not adapter)
    _read_preferences(values, has_adapters=bool(adapter))
    if values.flag("reward_model"):
        read_rewards(values, has_adapters=bool(adapter))
    if values.flag("use_ray") and (workers := values.count("ray_num_workers", 1)):
        file.settings["gpus"] = workers
    read_epochs(values, "num_epochs", 1)
    write_release(values)
    values.finish(RELEASE)
    return file


def _trains_language_alone(values: FileValues, *, is_full: bool) -> bool:
    """Whether `unfrozen_parameters` leave nothing but a tower out. It freezes adapters too (train.py)."""
    patterns = [str(entry) for entry in values.get("unfrozen_parameters") or ()]
    bodies = [pattern for pattern in patterns if not _HEAD.fullmatch(pattern)]
    name = values.file.defaults.get("model")  # none where it is not known here, as of models with towers
    may_have_tower = name is None or (isinstance(name, str) and load_model(name).towers)
    if patterns and not (is_full and may_have_tower and bodies and all(map(_LANGUAGE.fullmatch, bodies))):
        raise values.lack(
            "unfrozen_parameters", "weights of which only named ones are trained; expected training.frozen"
        )
    return bool(patterns)


def _read_preferences(values: FileValues, *, has_adapters: bool) -> None:
    """Read `rl`. axolotl loads a reference beside DPO and IPO, without an adapter (train.py)."""
    loss = values.get("rl")
    if loss is None:
        return
    if loss not in _PREFERENCES:
        raise values.lack("rl", f"it yet; expected one of {', '.join(_PREFERENCES)}, or none")
    if loss == "kto":
        read_unpaired_preferences(values, reference="base" if has_adapters else "copy")
        return
    is_compared = loss != "orpo" and not values.flag("precompute_ref_log_probs")
    reference = ("base" if has_adapters else "copy") if is_compared else None
    read_preferences(values, str(loss).upper(), reference=reference)


def _read_batch(values: FileValues) -> None:
    values.read("micro_batch_size", "sequence_len")
    for key in ("micro_batch_size", "sequence_len"):
        if not values.has(key):
            values.assumptions.append(f"{key} {KEYS[key].default}")
    batch, micro_batch = values.count("batch_size"), values.count("micro_batch_size") or 1
    if batch is not None and not values.has("gradient_accumulation_steps"):
        values.file.settings["training.gradient_accumulation_steps"] = max(1, batch // micro_batch)
    else:
        values.read("gradient_accumulation_steps")
    values.read("max_grad_norm")
    is_packed = not values.has("rl") and (values.flag("sample_packing") or values.has("pretraining_dataset"))
    note_full_length(values, "sequence_len", is_packed=is_packed)


def _types(values: FileValues) -> tuple[str, str]:
    """The types of products under autocast and of weights, see [Note: the types of axolotl's weights]."""
    bf16 = values.get("bf16", "auto")
    if values.flag("bfloat16") or bf16 == "full":
        return "fp32", "bf16"
    if values.flag("float16"):
        return "fp32", "fp16"
    if bf16 == "auto" and values.flag("fp16"):
        return "fp16", "fp16"
    if bf16 == "auto" or values.flag("bf16"):
        if not values.has("bf16"):
            values.assume("bf16", "auto")
        return "bf16", "bf16"
    return ("fp16", "fp16") if values.flag("fp16") else ("fp32", "fp32")


def _read_checkpointing(values: FileValues) -> None:
    """Read `gradient_checkpointing`, and where its checkpoints are kept.

    "legacy" copies them on the compute stream to the pinned memory of a non-blocking `to("cpu")`,
    "hidden_states" on a stream of its own (loaders/patch_manager.py,
    monkeypatch/activation_offload_checkpoint.py), and so does true where all weights are trained. With
    adapters true keeps all activations there, and recomputes none (`_apply_activation_checkpointing` in
    loaders/model.py). `gradient_checkpointing: offload` is both as true
    (`check_gradient_checkpointing_w_offload` in utils/schemas/validation.py). In releases that knew `unsloth`
    it was what "legacy" is now. Checkpoints are reentrant where the file does not say, except with `rl` and
    for Gemma 4 (`normalize_config` in utils/config/__init__.py).
    """
    word = str(values.get("gradient_checkpointing", "")).lower()
    if word == "offload_disk":
        raise values.lack("gradient_checkpointing", _ALL_ON_HOST)
    is_offload = word in ("offload", "unsloth")
    if is_offload:
        values.file.settings["training.activation_checkpointing"] = "full"
    else:
        values.read("gradient_checkpointing")
    offloading = {"offload": "true", "unsloth": "legacy"}.get(word) or str(
        values.get("activation_offloading", "false")
    ).lower()
    if offloading in _CHECKPOINT_COPIES and (offloading != "true" or not values.get("adapter")):
        if not is_offload and not values.flag("gradient_checkpointing"):
            raise values.error("activation_offloading", "gradient_checkpointing: true beside it")
        values.file.settings["training.checkpoint_offload"] = _CHECKPOINT_COPIES[offloading]
    elif offloading not in ("false", "no", "none", ""):
        raise values.lack("gradient_checkpointing" if is_offload else "activation_offloading", _ALL_ON_HOST)
    arguments = values.table("gradient_checkpointing_kwargs")
    is_open = not values.has("gradient_checkpointing_kwargs") and not values.has("rl")
    is_gemma_4 = "gemma-4" in str(values.get("base_model", "")).lower()
    is_reentrant = (is_open or arguments.get("use_reentrant")) and not is_gemma_4
    if is_reentrant and (is_offload or values.flag("gradient_checkpointing")):
        values.put("training.checkpoint_is_reentrant", True, "gradient_checkpointing_kwargs")


def _read_strategy(values: FileValues) -> None:
    """Read DeepSpeed's file or FSDP, which `fsdp_config` asks for with or without `fsdp`."""
    if values.has("deepspeed") or not (values.get("fsdp") or values.get("fsdp_config")):
        read_strategy(values)
        return
    config = {str(key).removeprefix("fsdp_"): value for key, value in values.table("fsdp_config").items()}
    words = {str(word) for word in values.words("fsdp")}
    version = str(values.get("fsdp_version", config.pop("version", 1)))
    config = {key: value for key, value in config.items() if value is not None}
    for key in ("cpu_offload_pin_memory", "final_state_dict_type", "mixed_precision_policy"):
        config.pop(key, None)
    config["version"] = version
    config.setdefault("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    if "offload" in words:
        config["offload_params"] = True
    if version == "1" and "shard_grad_op" in words:
        config.setdefault("sharding_strategy", "SHARD_GRAD_OP")
    if version == "2" and isinstance(config.get("reshard_after_forward"), str):
        config["reshard_after_forward"] = config["reshard_after_forward"].upper() == "FULL_SHARD"
    precision, _ = _types(values)
    values.file.settings["training.precision"] = precision
    read_fsdp(values.file, config, {})


def _read_attention(values: FileValues) -> None:
    if values.has("attn_implementation"):
        read_attention(values, "attn_implementation")
    elif values.flag("eager_attention"):
        values.file.settings["training.attention"] = "math"


def _read_plugins(values: FileValues) -> None:
    """Read Liger's kernels and losses with the head, which need no logits."""
    plugins = " ".join(values.words("plugins")).lower()
    settings = values.file.settings
    kernels = [key for key in _LIGER_KERNELS if values.flag(key)]
    if _LIGER_PLUGIN in plugins or kernels:
        if kernels:
            settings["training.liger"] = True
            settings["training.cross_entropy"] = "eager"
        if values.flag("liger_cross_entropy"):
            settings["training.cross_entropy"] = "liger"
        if values.flag("liger_fused_linear_cross_entropy"):
            settings["training.cross_entropy"] = "fused_linear"
    has_cut = _CUT_PLUGIN in plugins and values.flag("cut_cross_entropy", True)
    if has_cut or values.flag("chunked_cross_entropy"):
        settings["training.cross_entropy"] = "fused_linear"
        key = "cut_cross_entropy" if has_cut else "chunked_cross_entropy"
        values.file.note(f"{key}: simulated as Liger's loss with the head, which keeps no logits either")
    names = [
        str(plugin).rpartition(".")[2]
        for plugin in values.words("plugins")
        if not any(word in plugin.lower() for word in (_CUT_PLUGIN, _LIGER_PLUGIN, "swanlab"))
    ]
    if names:
        values.file.note(f"plugins left out: {', '.join(names)}")


def _read_degrees(values: FileValues) -> None:
    settings, kind = values.file.settings, values.file.settings["strategy.kind"]
    context = values.count("context_parallel_size") or values.count("sequence_parallel_degree") or 1
    tensor = values.count("tensor_parallel_size") or 1
    for key, degree in (("context", context), ("tensor", tensor)):
        if degree > 1 and kind != "fsdp2":
            raise InputError(
                f"{values.file.name}: {key} parallelism of {degree}: zsim simulates axolotl's with FSDP2 "
                f"only (fsdp_version: 2), found strategy {kind}"
            )
    if context > 1:
        ring = str(
            values.get("ring_attn_func", "varlen_llama3" if values.flag("sample_packing") else "batch_ring")
        )
        settings["parallelism.context"] = context
        settings["parallelism.context_method"] = "all-gather" if "llama3" in ring else "p2p"
    if tensor > 1:
        settings |= {"parallelism.tensor": tensor, "parallelism.sequence_parallel": False}
        values.file.note(
            "tensor_parallel_size: simulated as torchtitan splits layers, without sequence parallelism"
        )
    if kind == "fsdp2":
        replicate = values.count("dp_replicate_size")
        if replicate is not None:
            settings["strategy.replicate"] = replicate
        if (shard := values.count("dp_shard_size")) is not None:
            values.file.shard_degree = shard


def _read_adapters(values: FileValues, *, is_quantised: bool) -> None:
    """Read the adapters, see [Note: dropout before experts]."""
    is_linear = values.flag("lora_target_linear")
    write_adapters(values, ADAPTERS)
    settings = values.file.settings
    if is_linear:
        settings["training.lora.targets"] = "all-linear"
        name_linear_layers(values)
    targets = settings.get("training.lora.targets")
    if is_linear and isinstance(targets, list):
        further = values.words("lora_target_modules")
        settings["training.lora.targets"] = [*dict.fromkeys((*targets, *further))]
    has_names = not values.has("lora_target_parameters") and load_mixture(values) is not None
    if has_names and settings["training.lora.dropout"]:
        settings["training.lora.stacked_dropout"] = 0
    if layers := values.get("peft_layers_to_transform"):
        settings["training.lora.layers"] = list(layers) if isinstance(layers, list) else [layers]
    if ranks := values.table("lora_rank_pattern"):
        settings["training.lora.rank_pattern"] = dict(ranks)
    has_kernels = any(values.has(key) for key in _ADAPTER_KERNELS)
    is_plain = not (values.has("rl") or values.flag("trust_remote_code") or values.flag("load_in_8bit"))
    if is_plain and not has_kernels and settings["strategy.kind"] != "fsdp1":
        # `check_auto_enable_lora_kernels` in utils/schemas/config.py
        values.file.note(
            f"{', '.join(_ADAPTER_KERNELS)}: axolotl switches its fused adapters on where the file does not "
            "say; simulated as PEFT's, which read and keep more"
        )
    if is_quantised:
        double = values.table("bnb_config_kwargs").get("bnb_4bit_use_double_quant", True)
        write_quantisation(values, double=bool(double))
    if values.flag("quantize_moe_experts"):
        if is_linear:
            raise values.error("quantize_moe_experts", "lora_target_linear left out, as axolotl asks for")
        if not is_quantised:
            raise values.lack("quantize_moe_experts", "routed experts in 8 bits; expected load_in_4bit")
        settings["training.lora.quantize_experts"] = True
