"""A job -> the DeepSpeed JSON that runs it.

It is the user's own file with every effective value written out, so that a release with other defaults does
the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zsim.specs.experiment.job import Job
from zsim.specs.experiment.tables import DeepSpeedTable
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig
from zsim.specs.strategy.deepspeed.effects import ZERO_EFFECTS
from zsim.specs.strategy.deepspeed.release import Release, parse_release
from zsim.specs.strategy.deepspeed.schema import ZeroBlock
from zsim.specs.strategy.deepspeed.text import drop_comments, load_object

# Written for every stage at which they do something; the other keys only where the user's file has them.
_WRITTEN = (
    "overlap_comm", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "round_robin_gradients",
    "use_multi_rank_bucket_allreduce", "sub_group_size", "prefetch_bucket_size",
    "param_persistence_threshold", "max_live_parameters", "max_reuse_distance",
)  # fmt: skip


def deepspeed_json(job: Job) -> str:
    """The file's text."""
    return json.dumps(deepspeed_object(job), indent=2) + "\n"


def deepspeed_object(job: Job) -> dict[str, Any]:
    """The file as an object; comments of the user's file are left out."""
    config, table = job.strategy, job.experiment.strategy
    assert isinstance(config, DeepSpeedConfig)
    assert isinstance(table, DeepSpeedTable)
    release = parse_release(config.version, config.name)
    own: dict[str, Any] = {}
    if table.config is not None:
        _, own = load_object(table.config, table.config_name)
        drop_comments(own, config.name, [])
    batch = config.batch
    made: dict[str, Any] = {
        "train_batch_size": batch.train_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "gradient_clipping": config.gradient_clipping,
    }
    for precision in ("bf16", "fp16"):
        old = own.pop("bfloat16", None) if precision == "bf16" else None
        block = dict(own.get(precision) or old or {})
        if block or config.param_dtype == precision:
            made[precision] = {**block, "enabled": config.param_dtype == precision}
    zero = own.get("zero_optimization")
    zero = dict(zero) if isinstance(zero, Mapping) else {}
    return {**own, **made, "zero_optimization": _zero_block(config, zero, release)}


def _zero_block(config: DeepSpeedConfig, own: dict[str, Any], release: Release) -> dict[str, Any]:
    zero = config.zero
    block: dict[str, Any] = {"stage": zero.stage}
    for bare in _WRITTEN:
        if zero.stage not in ZERO_EFFECTS[bare].stages or not release.knows_zero_key(bare):
            continue
        alias = ZeroBlock.model_fields[bare].alias or bare
        own.pop(bare, None)
        own.pop(alias, None)
        block[alias] = getattr(zero, bare)
    if zero.stage == 3 and zero.allgather_sequential:
        block.pop("stage3_prefetch_bucket_size")  # DeepSpeed itself makes it 1
    rest = {key: value for key, value in own.items() if value != "auto" and key not in ("stage", *_OFFLOAD)}
    return {**block, **rest, **_offload_blocks(config, own)}


_OFFLOAD = ("offload_param", "offload_optimizer", "cpu_offload", "cpu_offload_param", "cpu_offload_params")


def _offload_blocks(config: DeepSpeedConfig, own: Mapping[str, Any]) -> dict[str, Any]:
    """The offload blocks with every value that the release's default would decide."""
    found: dict[str, Any] = {}
    param, optimizer = config.zero.offload_param, config.zero.offload_optimizer
    if optimizer is not None:
        entry: dict[str, Any] = {"device": optimizer.device, "pin_memory": optimizer.pin_memory}
        if optimizer.device == "nvme":
            entry |= {
                "nvme_path": optimizer.nvme_path,
                "buffer_count": optimizer.buffer_count,
                "pipeline_read": optimizer.pipeline_read,
                "pipeline_write": optimizer.pipeline_write,
            }
        if optimizer.ratio < 1:
            entry["ratio"] = optimizer.ratio
        found["offload_optimizer"] = {**_plain(own.get("offload_optimizer")), **entry}
    if param is not None:
        entry = {"device": param.device, "pin_memory": param.pin_memory}
        if param.device == "nvme":
            entry |= {
                "nvme_path": param.nvme_path,
                "buffer_count": param.buffer_count,
                "buffer_size": param.buffer_size,
                "max_in_cpu": param.max_in_cpu,
            }
        found["offload_param"] = {**_plain(own.get("offload_param")), **entry}
    return found


def _plain(block: Any) -> dict[str, Any]:
    if not isinstance(block, Mapping):
        return {}
    return {key: value for key, value in block.items() if value not in (None, "auto")}
