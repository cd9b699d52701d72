"""torchtitan's TOML and command line -> settings of an experiment."""

from __future__ import annotations

from typing import Any

from zsim.errors import InputError, NotSimulatedError, did_you_mean
from zsim.programs.torchtitan.keys import (
    CONTEXT_DEGREE,
    DEBUG_MODELS,
    IDLE_KEYS,
    IDLE_SECTIONS,
    KEYS,
    PIPELINE_DEGREE,
    PRESETS,
    REFUSED_SWITCHES,
    SECTIONS,
    TENSOR_DEGREE,
)
from zsim.programs.torchtitan.parallel_degrees import read_degrees
from zsim.programs.torchtitan.text import read_settings
from zsim.reading import parse_whole_number
from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.file_values import FileValues, SilentKeys
from zsim.specs.strategy.fp8 import Fp8Recipe

_FLOAT8 = ("float8", "quantize.linear.float8")
_MX = ("mx", "quantize.linear.mx")
_GATHERS = "float8.enable_fsdp_float8_all_gather"
_PRECOMPUTES = "float8.precompute_float8_dynamic_scale_for_fsdp"
_NUM_CHUNKS = 8  # components/loss.py `ChunkedCELoss.Config` (786e26f8)
_NO_EFFECT_IN_DDP = (
    "training.mixed_precision_reduce", "training.enable_cpu_offload",
    "parallelism.fsdp_reshard_after_forward", "parallelism.fsdp_defer_gradient_reduction",
    _GATHERS, _PRECOMPUTES,
)  # fmt: skip


def read_torchtitan(config: str) -> TrainingFile:
    """The settings in a TOML (0.0 to 0.2), in the JSON that 0.3 saves, or in a command line of any of them.

    Raises InputError for keys that are not torchtitan's and for what it refuses, NotSimulatedError for expert
    parallelism and for whatever else changes a step in a way that zsim does not simulate.
    """
    name, settings, is_new = read_settings(config)
    file = TrainingFile(name, program="torchtitan-0.3" if is_new else "torchtitan")
    for key in ("nodes", "gpus"):
        if key in settings:
            file.settings[key] = settings.pop(key)
    _check_keys(file, settings)
    _refuse(file, settings)
    titan_settings = FileValues(file, settings, KEYS, SilentKeys(), "torchtitan")
    _read_batch(titan_settings)
    _read_precision(titan_settings)
    read_degrees(titan_settings)
    _read_sharding(titan_settings, is_new)
    _read_checkpointing(titan_settings, is_new)
    _read_training_options(titan_settings, is_new)
    return file


def _check_keys(file: TrainingFile, settings: dict[str, Any]) -> None:
    """Check types and refuse unknown keys. One note names all keys that have no effect on a step."""
    idle: dict[str, None] = {}
    for key, value in settings.items():
        section, dot, subkey = key.partition(".")
        if not dot:
            idle[f"--{key} (the launcher's)"] = None
        elif key in KEYS:
            _check_type(file, key, value)
        elif section in IDLE_SECTIONS:
            idle[f"[{section}]"] = None
        elif subkey.split(".")[0] in IDLE_KEYS.get(section, ()):
            idle[key] = None
        elif section in IDLE_KEYS:
            section_keys = [entry.partition(".")[2] for entry in KEYS if entry.startswith(f"{section}.")]
            raise InputError(
                f"{file.name}: [{section}]: unknown key '{subkey}'"
                f"{did_you_mean(subkey, [*section_keys, *IDLE_KEYS[section]])}"
            )
        elif did_you_mean(section, SECTIONS):
            raise InputError(f"{file.name}: unknown section [{section}]{did_you_mean(section, SECTIONS)}")
        else:
            idle[f"[{section}] (not torchtitan's own)"] = None
    if idle:
        file.note(f"no effect on a step: {', '.join(idle)}")


