"""The `[strategy]` of a published run, from its text and related columns. Settings known from its date or
source are in `published_sources.toml`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

from validation.published.mixtures import expert_strategy
from validation.published.parallelism import command_line, is_on, launch_settings, model_ranks_of
from validation.published.table import PublishedRun
from validation.published.vocabulary import Reading, read_words
from zsim.errors import NotSimulatedError
from zsim.frameworks.megatron.settings.table import GraphModule

_DEGREES = r"(?i)\b[TPCE]P ?[=:-]?\d|1F1B"
_TORCH = ("FSDP", "HSDP", "SHARD_GRAD_OP")
_STAGES = {"ZeRO-0": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3}
_NOT_SIMULATED = {
    "another compiler": "XLA's scheduler, not PyTorch's",
    "fairscale": "fairscale's FSDP",
    "another engine": "an engine of training that zsim does not know",
}


def strategy_table(
    run: PublishedRun, gpus: int, gpus_per_node: int, assumptions: list[str]
) -> dict[str, Any]:
    """The strategy's table.

    What the strategy's text leaves open is taken from its software and the degrees, and named. Raises
    NotSimulatedError for what zsim does not support, or what nothing tells.
    """
    text = run.text("strategy")
    reading = read_words("strategy", text)
    if reading.unknown:
        assumptions.append(f"strategy: not understood: {', '.join(reading.unknown)}")
    if reading.has("ZeRO++"):
        return {
            "kind": "deepspeed", **_deepspeed_version(run), "config": _zeropp_config(reading, gpus_per_node)
        }  # fmt: skip
    if run.text("engine"):
        return _engine_table(run, gpus)
    kind = kind_of_strategy(run, reading, assumptions)
    if kind == "megatron":
        return _megatron_table(run, reading, assumptions)
    if kind == "single":
        return _single_gpu_table(run)
    offloads = offload_words(run)
    if kind == "fsdp2":
        return _fsdp2_table(run, reading, gpus) | _torch_offload(run, offloads)
    if kind == "fsdp1":
        return _fsdp1_table(run, reading, gpus) | _torch_offload(run, offloads)
    if kind == "deepspeed":
        blocks = _offload_blocks(run, assumptions)
        table: dict[str, Any] = {
            "kind": "deepspeed", **_deepspeed_version(run), "stage": _stage(run, reading, assumptions)
        }  # fmt: skip
        return {**table, "config": blocks} if blocks else table
    if offloads:
        raise NotSimulatedError(f"offload is not simulated (strategy '{text}')")
    return {"kind": "ddp"}


def kind_of_strategy(run: PublishedRun, reading: Reading, assumptions: list[str]) -> str:
    """What shards: "megatron", "single", "fsdp2", "fsdp1", "deepspeed" or "ddp"."""
    text, software = run.text("strategy"), read_words("software", run.text("software"))
    for word, reason in _NOT_SIMULATED.items():
        if reading.has(word):
            raise NotSimulatedError(f"{reason} is not simulated (strategy '{text}')")
    is_deepspeed = reading.has("DeepSpeed")
    if not is_deepspeed and reading.has("Megatron", "Megatron-FSDP", "distributed optimizer"):
        return "megatron"
    if reading.has("single GPU") and not reading.has("FSDP2", *_TORCH, "ZeRO"):
        return "single"
    if reading.has("FSDP2"):
        return "fsdp2"
    if reading.has(*_TORCH):
        return _kind_of_fsdp(run, reading, software, assumptions)
    if is_deepspeed or (reading.has("ZeRO", *_STAGES) and _is_deepspeed(run, software)):
        return "deepspeed"
    is_shared = model_ranks_of(run) > 1 or (run.count("ep") or 1) > 1 or bool(re.search(_DEGREES, text))
    if is_shared and not reading.has("DDP"):
        if software.has("FSDP2") and not software.has("Megatron"):
            assumptions.append("strategy: shards as its software does (FSDP2)")
            return "fsdp2"
        return "megatron"
    if reading.has("DDP"):
        return "megatron" if software.has("Megatron") and not software.has("DeepSpeed") else "ddp"
    return _kind_of_software(run, software, assumptions)


def _is_deepspeed(run: PublishedRun, software: Reading) -> bool:
    """Whether "ZeRO-1" beside degrees of parallelism is DeepSpeed's, and not another engine's."""
    is_shared = model_ranks_of(run) > 1 or bool(re.search(r"(?i)\b[TP]P ?\d", run.text("strategy")))
    return not is_shared or software.has("DeepSpeed") or not re.search(r"(?i)\bVP ?\d", run.text("strategy"))


def _kind_of_fsdp(run: PublishedRun, reading: Reading, software: Reading, assumptions: list[str]) -> str:
    """FSDP's generation: that of its software, where the text says none."""
    is_named = bool(re.search(r"(?i)fsdp-?_?1|FULL_SHARD|HYBRID_SHARD|SHARD_GRAD_OP", run.text("strategy")))
    if software.has("Megatron") and not software.has("FSDP2", "FSDP", "DeepSpeed") and not is_named:
        assumptions.append("strategy: FSDP under Megatron, taken as Megatron-FSDP")
        return "megatron"
    if is_named or not software.has("FSDP2"):
        return "fsdp1"
    assumptions.append("strategy: FSDP of its software, taken as FSDP2")
    return "fsdp2"


