"""Rows of Megatron's own data parallelism, and of engines that do nearly the same: their `[strategy]`.

Megatron's launch settings stand in the rows' `hybrid{...}` note; what it does not say is off, as on the
command line. Two engines are mapped to it, with the difference among the row's assumptions:

- nanotron (`optim/gradient_accumulator.py`, `optim/zero.py`): torch's DDP with its buckets of 25 MiB of bf16
  gradients, whose hook reduces the fp32 sums of each (scattered with ZeRO-1), and gathers after the update.
- InternEvo (`solver/optimizer/hybrid_zero_optim.py`, configs/7B_sft.py of v0.2.1dev20231121): bf16 gradients
  all-reduced in buckets of 512 Mi elements during backward, whole parameters to owners within the `zero1`
  group, who broadcast them after the update; `torch.cuda.synchronize` then ends what its `overlap_sync_param`
  would hide beneath the next forward.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from zsim.errors import NotSimulatedError
from zsim.specs.strategy.megatron import NEWEST_CORE, Megatron
from zsim.study.published.table import PublishedRun

_OWN = (
    r"Megatron(-LM|-Core| dist-opt| DDP)|DDP (\+ distributed optimizer|dist-opt)|TP1 (x|PP1) DP ?\d+( 1F1B)?$"
)
_NANOTRON_BUCKET = 25 * 2**20 // 2  # elements of bf16
_INTERNEVO_BUCKET = 512 * 2**20


def is_megatron(run: PublishedRun) -> bool:
    """Megatron's own data parallelism, with DeepSpeed nowhere in it."""
    return re.match(_OWN, run.text("strategy")) is not None and "DeepSpeed" not in run.text("strategy")


def is_nanotron(run: PublishedRun) -> bool:
    return run.text("software").startswith("nanotron")


def is_internevo(run: PublishedRun) -> bool:
    return run.text("software").startswith("InternEvo")


def fuses_norms(run: PublishedRun) -> bool:
    """nanotron has Triton's RMSNorm (nn/layer_norm.py), InternEvo Apex's (model/utils.py), both flash-attn's
    rotary embedding: one kernel each, as Liger's; their gated activation is two, which is left out."""
    return is_nanotron(run) or is_internevo(run)


def is_megatron_like(run: PublishedRun) -> bool:
    """Whether `megatron_table` says the row's strategy."""
    return is_megatron(run) or is_nanotron(run) or is_internevo(run)


def hybrid_note(run: PublishedRun) -> dict[str, str]:
    """The launch settings of the row's note: {"grad_overlap": "1", ...}."""
    found = re.search(r"hybrid\{([^}]*)\}", run.text("notes"))
    pairs = (item.partition("=") for item in found[1].split(",")) if found else ()
    return {key.strip(): value.strip() for key, _, value in pairs}


def megatron_table(run: PublishedRun, gpus: int, assumptions: list[str]) -> dict[str, Any]:
    """The row's `[strategy]`."""
    if is_nanotron(run):
        assumptions.append("nanotron as Megatron's data parallelism")
        return _nanotron(run)
    if is_internevo(run):
        assumptions.append("InternEvo's ZeRO-1 on Megatron's plan")
        return _internevo(run, gpus)
    note, text = hybrid_note(run), run.text("strategy")
    if _skips_update(run):
        assumptions.append("the update is skipped: the loss scale is still falling")
    is_sharded = run.count("zero_stage") == 1 or bool(re.search(r"dist(ributed|)[- _]?opt", text))
    overlaps = "overlapped grad RS + param AG" in text
    gradients = note.get("grad_overlap", "0") not in ("0", "False") or overlaps
    gathers = note.get("param_overlap", "0") not in ("0", "False") or overlaps
    if not note and not overlaps:
        assumptions.append("gradients are reduced after backward")
    table: dict[str, Any] = {
        "kind": "megatron",
        "version": megatron_version(run),
        "distributed_optimizer": is_sharded,
        "overlap_grad_reduce": gradients,
        "overlap_param_gather": gathers and gradients and is_sharded,
        "grad_reduce_dtype": _reduce_dtype(run),
    }
    return table


def _nanotron(run: PublishedRun) -> dict[str, Any]:
    return {
        "kind": "megatron",
        "distributed_optimizer": run.count("zero_stage") == 1,
        "overlap_grad_reduce": True,
        "bucket_size": _NANOTRON_BUCKET,
        "average_in_collective": True,
    }


def _internevo(run: PublishedRun, gpus: int) -> dict[str, Any]:
    shard = run.count("shard_group") or gpus
    if gpus % shard:
        raise NotSimulatedError(f"{gpus} GPUs are no whole number of groups of {shard} that shard")
    return {
        "kind": "megatron",
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "grad_reduce_dtype": "bf16",
        "bucket_size": _INTERNEVO_BUCKET,
        "average_in_collective": True,
        "optimizer_instances": gpus // shard,
    }


def as_engine_runs(run: PublishedRun, strategy: Megatron) -> Megatron:
    """What `[strategy]` cannot say. A CUDA graph of the whole step spares the host the layers' Python. Of the
    two engines that are not Megatron neither looks for NaN, autograd hands over every gradient, and InternEvo
    sums all gradients on all ranks."""
    if is_megatron(run):
        is_graph = hybrid_note(run).get("cuda_graph", "0") not in ("0", "False")
        overhead = None if is_graph else strategy.block_overhead
        return replace(strategy, skips_update=_skips_update(run), block_overhead=overhead)
    sums_all = is_internevo(run)
    return replace(
        strategy,
        checks_nan=False,
        fuses_accumulation=False,
        has_owners=sums_all,
        is_contiguous=not sums_all,
        block_overhead=None,
    )


def _skips_update(run: PublishedRun) -> bool:
    """vTrain's runs on one node, hundreds of configurations in fp16: whatever is not a micro-batch takes as
    long as moving 30 bytes per parameter, the all-reduce aside. (Rows of role calibrate: 1083 and 1007, of 2
    and 8 micro-batches, leave 40 ms for 1.3e9 parameters; 1058 and 0611, of 4 and 16, leave 8 ms for 0.25e9.)
    A step moves 58, one whose gradients overflow 20; the first twenty from a scale of 2**32 do."""
    return run.source == "vtrain-single" and run.text("precision") == "fp16"


def megatron_version(run: PublishedRun) -> str:
    """The release that was new at the row's date."""
    date = run.text("date")
    for before, version in (("2021-01", "1.1"), ("2021-08", "2.4"), ("2022-02", "2.6"), ("2023-11", "3.0")):
        if date < before:
            return version
    return "0.4.0" if date < "2024-03" else NEWEST_CORE


def _reduce_dtype(run: PublishedRun) -> str:
    """What the row says; else Megatron's default, which is the weights' own type under fp16 and fp32 under
    bf16."""
    text = run.text("reduce_dtype")
    named = next((dtype for dtype in ("fp32", "bf16", "fp16") if text.startswith(dtype)), None)
    return named or ("fp16" if run.text("precision").startswith("fp16") else "fp32")
