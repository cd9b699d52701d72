"""Megatron's command line, as a script or a list, and its recipes -> settings of an experiment.

Defaults and refusals as in Megatron-Core 0.16.1 (`training/arguments.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from zsim.errors import InputError, NotSimulatedError
from zsim.specs.formats.megatron.architecture import read_architecture
from zsim.specs.formats.megatron.arguments import Arguments, read_arguments, refuse
from zsim.specs.formats.megatron.degrees import read_degrees
from zsim.specs.formats.megatron.effects import IDLE_WITHOUT_EXPERTS, LEFT_OUT, NOT_SIMULATED
from zsim.specs.formats.megatron.expert_flags import read_experts
from zsim.specs.formats.megatron.fsdp_flags import fsdp_gradients, read_fsdp
from zsim.specs.formats.megatron.muon_flags import MUONS, read_muon
from zsim.specs.formats.training_file import TrainingFile
from zsim.specs.strategy.fp8 import Fp8Recipe
from zsim.specs.strategy.megatron_table import GraphModule

_DTYPES = ("fp32", "bf16", "fp16", "fp8")
_FP8_DETAILS = ("fp8-margin", "fp8-interval", "fp8-amax-history-len", "fp8-amax-compute-algo")
_RECIPES: dict[str, Fp8Recipe] = {
    "delayed": "delayed", "tensorwise": "current", "blockwise": "block", "mxfp8": "mxfp8",
}  # fmt: skip
_OPTIMIZERS = ("adam", "sgd", "lion")
_EMERGING = ("soap", "adaptive_muon")  # core/optimizer/emerging_optimizers.py
_INTERLEAVED = ("overlap_p2p", "align_param_gather")
_CONNECTIONS, _ALLOCATOR = "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF"


def read_megatron(config: str | Sequence[str]) -> TrainingFile:
    """The settings in a command line of Megatron.

    Raises InputError for flags and values that Megatron refuses, NotSimulatedError for what changes a step in
    a way that zsim does not simulate.
    """
    return settings_of(read_arguments(config))


def settings_of(found: Arguments) -> TrainingFile:
    """The settings that parsed arguments give."""
    file = TrainingFile(found.where, program="megatron")
    for flag, what in NOT_SIMULATED.items():
        refuse(found, flag, what)
    model = read_architecture(found)
    if model is not None:
        file.assumes["model"] = model
    if found.gpus is not None:
        file.says |= {"nodes": found.nodes, "gpus": found.gpus}
    file.says["strategy.kind"] = "megatron"
    for key, value in read_degrees(found).items():
        file.says[f"parallelism.{key}"] = value
    file.says |= read_experts(found)
    _read_batch(found, file)
    _read_precision(found, file)
    _read_recomputation(found, file)
    _read_kernels(found, file)
    _read_data_parallelism(found, file)
    _read_environment(found, file)
    _note_the_rest(found, file)
    return file


def _read_batch(found: Arguments, file: TrainingFile) -> None:
    length, micro = found.integer("seq-length"), found.integer("micro-batch-size")
    if length is not None:
        file.says["training.sequence_length"] = length
    if micro is None and found.has("num-layers"):
        raise InputError(f"{found.where}: --micro-batch-size: missing, as Megatron asks for it")
    if micro is not None:
        file.says["training.micro_batch_size"] = micro
    file.global_batch_size = found.integer("global-batch-size")
    if found.has("rampup-batch-size"):
        file.note("--rampup-batch-size: the batch after it is simulated")
    clipping = found.number("clip-grad", 1.0)
    (file.says if found.has("clip-grad") else file.assumes)["training.gradient_clipping"] = clipping
    optimizer = found.text("optimizer", "adam", (*_OPTIMIZERS, *MUONS, *_EMERGING)) or "adam"
    if optimizer in _EMERGING:
        raise NotSimulatedError(
            f"{found.where}: --optimizer: found '{optimizer}', Megatron-Core's own since 0.18, which keeps "
            f"second moments of matrices and is not simulated; expected {', '.join(_OPTIMIZERS)} or muon"
        )
    if optimizer in MUONS:
        read_muon(found, file)
        return
    has_momentum = found.number("sgd-momentum", 0.9) > 0
    sgd = "sgd_momentum" if has_momentum else "sgd"
    file.says["training.optimizer"] = {"adam": "adamw", "sgd": sgd}.get(optimizer, optimizer)


def _read_precision(found: Arguments, file: TrainingFile) -> None:
    is_bf16, is_fp16 = found.has("bf16"), found.has("fp16")
    if is_bf16 and is_fp16:
        raise InputError(f"{found.where}: --fp16: Megatron refuses it beside --bf16; give one of them")
    low = "bf16" if is_bf16 else "fp16" if is_fp16 else "fp32"
    fp8 = found.text("fp8-format", None, ("e4m3", "hybrid"))
    fp4 = found.text("fp4-format", None, ("e2m1",))
    if fp8 is not None and fp4 is not None:
        raise InputError(
            f"{found.where}: --fp4-format: Megatron refuses it beside --fp8-format; give one of them"
        )
    if fp8 is None and fp4 is None:
        file.says["training.precision"] = low
        return
    if low != "bf16":
        flag = "fp8-format" if fp4 is None else "fp4-format"
        raise NotSimulatedError(
            f"{found.where}: --{flag}: zsim simulates it beside bf16 only; expected --bf16"
        )
    found.has(*_FP8_DETAILS)
    file.says |= {"training.precision": "fp8", "training.fp8_recipe": _recipe(found, is_fp4=fp4 is not None)}
    if found.has("first-last-layers-bf16"):
        first, last = found.integer("num-layers-at-start-in-bf16"), found.integer("num-layers-at-end-in-bf16")
        file.says["training.bf16_first_layers"] = 1 if first is None else first
        file.says["training.bf16_last_layers"] = 1 if last is None else last
    found.asked |= {"num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16"}
    for flag, key in (("fp8-param-gather", "fp8_param_gather"), ("tp-only-amax-red", "tp_only_amax_red")):
        if found.has(flag):
            file.says[f"strategy.{key}"] = True
    for flag, what in (
        ("fp4-param-gather", "parameters that are gathered in fp4"),
        ("no-fp8-wgrad", "weight gradients in bf16 beside fp8"),
        ("disable-fp8-wgrad", "weight gradients in bf16 beside fp8"),
    ):
        refuse(found, flag, what)


def _recipe(found: Arguments, *, is_fp4: bool) -> Fp8Recipe:
    """The recipe of `--fp8-recipe` or `--fp4-recipe` by zsim's name. Megatron calls current scaling
    tensorwise.
    """
    if is_fp4:
        flag, name, offered = "fp4-recipe", found.text("fp4-recipe", "nvfp4", ("nvfp4", "custom")), "nvfp4"
    else:
        flag, offered = "fp8-recipe", ", ".join(_RECIPES)
        name = found.text("fp8-recipe", "delayed", (*_RECIPES, "custom"))
    if name == "custom":
        raise NotSimulatedError(
            f"{found.where}: --{flag}: zsim does not simulate quantizers of one's own; expected {offered}"
        )
    return "nvfp4" if is_fp4 else _RECIPES[str(name)]


def _read_recomputation(found: Arguments, file: TrainingFile) -> None:
    kind = found.text("recompute-granularity", None, ("full", "selective"))
    if found.has("recompute-activations"):
        kind = "selective"
    method = found.text("recompute-method", None, ("uniform", "block"))
    fewest = 0 if method == "block" else 1  # a block of none is what Megatron's loop makes of 0
    layers = found.integer("recompute-num-layers", minimum=fewest)
    modules = found.texts("recompute-modules")
    if kind is None or (kind == "full" and layers == 0):
        return
    file.says["training.activation_checkpointing"] = kind
    if kind == "selective":
        for flag, value in (("recompute-method", method), ("recompute-num-layers", layers)):
            if value is not None:
                raise InputError(
                    f"{found.where}: --{flag}: Megatron refuses it with --recompute-granularity selective; "
                    "expected full, or --recompute-modules"
                )
        if modules:
            file.says["training.recompute_modules"] = modules
        return
    if method is None or layers is None:
        flag = "recompute-method" if method is None else "recompute-num-layers"
        example = "uniform" if method is None else "1"
        raise InputError(
            f"{found.where}: --{flag}: missing, as Megatron asks for it with --recompute-granularity full; "
            f"expected, for every layer, --{flag} {example}"
        )
    file.says |= {"training.recompute_method": method, "training.recompute_layers": layers}


def _read_kernels(found: Arguments, file: TrainingFile) -> None:
    backend = found.text("attention-backend", "auto", ("flash", "fused", "unfused", "local", "auto"))
    implementation = found.text("transformer-impl", "transformer_engine")
    if implementation == "local":
        file.says["strategy.transformer_impl"] = "local"
    if backend == "flash":
        file.says["training.attention"] = "flash2"
    elif backend == "fused" or found.has("use-flash-attn"):
        file.says["training.attention"] = "flash"
    elif backend in ("unfused", "local") or implementation == "local":
        file.says["training.attention"] = "math"
    if found.has("cross-entropy-loss-fusion"):
        whose = found.text("cross-entropy-fusion-impl", "native", ("native", "te"))
        file.says["training.cross_entropy"] = "fused" if whose == "te" else "megatron-fused"
    found.asked.add("cross-entropy-fusion-impl")
    _read_graphs(found, file)


def _read_graphs(found: Arguments, file: TrainingFile) -> None:
    """Read the CUDA graphs of a step, or of parts of every layer (`--cuda-graph-scope`,
    `--cuda-graph-modules`).
    """
    kind = found.text("cuda-graph-impl", "none")
    names = [*found.texts("cuda-graph-scope"), *found.texts("cuda-graph-modules")]
    found.asked.add("cuda-graph-warmup-steps")
    is_old = found.has("enable-cuda-graph", "external-cuda-graph")
    if kind == "none" and not is_old:
        return
    if kind == "full_iteration" or (kind == "local" and names == ["full_iteration"]):
        file.says["strategy.cuda_graph"] = True
    elif names and not is_old and set(names) <= set(get_args(GraphModule)):
        file.says["strategy.cuda_graph_modules"] = names
    else:
        raise NotSimulatedError(
            f"{found.where}: --cuda-graph-impl: zsim does not simulate CUDA graphs of whole layers yet, only "
            f"'local' with --cuda-graph-scope full_iteration, and of {', '.join(get_args(GraphModule))}"
        )


def _read_data_parallelism(found: Arguments, file: TrainingFile) -> None:
    says = file.says
    is_interleaved = says.get("parallelism.virtual_stages", 1) > 1
    for flag, key in (
        ("use-distributed-optimizer", "distributed_optimizer"),
        ("overlap-grad-reduce", "overlap_grad_reduce"),
        ("overlap-param-gather", "overlap_param_gather"),
        ("ddp-average-in-collective", "average_in_collective"),
        ("use-precision-aware-optimizer", "precision_aware_optimizer"),
        ("deterministic-mode", "deterministic_mode"),
        ("test-mode", "test_mode"),
    ):
        if found.has(flag):
            says[f"strategy.{key}"] = True
    for flag, key in (
        ("no-gradient-accumulation-fusion", "gradient_accumulation_fusion"),
        ("no-check-for-nan-in-loss-and-grad", "check_for_nan"),
        ("no-overlap-p2p-communication", "overlap_p2p"),
        ("no-align-grad-reduce", "align_grad_reduce"),
        ("no-align-param-gather", "align_param_gather"),
    ):
        if found.has(flag) and not (key in _INTERLEAVED and not is_interleaved):
            says[f"strategy.{key}"] = False
    if found.integer("timing-log-level", 0, minimum=0) == 2:
        says["strategy.timing_log_level"] = 2
    group = found.integer("microbatch-group-size-per-virtual-pipeline-stage")
    is_flushing = found.has("overlap-p2p-communication-warmup-flush")
    if is_interleaved and group is not None:
        says["strategy.micro_batch_group"] = group
    if is_interleaved and is_flushing:
        says["strategy.overlap_p2p_warmup_flush"] = True
    read_fsdp(found, file)
    bucket, instances = found.integer("ddp-bucket-size"), found.integer("num-distributed-optimizer-instances")
    if bucket is not None:
        says["strategy.bucket_size"] = bucket
    if instances not in (None, 1):
        says["strategy.optimizer_instances"] = instances
    multiple = found.integer("make-vocab-size-divisible-by", 1 if found.has("padded-vocab-size") else None)
    if multiple is not None:
        says["strategy.vocabulary_multiple"] = multiple
    for flag in ("main-grads-dtype", "main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype"):
        dtype = found.text(flag, None, _DTYPES)
        if dtype not in (None, "fp32"):
            says[f"strategy.{flag.replace('-', '_')}"] = dtype
    flags = ("accumulate-allreduce-grads-in-fp32", "grad-reduce-in-bf16", "main-grads-dtype")
    is_said = found.has(*flags, "megatron-fsdp-main-grads-dtype")
    gradients = fsdp_gradients(found) or _gradients(found, says["training.precision"])
    (says if is_said else file.assumes)["strategy.grad_reduce_dtype"] = gradients


def _gradients(found: Arguments, precision: str) -> str:
    """The type in which gradients are accumulated and reduced. With bf16 it is fp32 unless a flag says
    otherwise.
    """
    in_fp32, in_bf16 = found.has("accumulate-allreduce-grads-in-fp32"), found.has("grad-reduce-in-bf16")
    main = found.text("main-grads-dtype", "fp32")
    if precision in ("bf16", "fp8"):
        if in_fp32 and main != "fp32":
            raise InputError(
                f"{found.where}: --main-grads-dtype: found '{main}', which Megatron refuses with "
                "--accumulate-allreduce-grads-in-fp32; expected fp32"
            )
        return "bf16" if in_bf16 or (main != "fp32" and not in_fp32) else "fp32"
    return "fp16" if precision == "fp16" and not in_fp32 else "fp32"


def _read_environment(found: Arguments, file: TrainingFile) -> None:
    connections = found.environment.get(_CONNECTIONS, "")
    if connections.isdecimal() and 1 <= int(connections) <= 32:
        file.says["training.device_max_connections"] = int(connections)
    if "expandable_segments:True" in found.environment.get(_ALLOCATOR, ""):
        file.says["training.expandable_segments"] = True


def _note_the_rest(found: Arguments, file: TrainingFile) -> None:
    """Add a note per reason for flags whose small cost is left out, and one for flags without effect on a
    step.
    """
    for note in found.notes:
        file.note(note)
    left_out = {flag: what for flag, what in LEFT_OUT.items() if found.has(flag)}
    by_reason: dict[str, list[str]] = {}
    for flag, what in left_out.items():
        by_reason.setdefault(what, []).append(f"--{flag}")
    for what, flags in by_reason.items():
        file.note(f"{', '.join(flags)}: {what}")
    rest = [flag for flag in found.values if flag not in found.asked]
    experts = [flag for flag in rest if flag.startswith(IDLE_WITHOUT_EXPERTS)]
    if experts:
        file.note(f"no effect without experts: {', '.join(f'--{flag}' for flag in experts)}")
    idle = [f"--{flag}" for flag in rest if flag not in experts]
    if idle:
        file.note(f"read, no effect on a step: {', '.join(idle)}")
    is_flash = file.says.get("training.attention") != "math"
    if is_flash and file.says.get("training.activation_checkpointing") == "selective":
        file.note("--recompute-granularity selective: runs a fused core of attention twice, and frees little")
