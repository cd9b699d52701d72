"""The `[strategy]` of a published run, from its text and related columns. Settings known from its date or
source are in `published_sources.toml`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

from validation.published.mixtures import expert_strategy
from validation.published.parallelism import command_line, is_on, launch_settings
from validation.published.table import PublishedRun
from zsim.errors import NotSimulatedError
from zsim.frameworks.megatron.settings.table import GraphModule

_DEEPSPEED = (
    r"ZeRO-[0123]|HF Trainer \+ DeepSpeed|Megatron TP\d+ \+ DeepSpeed|Megatron-DeepSpeed 3D|"
    r"TP\d+( x)? PP\d+( x)? DP\d+ \+ ZeRO"
)
_MEGATRON = (
    r"Megatron(-LM|-Core|-FSDP| dist-opt| DDP)|DDP (\+ distributed optimizer|dist-opt)|PTD-P|TP\+PP\+DP|"
    r"TP\d+( x|\+SP PP\d+| PP\d+) DP ?\d+|TP\d+ PP\d+ .*(dist-opt|distributed optimizer)|"
    r"TP\d+ PP\d+ VP\d+|TP\d+ \+ SP, distributed optimizer"
)


def strategy_table(
    run: PublishedRun, gpus: int, gpus_per_node: int, assumptions: list[str]
) -> dict[str, Any]:
    """The strategy's table.

    Raises NotSimulatedError for what zsim does not support, or what the row leaves open.
    """
    text, stage = run.text("strategy"), run.count("zero_stage")
    if "ZeRO++" in text:
        return {"kind": "deepspeed", **_deepspeed_version(run), "config": _zeropp_config(text, gpus_per_node)}
    if run.text("engine"):
        return _engine_table(run, gpus)
    if re.match(_MEGATRON, text) and "DeepSpeed" not in text and "+ ZeRO" not in text:
        return _megatron_table(run, assumptions)
    if re.match(r"single", text):
        return _single_gpu_table(run)
    if re.match(r"FSDP2", text) and not is_offloaded(run):
        return {"kind": "fsdp2", "reduce_dtype": _reduce_dtype(run)}
    offloads = run.text("offload").startswith("params")
    is_fsdp1 = re.match(r"FSDP|HSDP|FULL_SHARD|SHARD_GRAD_OP|HYBRID_SHARD", text)
    if is_fsdp1 and (offloads or not is_offloaded(run)):
        return _fsdp1_table(run, gpus) | ({"cpu_offload": True} if offloads else {})
    if re.match(_DEEPSPEED, text) and stage is not None:
        blocks = _offload_blocks(run, assumptions)
        table: dict[str, Any] = {"kind": "deepspeed", **_deepspeed_version(run), "stage": stage}
        return {**table, "config": {"zero_optimization": blocks}} if blocks else table
    if is_offloaded(run):
        raise NotSimulatedError(f"offload is not simulated (strategy '{text}')")
    if re.match(r"DDP", text):
        return {"kind": "ddp"}
    raise NotSimulatedError(f"strategy '{text}' is not simulated")


def merge_stage(table: dict[str, Any]) -> dict[str, Any]:
    """The table with its stage moved into `config`, if it has both."""
    if "config" not in table or "stage" not in table:
        return table
    zero = {"stage": table["stage"], **table["config"].get("zero_optimization", {})}
    remaining = {key: value for key, value in table.items() if key != "stage"}
    return {**remaining, "config": {**table["config"], "zero_optimization": zero}}


def _single_gpu_table(run: PublishedRun) -> dict[str, Any]:
    """A single GPU: DDP, or for fp16 DeepSpeed's stage 0, since fp16 weights have fp32 masters in every
    recipe of these tables (Megatron, Apex)."""
    if "fp16" in run.text("precision"):
        return {"kind": "deepspeed", "stage": 0, **_deepspeed_version(run)}
    return {"kind": "ddp"}


def _reduce_dtype(run: PublishedRun) -> str:
    text = run.text("reduce_dtype") or "bf16"
    return "fp32" if text.startswith("fp32") else text.split()[0]


def _fsdp1_table(run: PublishedRun, gpus: int) -> dict[str, Any]:
    text = run.text("strategy")
    table: dict[str, Any] = {"kind": "fsdp1", "reduce_dtype": _reduce_dtype(run)}
    shard = run.count("shard_group") or gpus
    if re.search(r"HSDP|HYBRID", text) or 1 < shard < gpus:
        table |= {"sharding_strategy": "HYBRID_SHARD", "replicate": gpus // shard}
    elif "SHARD_GRAD_OP" in text:
        table["sharding_strategy"] = "SHARD_GRAD_OP"
    if "NO backward prefetch" in text:
        table["backward_prefetch"] = "none"
    size = re.search(r"size-based wrap (\d+)M", text)
    if size:
        table["wrapping"] = f"size:{size.group(1)}000000"
    return table


# -- DeepSpeed --------------------------------------------------------------------------------------------


def _deepspeed_version(run: PublishedRun) -> dict[str, str]:
    """The DeepSpeed release that the row names, or the oldest that zsim knows."""
    match = re.search(r"DeepSpeed (\d+)\.(\d+)\.(\d+)", run.text("software"))
    if not match:
        return {}
    is_recent = tuple(map(int, match.groups())) > (0, 10, 3)
    return {"version": ".".join(match.groups()) if is_recent else "0.10.3"}


def _zeropp_config(text: str, gpus_per_node: int) -> dict[str, Any]:
    """The ZeRO++ configuration.

    hpZ's groups are one node, as in DeepSpeed's tutorial (docs/_tutorials/zeropp.md). The rest of the
    configuration is not published, so DeepSpeed's defaults apply. They overlap, as does the tutorial's
    example (`"overlap_comm": true`). That example also has `"reduce_scatter": false`, with which qgZ does not
    run, and a bucket of 1e7, which makes the blog's rows 3 % faster still.
    """
    block: dict[str, Any] = {"stage": 3}
    if "hpZ" in text:
        block["zero_hpz_partition_size"] = gpus_per_node
    if "qwZ" in text:
        block["zero_quantized_weights"] = True
    if "qgZ" in text:
        block["zero_quantized_gradients"] = True
    return {"zero_optimization": block}


def is_offloaded(run: PublishedRun) -> bool:
    """Whether the row offloads anything."""
    text = run.text("offload")
    return bool(text) and not text.startswith("none")


def _offload_blocks(run: PublishedRun, assumptions: list[str]) -> dict[str, Any]:
    """The offload blocks of `zero_optimization`. Empty if nothing is offloaded."""
    if not is_offloaded(run):
        return {}
    text = run.text("offload")
    if re.match("unknown|unstated", text):
        raise NotSimulatedError(f"whether anything is offloaded is not published (offload '{text}')")
    if re.search("NVMe", text):
        raise NotSimulatedError(f"offload to NVMe of unknown drives (offload '{text}')")
    if not re.search(r"optimizer", text):
        raise NotSimulatedError(f"offload '{text}' is not simulated")
    if "likely" in text:
        assumptions.append("offload")
    blocks: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}, "overlap_comm": True}
    if "params" in text:
        blocks["offload_param"] = {"device": "cpu"}
    return blocks


# -- Megatron ---------------------------------------------------------------------------------------------


def _megatron_table(run: PublishedRun, assumptions: list[str]) -> dict[str, Any]:
    """Megatron's table. Launch settings are in the row's `hybrid{...}` note. Settings absent there are off,
    as on the command line.
    """
    note, text = launch_settings(run), run.text("strategy")
    is_sharded = run.count("zero_stage") == 1 or bool(re.search(r"dist(ributed|)[- _]?opt", text))
    overlaps = "overlapped grad RS + param AG" in text
    gradients = is_on(note, "grad_overlap") or overlaps
    gathers = is_on(note, "param_overlap") or overlaps
    if "grad_overlap" not in note and not overlaps:
        assumptions.append("gradients are reduced after backward")
    table = {
        "kind": "megatron",
        "distributed_optimizer": is_sharded,
        "overlap_grad_reduce": gradients,
        "overlap_param_gather": gathers and gradients and is_sharded,
        "grad_reduce_dtype": _grad_reduce_dtype(run),
        "deterministic_mode": "deterministic-mode" in run.text("flags"),
        **_cuda_graph_settings(note),
        **expert_strategy(run, note),
    }
    flags = command_line(run)
    if flags.get("no-gradient-accumulation-fusion") == "True":
        table["gradient_accumulation_fusion"] = False
    if is_sharded and "num-distributed-optimizer-instances" in flags:
        table["optimizer_instances"] = int(flags["num-distributed-optimizer-instances"])
    if "Megatron-FSDP" in text:
        table |= _megatron_fsdp_table(run, flags, assumptions)
    return table


def _cuda_graph_settings(note: Mapping[str, str]) -> dict[str, Any]:
    """CUDA graphs: of parts of layers where the note names them behind their implementation, else of a
    step."""
    if not is_on(note, "cuda_graph") or note["cuda_graph"] in ("none", "?"):
        return {"cuda_graph": False}
    modules = [name for name in re.split(r"[:+]", note["cuda_graph"]) if name in get_args(GraphModule)]
    return {"cuda_graph_modules": modules} if modules else {"cuda_graph": True}


def _megatron_fsdp_table(run: PublishedRun, flags: dict[str, str], assumptions: list[str]) -> dict[str, Any]:
    """Megatron-FSDP's settings, with its sharding by the command line or the ZeRO stage of the row. Sharded
    gradients are reduced during backward, and sharded parameters gathered during forward and backward, in any
    case.
    """
    by_stage = ("no_shard", "optim", "optim_grads", "optim_grads_params")
    sharding = flags.get("data-parallel-sharding-strategy") or by_stage[run.count("zero_stage") or 0]
    table: dict[str, Any] = {"fsdp_sharding": sharding, "distributed_optimizer": True}
    if flags.get("fsdp-double-buffer") == "True" or flags.get("use-nccl-ub") == "True":
        table["fsdp_double_buffer"] = True
    if sharding in ("no_shard", "optim"):
        return table
    if "grad_overlap" not in launch_settings(run):
        assumptions.remove("gradients are reduced after backward")
        assumptions.append("overlapped gradients and gathers, as Megatron-FSDP's recipes have them")
        table |= {"overlap_grad_reduce": True, "overlap_param_gather": True}
    return table


def _grad_reduce_dtype(run: PublishedRun) -> str:
    """The reduction dtype of the row, or else Megatron's default: the weights' dtype under fp16, fp32 under
    bf16.
    """
    text = run.text("reduce_dtype")
    named = next((dtype for dtype in ("fp32", "bf16", "fp16") if text.startswith(dtype)), None)
    return named or ("fp16" if run.text("precision").startswith("fp16") else "fp32")


def _engine_table(run: PublishedRun, gpus: int) -> dict[str, Any]:
    """A Megatron-like engine: ZeRO-1 within the row's shard groups."""
    engine = run.text("engine")
    table = {"kind": "megatron", "engine": engine, "distributed_optimizer": run.count("zero_stage") == 1}
    if engine != "internevo":
        return table
    shard = run.count("shard_group") or gpus
    if gpus % shard:
        raise NotSimulatedError(f"{gpus} GPUs are no whole number of groups of {shard} that shard")
    return {**table, "optimizer_instances": gpus // shard}
