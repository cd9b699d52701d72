"""Megatron's command line, as a script or a list, and its recipes -> settings of an experiment.

Defaults and refusals as in Megatron-Core 0.16.1 (`training/arguments.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.megatron.settings.table import GraphModule
from zsim.programs.environment import read_attention, read_environment
from zsim.programs.megatron_lm.architecture import read_architecture
from zsim.programs.megatron_lm.arguments import Arguments, read_arguments, refuse
from zsim.programs.megatron_lm.degrees import late_stages, read_degrees
from zsim.programs.megatron_lm.expert_flags import read_experts
from zsim.programs.megatron_lm.flags import (
    IDLE_WITHOUT_EXPERTS,
    LEFT_OUT,
    NOT_SIMULATED,
    NOT_SIMULATED_PRECISIONS,
)
from zsim.programs.megatron_lm.fsdp_flags import fsdp_gradients, read_cpu_optimizer, read_fsdp
from zsim.programs.megatron_lm.keys import OFF_SWITCHES, ON_SWITCHES
from zsim.programs.megatron_lm.muon_flags import MUONS, read_muon
from zsim.reading import parse_whole_number
from zsim.specs.formats.config_file import TrainingFile, load_table, locate_named_file
from zsim.specs.strategy.fp8 import Fp8Recipe

_DTYPES = ("fp32", "bf16", "fp16", "fp8")
_FP8_DETAILS = ("fp8-margin", "fp8-interval", "fp8-amax-history-len", "fp8-amax-compute-algo")
_RECIPES: dict[str, Fp8Recipe] = {
    "delayed": "delayed", "tensorwise": "current", "blockwise": "block", "mxfp8": "mxfp8",
}  # fmt: skip
_OPTIMIZERS = ("adam", "sgd", "lion")
_EMERGING = ("soap", "adaptive_muon")  # core/optimizer/emerging_optimizers.py
# Of Megatron-DeepSpeed: flags of another job than a step on all tokens, with all layers.
_OTHER_DEEPSPEED = (
    "ds-sequence-parallel-size", "kd", "mos", "load-teacher", "random-ltd", "cpu-optimizer", "remote-device",
    "memory-centric-tiled-linear", "create-moe-param-group", "checkpoint-in-cpu", "use-tutel",
    "force-ds-sequence-parallel", "ds-sequence-parallel-fpdt", "ds-sequence-parallel-fpdt-offloading",
    "enable-zbh1-pipeline", "enable-zbh1-exact-semantics",
)  # fmt: skip
_FLASH = ("use-flash-attn-v1", "use-flash-attn-v2", "use-flash-attn-triton", "use-flash-attn-builder")
_INTERLEAVED = ("strategy.overlap_p2p", "strategy.align_param_gather")


def read_megatron(
    config: str | Sequence[str], settings: Mapping[str, Any] = MappingProxyType({})
) -> TrainingFile:
    """The settings in a command line of Megatron. Those of the experiment (`settings`, by dotted key) stand
    for variables that nothing sets.

    Raises InputError for flags and values that Megatron refuses, NotSimulatedError for what changes a step in
    a way that zsim does not simulate.
    """
    arguments = read_arguments(config)
    arguments.set_open_flags(settings)
    return settings_of(arguments)


def settings_of(arguments: Arguments) -> TrainingFile:
    """The settings that parsed arguments give."""
    file = TrainingFile(arguments.where, program="megatron")
    if "deepspeed" in arguments.extra_flags:
        _read_fork_values(arguments)
    for flag, feature in NOT_SIMULATED.items():
        refuse(arguments, flag, feature)
    model = read_architecture(arguments)
    if model is not None:
        file.defaults["model"] = model
    elif arguments.hint:
        file.missing["model"] = f"names no model: {arguments.hint}, or give it (--model)"
    if arguments.gpus is not None:
        file.settings |= {"nodes": arguments.nodes, "gpus": arguments.gpus}
    file.settings["strategy.kind"] = "megatron"
    for key, value in read_degrees(arguments).items():
        file.settings[f"parallelism.{key}"] = value
    file.settings |= read_experts(arguments)
    if arguments.has("num-experts"):
        file.defaults["parallelism.dispatcher"] = "all-gather"  # `--moe-token-dispatcher-type`'s default
    _read_batch(arguments, file)
    _read_precision(arguments, file)
    _read_recomputation(arguments, file)
    _read_kernels(arguments, file)
    _read_data_parallelism(arguments, file)
    _read_environment(arguments, file)
    if "deepspeed" in arguments.extra_flags:
        _read_deepspeed(arguments, file)
    _note_ignored_flags(arguments, file)
    file.resolve_stages = late_stages(arguments)
    return file


def _read_batch(arguments: Arguments, file: TrainingFile) -> None:
    length, micro_batch_size = arguments.integer("seq-length"), arguments.integer("micro-batch-size")
    if length is not None:
        file.settings["training.sequence_length"] = length
    if micro_batch_size is None and arguments.has("num-layers") and not arguments.has("micro-batch-size"):
        raise InputError(f"{arguments.where}: --micro-batch-size: missing, as Megatron asks for it")
    if micro_batch_size is not None:
        file.settings["training.micro_batch_size"] = micro_batch_size
    file.global_batch_size = arguments.integer("global-batch-size")
    if arguments.has("rampup-batch-size"):
        file.note("--rampup-batch-size: the batch after it is simulated")
    if schedule := (arguments.text("step-batch-size-schedule") or "").split():
        size = parse_whole_number(schedule[-1].rpartition(":")[2])
        if not size:
            raise InputError(
                f"{arguments.where}: --step-batch-size-schedule: found '{schedule[-1]}', expected where it "
                "begins and a batch, as in 250B:1536"
            )
        file.global_batch_size = size
        file.note("--step-batch-size-schedule: its last batch is simulated")
    if arguments.has("grpo-group-size"):
        file.note("flags of Megatron-RL: an update is simulated as a step of training, without its rollouts")
    clipping = arguments.number("clip-grad", 1.0)
    (file.settings if arguments.has("clip-grad") else file.defaults)["training.gradient_clipping"] = clipping
    optimizer = arguments.text("optimizer", "adam", (*_OPTIMIZERS, *MUONS, *_EMERGING)) or "adam"
    if optimizer in _EMERGING:
        raise NotSimulatedError(
            f"{arguments.where}: --optimizer: found '{optimizer}', Megatron-Core's own since 0.18, which "
            "keeps "
            f"second moments of matrices and is not simulated; expected {', '.join(_OPTIMIZERS)} or muon"
        )
    if optimizer in MUONS:
        read_muon(arguments, file)
        return
    has_momentum = arguments.number("sgd-momentum", 0.9) > 0
    sgd = "sgd_momentum" if has_momentum else "sgd"
    file.settings["training.optimizer"] = {"adam": "adamw", "sgd": sgd}.get(optimizer, optimizer)


def _read_precision(arguments: Arguments, file: TrainingFile) -> None:
    is_bf16, is_fp16 = arguments.has("bf16"), arguments.has("fp16")
    if is_bf16 and is_fp16:
        raise InputError(f"{arguments.where}: --fp16: Megatron refuses it beside --bf16; give one of them")
    low_dtype = "bf16" if is_bf16 else "fp16" if is_fp16 else "fp32"
    fp8 = arguments.text("fp8-format", None, ("e4m3", "hybrid"))
    fp4 = arguments.text("fp4-format", None, ("e2m1",))
    if fp8 is not None and fp4 is not None:
        raise InputError(
            f"{arguments.where}: --fp4-format: Megatron refuses it beside --fp8-format; give one of them"
        )
    if fp8 is None and fp4 is None:
        file.settings["training.precision"] = low_dtype
        return
    if low_dtype != "bf16":
        flag = "fp8-format" if fp4 is None else "fp4-format"
        raise NotSimulatedError(
            f"{arguments.where}: --{flag}: zsim simulates it beside bf16 only; expected --bf16"
        )
    arguments.has(*_FP8_DETAILS)
    file.settings |= {
        "training.precision": "fp8",
        "training.fp8_recipe": _recipe(arguments, is_fp4=fp4 is not None),
    }
    if arguments.has("first-last-layers-bf16"):
        first = arguments.integer("num-layers-at-start-in-bf16")
        last = arguments.integer("num-layers-at-end-in-bf16")
        file.settings["training.bf16_first_layers"] = 1 if first is None else first
        file.settings["training.bf16_last_layers"] = 1 if last is None else last
    arguments.read_flags |= {"num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16"}
    for flag, key in (("fp8-param-gather", "fp8_param_gather"), ("tp-only-amax-red", "tp_only_amax_red")):
        if arguments.has(flag):
            file.settings[f"strategy.{key}"] = True
    for flag, feature in NOT_SIMULATED_PRECISIONS.items():
        refuse(arguments, flag, feature)


def _recipe(arguments: Arguments, *, is_fp4: bool) -> Fp8Recipe:
    """The recipe of `--fp8-recipe` or `--fp4-recipe` by zsim's name. Megatron calls current scaling
    tensorwise.
    """
    if is_fp4:
        flag, name, choices = (
            "fp4-recipe",
            arguments.text("fp4-recipe", "nvfp4", ("nvfp4", "custom")),
            "nvfp4",
        )
    else:
        flag, choices = "fp8-recipe", ", ".join(_RECIPES)
        name = arguments.text("fp8-recipe", "delayed", (*_RECIPES, "custom"))
    if name == "custom":
        raise NotSimulatedError(
            f"{arguments.where}: --{flag}: zsim does not simulate quantizers of one's own; expected {choices}"
        )
    return "nvfp4" if is_fp4 else _RECIPES[str(name)]


def _read_recomputation(arguments: Arguments, file: TrainingFile) -> None:
    kind = arguments.text("recompute-granularity", None, ("full", "selective"))
    if arguments.has("recompute-activations"):
        kind = "selective"
    method = arguments.text("recompute-method", None, ("uniform", "block"))
    minimum = 0 if method == "block" else 1  # a block of none is what Megatron's loop makes of 0
    layers = arguments.integer("recompute-num-layers", minimum=minimum)
    modules = arguments.texts("recompute-modules")
    if arguments.has("moe-layer-recompute"):  # the older word for one of the modules
        kind, modules = kind or "selective", [*(modules or ["core_attn"]), "moe"]
    if kind is None or (kind == "full" and layers == 0):
        return
    file.settings["training.activation_checkpointing"] = kind
    if kind == "selective":
        for flag, value in (("recompute-method", method), ("recompute-num-layers", layers)):
            if value is not None:
                raise InputError(
                    f"{arguments.where}: --{flag}: Megatron refuses it with --recompute-granularity "
                    "selective; expected full, or --recompute-modules"
                )
        if modules:
            file.settings["training.recompute_modules"] = modules
        return
    if method is None or layers is None:
        flag = "recompute-method" if method is None else "recompute-num-layers"
        example = "uniform" if method is None else "1"
        raise InputError(
            f"{arguments.where}: --{flag}: missing, as Megatron asks for it with --recompute-granularity "
            f"full; expected, for every layer, --{flag} {example}"
        )
    file.settings |= {"training.recompute_method": method, "training.recompute_layers": layers}


def _read_kernels(arguments: Arguments, file: TrainingFile) -> None:
    backend = arguments.text("attention-backend", "auto", ("flash", "fused", "unfused", "local", "auto"))
    implementation = arguments.text("transformer-impl", "transformer_engine")
    if implementation == "local":
        file.settings["strategy.transformer_impl"] = "local"
    if backend == "flash":
        file.settings["training.attention"] = "flash2"
    elif backend == "fused" or arguments.has("use-flash-attn"):
        file.settings["training.attention"] = "flash"
    elif backend in ("unfused", "local") or implementation == "local":
        file.settings["training.attention"] = "math"
    if arguments.has("cross-entropy-loss-fusion"):
        fusion = arguments.text("cross-entropy-fusion-impl", "native", ("native", "te"))
        file.settings["training.cross_entropy"] = "fused" if fusion == "te" else "megatron-fused"
    arguments.read_flags.add("cross-entropy-fusion-impl")
    _read_graphs(arguments, file)


def _read_graphs(arguments: Arguments, file: TrainingFile) -> None:
    """Read the CUDA graphs of a step, or of parts of every layer (`--cuda-graph-scope`,
    `--cuda-graph-modules`).
    """
    kind = arguments.text("cuda-graph-impl", "none")
    names = [*arguments.texts("cuda-graph-scope"), *arguments.texts("cuda-graph-modules")]
    arguments.read_flags.add("cuda-graph-warmup-steps")
    is_old = arguments.has("enable-cuda-graph", "external-cuda-graph")
    if arguments.has("grpo-group-size") and not arguments.has("rl-training-cuda-graphs"):
        return  # of rollouts alone (training/arguments.py `validate_args`)
    if kind == "none" and not is_old:
        return
    if kind == "full_iteration" or (kind == "local" and names == ["full_iteration"]):
        file.settings["strategy.cuda_graph"] = True
    elif names and not is_old and set(names) <= set(get_args(GraphModule)):
        file.settings["strategy.cuda_graph_modules"] = names
    else:
        raise NotSimulatedError(
            f"{arguments.where}: --cuda-graph-impl: zsim does not simulate CUDA graphs of whole layers yet, "
            f"only 'local' with --cuda-graph-scope full_iteration, and of {', '.join(get_args(GraphModule))}"
        )


def _read_data_parallelism(arguments: Arguments, file: TrainingFile) -> None:
    settings = file.settings
    is_interleaved = settings.get("parallelism.virtual_stages", 1) > 1
    for key in (*ON_SWITCHES, *OFF_SWITCHES):
        is_given = arguments.has(key.key.removeprefix("--"))
        if is_given and (is_interleaved or key.setting not in _INTERLEAVED):
            key.read(file, {key.key: True})
    if arguments.integer("timing-log-level", 0, minimum=0) == 2:
        settings["strategy.timing_log_level"] = 2
    group = arguments.integer("microbatch-group-size-per-virtual-pipeline-stage")
    is_flushing = arguments.has("overlap-p2p-communication-warmup-flush")
    if is_interleaved and group is not None:
        settings["strategy.micro_batch_group"] = group
    if is_interleaved and is_flushing:
        settings["strategy.overlap_p2p_warmup_flush"] = True
    read_fsdp(arguments, file)
    read_cpu_optimizer(arguments, file)
    bucket = arguments.integer("ddp-bucket-size")
    instances = arguments.integer("num-distributed-optimizer-instances")
    if bucket is not None:
        settings["strategy.bucket_size"] = bucket
    if instances not in (None, 1):
        settings["strategy.optimizer_instances"] = instances
    multiple = arguments.integer(
        "make-vocab-size-divisible-by", 1 if arguments.has("padded-vocab-size") else None
    )
    if multiple is not None:
        settings["strategy.vocabulary_multiple"] = multiple
    for flag in ("main-grads-dtype", "main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype"):
        dtype = arguments.text(flag, None, _DTYPES)
        if dtype not in (None, "fp32"):
            settings[f"strategy.{flag.replace('-', '_')}"] = dtype
    flags = ("accumulate-allreduce-grads-in-fp32", "grad-reduce-in-bf16", "main-grads-dtype")
    is_explicit = arguments.has(*flags, "megatron-fsdp-main-grads-dtype")
    gradients = fsdp_gradients(arguments) or _gradient_dtype(arguments, settings["training.precision"])
    (settings if is_explicit else file.defaults)["strategy.grad_reduce_dtype"] = gradients


def _read_fork_values(arguments: Arguments) -> None:
    """Turn Megatron-DeepSpeed's values into Megatron's: one expert, its default, is a dense model, and norms
    are in small letters (megatron/arguments.py `_add_network_size_args`).

    Raises NotSimulatedError for several experts.
    """
    experts = arguments.values.pop("num-experts", "1")
    if str(experts) != "1":
        raise NotSimulatedError(
            f"{arguments.where}: --num-experts {experts}: zsim does not simulate the experts of "
            "Megatron-DeepSpeed; expected 1, a dense model"
        )
    norms = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
    if (norm := arguments.values.get("normalization")) in norms:
        arguments.values["normalization"] = norms[norm]


def _read_deepspeed(arguments: Arguments, file: TrainingFile) -> None:
    """Turn a job into one of Megatron-DeepSpeed: DeepSpeed's engine and stages, on Megatron's model and
    tensor parallelism (microsoft/Megatron-DeepSpeed megatron/arguments.py `_add_zero_args`, training.py
    `setup_model_and_optimizer`).

    Its JSON is a file here, or a text that the script writes.
    Raises NotSimulatedError for flags of another job.
    """
    extra = arguments.extra_flags
    for flag in _OTHER_DEEPSPEED:
        if extra.get(flag, "0") not in ("0", "1", "none"):
            raise NotSimulatedError(
                f"{arguments.where}: --{flag}: zsim does not simulate it of Megatron-DeepSpeed"
            )
    for flag in ("deepspeed", "deepspeed-activation-checkpointing", "no-pipeline-parallel"):
        extra.pop(flag, None)
    name = extra.pop("deepspeed_config", "")
    if not name:
        raise InputError(f"{arguments.where}: --deepspeed_config: missing; expected a DeepSpeed JSON")
    extra.pop("zero-stage", None)
    settings = file.settings
    config = _deepspeed_json(arguments, name)
    for key in [key for key in settings if key.startswith("strategy.")]:
        del settings[key]
    for key in [key for key in file.defaults if key.startswith("strategy.")]:
        del file.defaults[key]
    for key in ("training.gradient_clipping", *(("training.optimizer",) if "optimizer" in config else ())):
        settings.pop(key, None)
        file.defaults.pop(key, None)
    if not arguments.has("use-flash-attn") and not any(extra.pop(flag, None) is not None for flag in _FLASH):
        settings["training.attention"] = "math"
    settings["strategy.kind"], settings["strategy.config"] = "deepspeed", config
    settings["strategy.config_name"] = name
    file.program = "deepspeed"


def _deepspeed_json(arguments: Arguments, name: str) -> Mapping[str, Any]:
    """The JSON of this name, as the script writes it or, where it does not, as it is here."""
    text = arguments.documents.get(os.path.normpath(name))
    if text is None:
        folder = Path(arguments.where).parent
        return load_table(locate_named_file(name, folder, arguments.where, "a DeepSpeed JSON"))
    try:
        content: object = json.loads(text)
    except ValueError as error:
        raise InputError(f"{arguments.where}: {name}, as the script writes it: no JSON: {error}") from None
    if not isinstance(content, Mapping):
        raise InputError(f"{arguments.where}: {name}, as the script writes it: expected a JSON of keys")
    return content


def _gradient_dtype(arguments: Arguments, precision: str) -> str:
    """The type in which gradients are accumulated and reduced. With bf16 it is fp32 unless a flag says
    otherwise.
    """
    accumulates_in_fp32 = arguments.has("accumulate-allreduce-grads-in-fp32")
    reduces_in_bf16 = arguments.has("grad-reduce-in-bf16")
    main_dtype = arguments.text("main-grads-dtype", "fp32")
    if precision in ("bf16", "fp8"):
        if accumulates_in_fp32 and main_dtype != "fp32":
            raise InputError(
                f"{arguments.where}: --main-grads-dtype: found '{main_dtype}', which Megatron refuses with "
                "--accumulate-allreduce-grads-in-fp32; expected fp32"
            )
        return "bf16" if reduces_in_bf16 or (main_dtype != "fp32" and not accumulates_in_fp32) else "fp32"
    return "fp16" if precision == "fp16" and not accumulates_in_fp32 else "fp32"


def _read_environment(arguments: Arguments, file: TrainingFile) -> None:
    """Read the variables that a script sets. Transformer Engine's choose a core of attention only where the
    flag leaves the choice open.
    """
    read_environment(file, arguments.environment)
    is_open = arguments.text("attention-backend", "auto") == "auto" and not arguments.has("use-flash-attn")
    if is_open and arguments.text("transformer-impl") != "local":
        read_attention(file, arguments.environment)


def _note_ignored_flags(arguments: Arguments, file: TrainingFile) -> None:
    """Add a note per reason for flags whose small cost is left out, and one for flags without effect on a
    step.
    """
    for note in (*arguments.extra_note(), *arguments.notes):
        file.note(note)
    inexact_flags = {flag: reason for flag, reason in LEFT_OUT.items() if arguments.has(flag)}
    flags_per_reason: dict[str, list[str]] = {}
    for flag, reason in inexact_flags.items():
        flags_per_reason.setdefault(reason, []).append(f"--{flag}")
    for reason, flags in flags_per_reason.items():
        file.note(f"{', '.join(flags)}: {reason}")
    unread_flags = [flag for flag in arguments.values if flag not in arguments.read_flags]
    experts = [flag for flag in unread_flags if flag.startswith(IDLE_WITHOUT_EXPERTS)]
    if experts and arguments.has("num-layers"):
        file.note(f"no effect without experts: {', '.join(f'--{flag}' for flag in experts)}")
    idle = [f"--{flag}" for flag in unread_flags if flag not in experts]
    if idle:
        file.note(f"read, no effect on a step: {', '.join(idle)}")
    is_flash = file.settings.get("training.attention") != "math"
    if is_flash and file.settings.get("training.activation_checkpointing") == "selective":
        file.note("--recompute-granularity selective: runs a fused core of attention twice, and frees little")