def _check_type(file: TrainingFile, key: str, value: Any) -> None:
    expected = KEYS[key].type
    kinds = expected if isinstance(expected, tuple) else (expected,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        words = {
            int: "a whole number",
            float: "a number",
            str: "a string",
            bool: "true or false",
            list: "a list",
        }
        raise InputError(f"{file.name}: {key}: found {value!r}, expected {words[kinds[-1]]}")


def _refuse(file: TrainingFile, settings: dict[str, Any]) -> None:
    for key, feature in REFUSED_SWITCHES.items():
        if settings.get(key):
            raise NotSimulatedError(f"{file.name}: {key}: zsim does not simulate {feature} yet")


def _read_batch(settings: FileValues) -> None:
    settings.read("training.local_batch_size", "training.seq_len")
    global_batch_size = settings.get("training.global_batch_size", -1)
    if global_batch_size == 0:
        raise InputError(
            f"{settings.file.name}: training.global_batch_size: found 0, expected at least 1, or -1 for a "
            "micro-batch on every rank"
        )
    if global_batch_size > 0:
        settings.file.global_batch_size = global_batch_size
    settings.read("training.max_norm")


def _read_precision(settings: FileValues) -> None:
    converters = settings.get("model.converters", [])
    key = "training.mixed_precision_param"
    precision = settings.choose(key, "bfloat16", {"bfloat16": "bf16", "float32": "fp32"})
    settings.choose("training.mixed_precision_reduce", "float32", {"float32": "fp32"})
    settings.read("training.dtype")
    is_fp8 = settings.get("float8.enable_float8_linear", False)
    is_mx = False
    for converter in converters:
        if converter not in (*_FLOAT8, *_MX):
            raise NotSimulatedError(
                f"{settings.file.name}: model.converters: zsim does not simulate '{converter}' yet, only "
                "float8 and mx"
            )
        is_mx = is_mx or converter in _MX
        is_fp8 = is_fp8 or converter in _FLOAT8
    if is_fp8 and is_mx:
        raise InputError(
            f"{settings.file.name}: model.converters: float8 and mx convert the same layers; give one"
        )
    gathers_fp8 = is_fp8 and settings.get(_GATHERS, False)
    settings.put("training.precision", "fp8" if is_fp8 or is_mx else precision, key, "model.converters")
    if is_fp8 or is_mx:
        recipe = _float8_recipe(settings, gathers_fp8=gathers_fp8) if is_fp8 else _mx_recipe(settings)
        settings.put("training.fp8_recipe", recipe, "float8.recipe_name", "mx.recipe_name")
    settings.put("strategy.param_dtype", "fp8" if gathers_fp8 else precision, key)
    if gathers_fp8 and settings.get(_PRECOMPUTES, False):
        settings.put("strategy.precompute_fp8_scales", True, _PRECOMPUTES)
    settings.put("strategy.reduce_dtype", "fp32", "training.mixed_precision_reduce")


def _float8_recipe(settings: FileValues, *, gathers_fp8: bool) -> Fp8Recipe:
    """The recipe of `recipe_name`, which torchtitan refuses beside the gather in fp8."""
    name = settings.get("float8.recipe_name", "") or ""
    if name and gathers_fp8:
        raise InputError(
            f"{settings.file.name}: {_GATHERS}: torchtitan refuses it with recipe_name '{name}'; expected no "
            "recipe_name, which is tensorwise, or no gather in fp8"
        )
    if name == "rowwise_with_gw_hp":
        raise NotSimulatedError(
            f"{settings.file.name}: float8.recipe_name: zsim does not simulate 'rowwise_with_gw_hp' "
            "(gradients of weights in bf16) yet; expected 'rowwise'"
        )
    names: dict[str, Fp8Recipe] = {"tensorwise": "torchao-tensorwise", "rowwise": "torchao-rowwise"}
    return settings.choose("float8.recipe_name", "tensorwise", names) if name else "torchao-tensorwise"


def _mx_recipe(settings: FileValues) -> Fp8Recipe:
    """torchao's MXFP8, simulated with Transformer Engine's casts."""
    name = settings.get("mx.recipe_name", "mxfp8_cublas")
    if not name.startswith("mxfp8"):
        raise NotSimulatedError(
            f"{settings.file.name}: mx.recipe_name: zsim does not simulate '{name}' yet, only 'mxfp8_cublas'"
        )
    settings.file.note("[quantize.linear.mx]: simulated with the casts of Transformer Engine's mxfp8")
    return "mxfp8"


def _read_sharding(settings: FileValues, is_new: bool) -> None:
    replicate_key = "parallelism.data_parallel_replicate_degree"
    shard_key = "parallelism.data_parallel_shard_degree"
    replicate, shard = settings.get(replicate_key, 1), settings.get(shard_key, -1)
    if replicate < 1 or not (shard == -1 or shard >= 1):
        key, value = (replicate_key, replicate) if replicate < 1 else (shard_key, shard)
        raise InputError(
            f"{settings.file.name}: {key}: found {value}, expected at least 1, or -1 for what is left"
        )
    if shard >= 1:
        settings.file.shard_degree = shard
    if shard == 1 and replicate > 1 and not is_new and settings.get(CONTEXT_DEGREE, 1) == 1:
        _read_ddp(settings, replicate)
        return
    settings.file.settings["strategy.kind"] = "fsdp2"
    settings.read(replicate_key, "parallelism.fsdp_reshard_after_forward")
    if settings.file.settings.get("strategy.reshard_after_forward"):
        settings.file.note(
            "fsdp_reshard_after_forward 'always': norm and head are simulated as kept after forward"
        )
    settings.file.defaults["strategy.wrapping"] = "torchtitan"
    if not is_new:
        settings.file.note(
            "units as in torchtitan 0.2 (embedding alone; norm and head together); 0.1's are "
            "strategy.wrapping=torchtitan-0.1"
        )
    settings.read("training.enable_cpu_offload", "parallelism.fsdp_defer_gradient_reduction")


def _read_ddp(settings: FileValues, replicate: int) -> None:
    """Before 0.3, replicas without shards are `replicate(bucket_cap_mb=100)` under torch.autocast.

    `replicate` moves nothing: with `enable_cpu_offload` the model stays on the CPU, its tokens on the GPU.
    """
    file = settings.file
    if settings.get("training.enable_cpu_offload", False):
        raise InputError(
            f"{file.name}: training.enable_cpu_offload: found true with {replicate} replicas of 1 shard, "
            "which torchtitan runs as DDP: it leaves the model on the CPU, and the step fails; expected "
            "false, or a data_parallel_shard_degree above 1"
        )
    if "training.mixed_precision_param" in settings.values:
        stored_dtype = file.settings.get("training.stored_dtype", "fp32")
        file.note(
            f"training.mixed_precision_param: DDP's parameters are {stored_dtype}, torch.autocast computes "
            "in it"
        )
    idle = [key for key in _NO_EFFECT_IN_DDP if key in settings.values]
    if idle:
        file.note(f"no effect with DDP (replicas of 1 shard): {', '.join(idle)}")
    for key in (TENSOR_DEGREE, PIPELINE_DEGREE):
        if settings.get(key, 1) > 1:
            raise InputError(
                f"{file.name}: {key}: found {settings.get(key, 1)} with {replicate} replicas of 1 shard, "
                "which torchtitan runs as DDP and refuses beside other parallelisms; expected 1, or a "
                "data_parallel_shard_degree above 1"
            )
    file.settings["strategy.kind"] = "ddp"
    file.settings["strategy.bucket_cap_mb"] = 100.0
    file.defaults["strategy.no_sync"] = False  # train.py reduces after every micro-batch
    file.shard_degree = None
    file.settings.setdefault("gpus", replicate)
    for table in (file.settings, file.defaults):
        for key in ("strategy.param_dtype", "strategy.reduce_dtype", "strategy.precompute_fp8_scales"):
            table.pop(key, None)


def _read_checkpointing(settings: FileValues, is_new: bool) -> None:
    mode_key, option_key = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
    mode = settings.get(mode_key, "selective")
    if mode == "memory_budget":
        raise NotSimulatedError(
            f"{settings.file.name}: {mode_key}: zsim does not simulate 'memory_budget' yet"
        )
    mode = settings.choose(mode_key, "selective", {name: name for name in ("selective", "full", "none")})
    kind, interval = mode, 1
    if mode == "selective":
        option = str(settings.get(option_key, "op" if is_new else "2"))
        if option == "op":
            kind = "selective-op"
        elif number := parse_whole_number(option):
            kind, interval = "full", number
        else:
            raise InputError(
                f"{settings.file.name}: {option_key}: found '{option}', expected 'op' or a number"
            )
    settings.put("training.activation_checkpointing", kind, mode_key, option_key)
    if interval > 1:
        settings.put("training.checkpoint_every", interval, mode_key, option_key)
    if kind != "none":
        key = "activation_checkpoint.early_stop"
        settings.put("training.checkpoint_stops_early", settings.get(key, False), key)


def _check_chunks(settings: FileValues, is_new: bool) -> None:
    """Raises InputError for chunks before 0.3, NotSimulatedError for another number than the default."""
    key = "loss.num_chunks"
    num_chunks = settings.get(key, _NUM_CHUNKS)
    if not is_new and settings.has(key):
        raise InputError(
            f"{settings.file.name}: {key}: torchtitan before 0.3 computes the loss in one piece; expected no "
            "section [loss], or the command line of 0.3 (--module, --config)"
        )
    if num_chunks != _NUM_CHUNKS:
        raise NotSimulatedError(
            f"{settings.file.name}: {key}: zsim does not simulate {num_chunks} chunks yet; expected "
            f"{_NUM_CHUNKS}"
        )


def _read_training_options(settings: FileValues, is_new: bool) -> None:
    if backend := settings.get("model.attn_backend"):
        settings.file.note(f"attn_backend: '{backend}' is simulated as the GPU's usual fused attention")
    if settings.get("training.disable_cuda_graphs", True) is False:
        settings.file.note("CUDA graphs of forward and backward, on where not disabled, are simulated as off")
    enabled = settings.get("compile.enable", False)
    components = settings.get("compile.components", ["model", "loss"])
    settings.put("training.compile", bool(enabled and "model" in components), "compile.enable")
    _check_chunks(settings, is_new)
    is_loss_compiled = enabled and "loss" in components
    if is_new:
        loss = "torchtitan-chunked-fused" if is_loss_compiled else "torchtitan-chunked"
        settings.put("training.cross_entropy", loss, "compile.components")
    elif enabled and is_loss_compiled != ("model" in components):
        loss = "fused" if is_loss_compiled else "eager"
        settings.put("training.cross_entropy", loss, "compile.components")
    optimizers = {"AdamW": "adamw", "Adam": "adam"}
    name = settings.get("optimizer.name", "AdamW")
    if name not in optimizers:
        raise NotSimulatedError(f"{settings.file.name}: optimizer.name: zsim does not simulate '{name}' yet")
    settings.put("training.optimizer", optimizers[name], "optimizer.name")
    fused = settings.get("optimizer.fused", True)
    key = "optimizer.implementation"
    kinds: dict[str, Any] = {"fused": "fused", "foreach": "foreach", "for-loop": "for_loop"}
    kind = settings.choose(key, "fused" if fused else "foreach", kinds)
    settings.put("training.optimizer_implementation", kind, key, "optimizer.fused")
    flavor = (settings.get("model.name", ""), settings.get("model.flavor", ""))
    if model := PRESETS.get(flavor) or DEBUG_MODELS.get(flavor):
        settings.file.defaults["model"] = model
    elif flavor[0]:
        settings.file.note(f"model {flavor[0]} {flavor[1]}: the experiment's model is simulated")
        settings.file.missing["model"] = f"model {flavor[0]} {flavor[1]}: has no preset; give one (--model)"
