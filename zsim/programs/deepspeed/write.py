"""A job -> the DeepSpeed JSON that runs it.

It is the user's file with every effective value written out, so that a release with other defaults behaves
the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from zsim.frameworks.deepspeed.expert_libraries import AUTOEP
from zsim.frameworks.deepspeed.parallelism import AUTOTP
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig, OptimizerOffload, ParameterOffload
from zsim.frameworks.deepspeed.settings.keys import keys_of
from zsim.frameworks.deepspeed.settings.table import DeepSpeedTable
from zsim.frameworks.deepspeed.settings.text import drop_comments, load_object
from zsim.frameworks.deepspeed.settings.zero_schema import ZERO_KEYS, json_key
from zsim.programs.torch.write import checkpointing_call, long_sequence_calls
from zsim.specs.experiment.job import Job
from zsim.specs.formats.export import ProgramFile, ProgramWriter

DEEPSPEED_FILE = "ds_config.json"
_OFFLOAD = ("offload_param", "offload_optimizer", "cpu_offload", "cpu_offload_param", "cpu_offload_params")
_ALWAYS_WRITTEN = ("device", "pin_memory")


class JsonWriter(ProgramWriter):
    """Writes ds_config.json."""

    def write(self, job: Job) -> ProgramFile | None:
        if job.kind != DeepSpeedConfig.kind:
            return None
        text = json.dumps(deepspeed_object(job), indent=2) + "\n"
        strategy = {"config": DEEPSPEED_FILE, "config_name": None, "stage": None}
        return ProgramFile(DEEPSPEED_FILE, text, strategy=strategy)

    def script_notes(self, job: Job) -> Iterator[str]:
        config, training = job.strategy, job.training
        if not isinstance(config, DeepSpeedConfig):
            return
        kind, call = training.activation_checkpointing, checkpointing_call(job)
        if training.block_checkpointing:
            yield "activation checkpointing, which differs by block, is the script's"
        elif call:
            yield f"activation checkpointing '{kind}' is the script's: {call}"
        if config.optimizer.name is None:
            offloaded = config.zero.offload_optimizer is not None
            optimizer = "DeepSpeedCPUAdam" if offloaded else "FusedAdam"
            yield f"the optimizer is the script's: deepspeed.ops.adam.{optimizer}"
        if training.compile:
            yield "compile the blocks: block.compile()"
        for call in long_sequence_calls(job):
            yield f"the script's as well: {call}"
        yield from _degree_notes(job)


WRITER = JsonWriter()


def _degree_notes(job: Job) -> Iterator[str]:
    """Notes on parallelism that DeepSpeed leaves to the script."""
    parallelism = job.parallelism
    if parallelism.pipeline > 1:
        layers = ", ".join(map(str, parallelism.layers_per_stage))
        yield (
            f"the pipeline is the script's: deepspeed.pipe.PipelineModule(num_stages={parallelism.pipeline}) "
            f"with {layers} layers a stage"
        )
    if parallelism.fuses_projections:
        yield f"tensor parallelism of {parallelism.tensor} is the model's, as in Megatron-DeepSpeed (mpu)"
    if parallelism.context > 1:
        yield "split sequences are the script's: UlyssesSPAttentionHF.register_with_transformers"


def deepspeed_object(job: Job) -> dict[str, Any]:
    """The file as an object. Comments of the user's file are left out."""
    config, table = job.strategy, job.experiment.strategy
    assert isinstance(config, DeepSpeedConfig)
    assert isinstance(table, DeepSpeedTable)
    user_config: dict[str, Any] = {}
    if table.config is not None:
        _, user_config = load_object(table.config, table.config_name)
        drop_comments(user_config, config.name, [])
    batch = config.batch
    content: dict[str, Any] = {
        "train_batch_size": batch.train_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "gradient_clipping": config.gradient_clipping,
    }
    for precision in ("bf16", "fp16"):
        bfloat16_block = user_config.pop("bfloat16", None) if precision == "bf16" else None
        block = dict(user_config.get(precision) or bfloat16_block or {})
        if block or config.param_dtype == precision:
            content[precision] = {**block, "enabled": config.param_dtype == precision}
    content |= _degrees(job, user_config)
    zero = user_config.get("zero_optimization")
    zero = dict(zero) if isinstance(zero, Mapping) else {}
    return {**user_config, **content, "zero_optimization": _zero_block(config, zero)}


def _degrees(job: Job, user_config: Mapping[str, Any]) -> dict[str, Any]:
    """The parallel degrees that DeepSpeed reads from its file. The script must set the stages of a pipeline
    too.
    """
    parallelism = job.parallelism
    degrees: dict[str, Any] = {}
    if parallelism.style == AUTOTP:
        degrees["tensor_parallel"] = {
            **_plain(user_config.get("tensor_parallel")),
            "autotp_size": parallelism.tensor,
        }
    if parallelism.context > 1:
        degrees["sequence_parallel_size"] = parallelism.context
    experts = parallelism.experts
    if experts.library == AUTOEP:
        autoep = {"enabled": True, "autoep_size": experts.ranks}
        backend = {"comm_backend": "deepep"} if experts.dispatcher == "deepep" else {}
        degrees["expert_parallel"] = {**_plain(user_config.get("expert_parallel")), **autoep, **backend}
    if parallelism.pipeline > 1:
        degrees["pipeline"] = {**_plain(user_config.get("pipeline")), "stages": parallelism.pipeline}
    return degrees


def _zero_block(config: DeepSpeedConfig, user_block: dict[str, Any]) -> dict[str, Any]:
    """The block `zero_optimization`: every exported key that has an effect, and other keys only if the user's
    file has them.
    """
    zero = config.zero
    block: dict[str, Any] = {"stage": zero.stage}
    for name, key in ZERO_KEYS.items():
        if not key.is_exported or zero.stage not in key.stages or not key.is_known(config.release):
            continue
        user_block.pop(name, None)
        user_block.pop(json_key(name), None)
        block[json_key(name)] = getattr(zero, name)
    if zero.stage == 3 and zero.allgather_sequential:
        block.pop("stage3_prefetch_bucket_size")  # DeepSpeed itself makes it 1
    user_keys = {
        key: value for key, value in user_block.items() if value != "auto" and key not in ("stage", *_OFFLOAD)
    }
    offloads = {name: getattr(zero, name) for name in ("offload_optimizer", "offload_param")}
    return {
        **block,
        **user_keys,
        **{
            name: _plain(user_block.get(name)) | _offload(offload)
            for name, offload in offloads.items()
            if offload
        },
    }


def _offload(offload: OptimizerOffload | ParameterOffload) -> dict[str, Any]:
    """Every value that the release's default would otherwise decide, and the keys that NVMe needs."""
    entry = {
        name: getattr(offload, name)
        for name, key in keys_of(type(offload)).items()
        if name in _ALWAYS_WRITTEN or (key.is_exported and offload.device == "nvme")
    }
    if isinstance(offload, OptimizerOffload) and offload.ratio < 1:
        entry["ratio"] = offload.ratio
    return entry


def _plain(block: Any) -> dict[str, Any]:
    if not isinstance(block, Mapping):
        return {}
    return {key: value for key, value in block.items() if value not in (None, "auto")}