def _kind_of_software(run: PublishedRun, software: Reading, assumptions: list[str]) -> str:
    """What shards by the row's software, its ZeRO stage, or that there is one GPU. Raises NotSimulatedError
    where none of them tells."""
    text, stage = run.text("strategy"), run.count("zero_stage")
    if software.has("another compiler", "another engine") and not software.has("FSDP", "FSDP2", "Megatron"):
        raise NotSimulatedError(f"software '{run.text('software')}' is not simulated (strategy '{text}')")
    kind = next(
        (
            kind
            for word, kind in (
                ("DeepSpeed", "deepspeed"), ("FSDP2", "fsdp2"), ("Megatron", "megatron"), ("FSDP", "fsdp1"),
            )
            if software.has(word)
        ),
        None,
    )  # fmt: skip
    if (run.count("n_gpus") or 1) == 1 and kind != "megatron":
        return "single"
    if kind is None and stage is not None:
        kind = "deepspeed" if stage else "ddp"
    if kind is None and software.has("DDP"):
        kind = "ddp"
    if kind is None:
        raise NotSimulatedError(f"strategy '{text}' is not simulated")
    assumptions.append(f"strategy: '{text}' taken as {kind}")
    return kind


def _stage(run: PublishedRun, reading: Reading, assumptions: list[str]) -> int:
    """DeepSpeed's stage: the column's, or the text's; 3 where anything is offloaded or nothing says it."""
    stage = run.count("zero_stage")
    if stage is None:
        stage = max((number for word, number in _STAGES.items() if reading.has(word)), default=None)
    if stage is None:
        stage = 3
        assumptions.append("strategy: DeepSpeed's stage taken as 3")
    return stage


def _fsdp2_table(run: PublishedRun, reading: Reading, gpus: int) -> dict[str, Any]:
    table: dict[str, Any] = {"kind": "fsdp2", "reduce_dtype": _reduce_dtype(run)}
    shard = run.count("shard_group") or gpus
    if reading.has("HSDP") and 1 < shard < gpus and gpus % shard == 0:
        table["replicate"] = gpus // shard
    return table


def _torch_offload(run: PublishedRun, offloads: frozenset[str]) -> dict[str, Any]:
    if not offloads:
        return {}
    if "parameters" in offloads:
        return {"cpu_offload": True}
    text = run.text("offload")
    raise NotSimulatedError(f"offload '{text}' is not simulated (strategy '{run.text('strategy')}')")


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
    if _is_fp16(run):
        return {"kind": "deepspeed", "stage": 0, **_deepspeed_version(run)}
    return {"kind": "ddp"}


def _is_fp16(run: PublishedRun) -> bool:
    return read_words("precision", run.text("precision")).has("fp16")


def _reduce_dtype(run: PublishedRun) -> str:
    text = run.text("reduce_dtype") or "bf16"
    return "fp32" if text.startswith("fp32") else text.split()[0]


