"""A job -> the DeepSpeed JSON that runs it.

It is the user's file with every effective value written out, so that a release with other defaults behaves
the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zsim.specs.experiment.job import Job
from zsim.specs.strategy.deepspeed.config import DeepSpeedConfig, OptimizerOffload, ParameterOffload
from zsim.specs.strategy.deepspeed.keys import keys_of
from zsim.specs.strategy.deepspeed.text import drop_comments, load_object
from zsim.specs.strategy.deepspeed.zero_schema import ZERO_KEYS, json_key
from zsim.specs.strategy.tables import DeepSpeedTable

_OFFLOAD = ("offload_param", "offload_optimizer", "cpu_offload", "cpu_offload_param", "cpu_offload_params")
_ALWAYS = ("device", "pin_memory")


def deepspeed_json(job: Job) -> str:
    """The file's text."""
    return json.dumps(deepspeed_object(job), indent=2) + "\n"


def deepspeed_object(job: Job) -> dict[str, Any]:
    """The file as an object. Comments of the user's file are left out."""
    config, table = job.strategy, job.experiment.strategy
    assert isinstance(config, DeepSpeedConfig)
    assert isinstance(table, DeepSpeedTable)
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
    made |= _degrees(job, own)
    zero = own.get("zero_optimization")
    zero = dict(zero) if isinstance(zero, Mapping) else {}
    return {**own, **made, "zero_optimization": _zero_block(config, zero)}


def _degrees(job: Job, own: Mapping[str, Any]) -> dict[str, Any]:
    """The parallel degrees that DeepSpeed reads from its file. The script must set the stages of a pipeline
    too.
    """
    parallelism = job.parallelism
    made: dict[str, Any] = {}
    if parallelism.style == "autotp":
        made["tensor_parallel"] = {**_plain(own.get("tensor_parallel")), "autotp_size": parallelism.tensor}
    if parallelism.context > 1:
        made["sequence_parallel_size"] = parallelism.context
    experts = parallelism.experts
    if experts.library == "autoep":
        asked = {"enabled": True, "autoep_size": experts.ranks}
        backend = {"comm_backend": "deepep"} if experts.dispatcher == "deepep" else {}
        made["expert_parallel"] = {**_plain(own.get("expert_parallel")), **asked, **backend}
    if parallelism.pipeline > 1:
        made["pipeline"] = {**_plain(own.get("pipeline")), "stages": parallelism.pipeline}
    return made


def _zero_block(config: DeepSpeedConfig, own: dict[str, Any]) -> dict[str, Any]:
    """The block `zero_optimization`: every exported key that has an effect, and other keys only if the user's
    file has them.
    """
    zero = config.zero
    block: dict[str, Any] = {"stage": zero.stage}
    for bare, key in ZERO_KEYS.items():
        if not key.is_exported or zero.stage not in key.stages or not key.is_known(config.release):
            continue
        own.pop(bare, None)
        own.pop(json_key(bare), None)
        block[json_key(bare)] = getattr(zero, bare)
    if zero.stage == 3 and zero.allgather_sequential:
        block.pop("stage3_prefetch_bucket_size")  # DeepSpeed itself makes it 1
    rest = {key: value for key, value in own.items() if value != "auto" and key not in ("stage", *_OFFLOAD)}
    offloads = {name: getattr(zero, name) for name in ("offload_optimizer", "offload_param")}
    return {
        **block,
        **rest,
        **{name: _plain(own.get(name)) | _offload(found) for name, found in offloads.items() if found},
    }


def _offload(found: OptimizerOffload | ParameterOffload) -> dict[str, Any]:
    """Every value that the release's default would otherwise decide, and the keys that NVMe needs."""
    entry = {
        bare: getattr(found, bare)
        for bare, key in keys_of(type(found)).items()
        if bare in _ALWAYS or (key.is_exported and found.device == "nvme")
    }
    if isinstance(found, OptimizerOffload) and found.ratio < 1:
        entry["ratio"] = found.ratio
    return entry


def _plain(block: Any) -> dict[str, Any]:
    if not isinstance(block, Mapping):
        return {}
    return {key: value for key, value in block.items() if value not in (None, "auto")}
