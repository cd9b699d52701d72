"""The `[strategy]` of a published run, as its framework and its source had it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zsim.errors import NotSimulatedError
from zsim.study.published.megatron import (
    is_megatron_like,
    megatron_table,
)
from zsim.study.published.model import (
    is_composer,
    is_early_composer,
)
from zsim.study.published.offload import is_offloaded, is_stas00, offload_blocks
from zsim.study.published.table import PublishedRun
from zsim.study.published.zeropp import is_zeropp, zeropp_config

_DEEPSPEED = r"ZeRO-[0123]|HF Trainer \+ DeepSpeed|Megatron TP1 \+ DeepSpeed|TP1 PP1 DP\d+ \+ ZeRO"


def is_autocast(run: PublishedRun) -> bool:
    """composer's mixed precision DEFAULT in its releases for torch 1.12 and 1.13: FSDP keeps parameters in
    fp32 and leaves the low type to autocast, gradients are reduced in it (`prepare_fsdp_module`). This
    overrides the row's `reduce_dtype`; the date at which it changed is inferred, not read from a release."""
    return is_composer(run) and "DEFAULT" in run.text("strategy") and run.text("date") < "2023-03"


def limits_all_gathers(run: PublishedRun) -> bool:
    """MosaicML's scripts set `limit_all_gathers` from April 2023 on (mosaicml/examples@520a6709,
    examples/llm/throughput/submit_benchmarks.py); the ones before (@b83dacd4, llm/throughput/
    run_all_configs.py; @2ac2b44a, examples/llm/throughput) leave it at composer's and torch's False."""
    return not is_early_composer(run)


def strategy_table(
    run: PublishedRun, gpus: int, gpus_per_node: int, assumptions: list[str]
) -> dict[str, Any]:
    """The strategy's table, from its text and the columns beside it."""
    text, stage = run.text("strategy"), run.count("zero_stage")
    if is_zeropp(run):
        config = zeropp_config(run, gpus_per_node)
        return {"kind": "deepspeed", "version": _deepspeed_version(run), "config": config}
    if is_megatron_like(run):
        return megatron_table(run, gpus, assumptions)
    if re.match(r"single", text):
        return _single(run, assumptions)
    if re.match(r"FSDP2", text) and not is_offloaded(run):
        return _fsdp2(run)
    offloads = run.text("offload").startswith("params")
    is_fsdp1 = re.match(r"FSDP|HSDP|FULL_SHARD|SHARD_GRAD_OP|HYBRID_SHARD", text)
    if is_fsdp1 and (offloads or not is_offloaded(run)):
        return _fsdp1(run, gpus) | ({"cpu_offload": True} if offloads else {})
    if re.match(_DEEPSPEED, text) and stage is not None:
        return _deepspeed(run, stage, assumptions)
    if is_offloaded(run):
        raise NotSimulatedError(f"offload is not simulated (strategy '{text}')")
    if re.match(r"DDP", text):
        return {"kind": "ddp"}
    raise NotSimulatedError(f"strategy '{text}' is not simulated")


def _single(run: PublishedRun, assumptions: list[str]) -> dict[str, Any]:
    """fp16 has fp16 weights with fp32 masters in every recipe of these tables (Megatron, Apex)."""
    if "fp16" in run.text("precision"):
        return {"kind": "deepspeed", "stage": 0, "version": _deepspeed_version(run)}
    return {"kind": "ddp"}


def _reduce_dtype(run: PublishedRun) -> str:
    text = run.text("reduce_dtype") or "bf16"
    return "fp32" if text.startswith("fp32") else text.split()[0]


def _fsdp2(run: PublishedRun) -> dict[str, Any]:
    """torchtitan's wrapping, as of the row's date."""
    table: dict[str, Any] = {"kind": "fsdp2", "reduce_dtype": _reduce_dtype(run)}
    table["wrapping"] = "torchtitan-0.1" if run.text("date") < "2025" else "torchtitan"
    return table


def _fsdp1(run: PublishedRun, gpus: int) -> dict[str, Any]:
    text = run.text("strategy")
    table: dict[str, Any] = {"kind": "fsdp1", "reduce_dtype": _reduce_dtype(run)}
    shard = run.count("shard_group") or gpus
    if re.search(r"HSDP|HYBRID", text) or 1 < shard < gpus:
        table |= {"sharding_strategy": "HYBRID_SHARD", "replicate": gpus // shard}
    elif "SHARD_GRAD_OP" in text:
        table["sharding_strategy"] = "SHARD_GRAD_OP"
    if "NO backward prefetch" in text:
        table["backward_prefetch"] = "none"
    if is_autocast(run):
        table |= {"param_dtype": "fp32", "reduce_dtype": "bf16"}
    if is_composer(run):
        table["backward_prefetch"] = "BACKWARD_POST"  # composer's default
        table["limit_all_gathers"] = limits_all_gathers(run)
    size = re.search(r"size-based wrap (\d+)M", text)
    if size:
        table["wrapping"] = f"size:{size.group(1)}000000"
    return table


def _deepspeed(run: PublishedRun, stage: int, assumptions: list[str]) -> dict[str, Any]:
    table: dict[str, Any] = {"kind": "deepspeed", "version": _deepspeed_version(run)}
    if is_early_zero3(run):
        assumptions.append("DeepSpeed before 0.6 with the defaults of 0.10.3")
    blocks = offload_blocks(run, assumptions)
    if run.source == "azure-zero3":
        table["config"] = azure_config(stage, blocks)
    elif is_stas00(run):  # `ds_config` of its benchmark.py and bench_decompose.py
        zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, **blocks}
        table["config"] = {"gradient_clipping": 1.0, "zero_optimization": zero}
    elif blocks:
        table["config"] = {"zero_optimization": {"stage": stage, **blocks}}
    else:
        table["stage"] = stage
    if is_stas00(run) and stage == 3:
        table["zero_init"] = False
    return table


def azure_config(stage: int, blocks: Mapping[str, Any]) -> dict[str, Any]:
    """`ds_config.json` of Megatron-DeepSpeed's examples_deepspeed/azure (run-175b.sh, run-1t.sh; commit
    62bc4562 of July 2022), the same for all sizes but for what is offloaded, which is the row's."""
    zero = {
        "stage": stage, "stage3_max_live_parameters": 3e9, "stage3_max_reuse_distance": 3e9,
        "stage3_param_persistence_threshold": 1e5, "stage3_prefetch_bucket_size": 5e7,
        "contiguous_gradients": True, "overlap_comm": True, "reduce_bucket_size": 90_000_000,
        "sub_group_size": 1e9,
    }  # fmt: skip
    return {"gradient_clipping": 1.0, "zero_optimization": {**zero, **blocks}}


def is_early_zero3(run: PublishedRun) -> bool:
    """Whether the row's ZeRO-3 is of before DeepSpeed 0.6 (March 2022, pull request 1453)."""
    return run.count("zero_stage") == 3 and run.text("date") < "2022"


def _deepspeed_version(run: PublishedRun) -> str:
    """The release whose defaults apply: the row's own; else the oldest and the newest that zsim knows."""
    known = re.search(r"DeepSpeed (\d+)\.(\d+)\.(\d+)", run.text("software"))
    if known:
        return ".".join(known.groups()) if tuple(map(int, known.groups())) > (0, 10, 3) else "0.10.3"
    return "0.10.3" if run.text("date") < "2023-10" else "0.19.8"