def _fsdp1_table(run: PublishedRun, reading: Reading, gpus: int) -> dict[str, Any]:
    text = run.text("strategy")
    table: dict[str, Any] = {"kind": "fsdp1", "reduce_dtype": _reduce_dtype(run)}
    shard = run.count("shard_group") or gpus
    if reading.has("HSDP") or 1 < shard < gpus:
        if gpus % shard:
            raise NotSimulatedError(f"{gpus} GPUs are no whole number of groups of {shard} that shard")
        table |= {"sharding_strategy": "HYBRID_SHARD", "replicate": gpus // shard}
    elif reading.has("SHARD_GRAD_OP"):
        table["sharding_strategy"] = "SHARD_GRAD_OP"
    if reading.has("no backward prefetch"):
        table["backward_prefetch"] = "none"
    size = re.search(r"(?i)size[- ]based wrap\w* (\d+) ?M", text)
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


def _zeropp_config(reading: Reading, gpus_per_node: int) -> dict[str, Any]:
    """The ZeRO++ configuration.

    hpZ's groups are one node, as in DeepSpeed's tutorial (docs/_tutorials/zeropp.md). The rest of the
    configuration is not published, so DeepSpeed's defaults apply. They overlap, as does the tutorial's
    example (`"overlap_comm": true`). That example also has `"reduce_scatter": false`, with which qgZ does not
    run, and a bucket of 1e7, which makes the blog's rows 3 % faster still.
    """
    block: dict[str, Any] = {"stage": 3}
    if reading.has("hpZ"):
        block["zero_hpz_partition_size"] = gpus_per_node
    if reading.has("qwZ"):
        block["zero_quantized_weights"] = True
    if reading.has("qgZ"):
        block["zero_quantized_gradients"] = True
    return {"zero_optimization": block}


def offload_words(run: PublishedRun) -> frozenset[str]:
    """What the row keeps off the GPU: "parameters", "optimizer", "gradients", "activations", "drives".
    Empty if nothing is."""
    text = run.text("offload").lower()
    if not text or re.match(r"(none|no|off|false|0|un(known|stated)|not |n/?a)(\b|$)", text):
        return frozenset()
    found = {
        word
        for word, pattern in (
            ("parameters", r"\bparam|\bweights?\b|\ball\b|fsdp cpuoffload"),
            ("optimizer", r"optim|\bos\b|cpu ?_?adam|master|\ball\b"),
            ("gradients", r"\bgrads?\b|gradient"),
            ("activations", r"activation|\bact\b|ckpt|checkpoint"),
            ("drives", r"nvme|ssd|disk"),
        )
        if re.search(pattern, text)
    }
    return frozenset(found or ({"optimizer"} if re.search(r"cpu|host|yes|true|on\b", text) else {"?"}))


def is_offloaded(run: PublishedRun) -> bool:
    """Whether the row offloads anything."""
    return bool(offload_words(run))


def _offload_blocks(run: PublishedRun, assumptions: list[str]) -> dict[str, Any]:
    """DeepSpeed's configuration of what is offloaded. Empty if nothing is."""
    text, words = run.text("offload"), offload_words(run)
    if not words:
        if re.match(r"(?i)un(known|stated)|not ", text):
            assumptions.append(f"offload: '{text}' taken as none")
        return {}
    if "drives" in words:
        raise NotSimulatedError(f"offload to NVMe of unknown drives (offload '{text}')")
    if words == {"activations"}:
        partitions = "partition" in text
        return {"activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": partitions}}
    if "optimizer" not in words and "parameters" not in words:
        raise NotSimulatedError(f"offload '{text}' is not simulated")
    if "likely" in text:
        assumptions.append("offload")
    blocks: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}, "overlap_comm": True}
    if "parameters" in words:
        blocks["offload_param"] = {"device": "cpu"}
    # As the files that people offload with say: transformers' documentation, Megatron-DeepSpeed's
    # examples/azure, LLaMA-Factory's and axolotl's. DeepSpeed's own default was not to before 0.19.5.
    for name in blocks.keys() & {"offload_optimizer", "offload_param"}:
        blocks[name]["pin_memory"] = not re.search(r"(?i)\bpageable|unpinned|not pinned\b", text)
    return {"zero_optimization": blocks}


# -- Megatron ---------------------------------------------------------------------------------------------


def _megatron_table(run: PublishedRun, reading: Reading, assumptions: list[str]) -> dict[str, Any]:
    """Megatron's table. Launch settings are in the row's `hybrid{...}` note. Settings absent there are off,
    as on the command line.
    """
    note = launch_settings(run)
    stage = run.count("zero_stage")
    is_sharded = reading.has("distributed optimizer") or stage == 1
    if stage is None and not is_sharded:
        is_sharded = reading.has("ZeRO-1") or is_on(note, "dist_opt")
    overlaps = reading.has("overlapped reductions and gathers")
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
        "deterministic_mode": "deterministic-mode" in run.text("flags") or is_on(note, "deterministic"),
        **_cuda_graph_settings(note),
        **expert_strategy(run, note),
    }
    flags = command_line(run)
    if flags.get("no-gradient-accumulation-fusion") == "True":
        table["gradient_accumulation_fusion"] = False
    if is_sharded and "num-distributed-optimizer-instances" in flags:
        table["optimizer_instances"] = int(flags["num-distributed-optimizer-instances"])
    if reading.has("Megatron-FSDP") or (reading.has("FSDP", "FSDP2") and not reading.has("DDP")):
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
    by_stage, stage = ("no_shard", "optim", "optim_grads", "optim_grads_params"), run.count("zero_stage")
    sharding = flags.get("data-parallel-sharding-strategy") or by_stage[3 if stage is None else stage]
    table: dict[str, Any] = {"fsdp_sharding": sharding, "distributed_optimizer": True}
    if flags.get("fsdp-double-buffer") == "True" or flags.get("use-nccl-ub") == "True":
        table["fsdp_double_buffer"] = True
    if sharding in ("no_shard", "optim"):
        return table
    if "grad_overlap" not in launch_settings(run):
        if "gradients are reduced after backward" in assumptions:
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
    return named or ("fp16" if _is_fp16(run) else "fp32")


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
