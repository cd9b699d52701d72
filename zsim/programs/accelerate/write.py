"""A job -> the YAML that `accelerate launch --config_file` takes (accelerate 1.15.0)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from zsim.frameworks.ddp.settings import DdpConfig
from zsim.frameworks.deepspeed.parallelism import AUTOTP
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.fsdp1.settings import Fsdp1Config
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.programs.accelerate.keys import KEYS, PARALLELISM
from zsim.programs.deepspeed.write import DEEPSPEED_FILE
from zsim.programs.torch.write import checkpointing_call, long_sequence_calls
from zsim.programs.torchtitan.keys import ROTATE_METHODS, UNROTATED
from zsim.specs.experiment.job import Job
from zsim.specs.formats.export import ProgramFile, ProgramWriter
from zsim.specs.strategy.parallelism import ParallelismConfig

_FILE = "accelerate.yaml"


class YamlWriter(ProgramWriter):
    """Writes accelerate.yaml."""

    def write(self, job: Job) -> ProgramFile | None:
        reason = _why_not_accelerate(job)
        if reason is not None:
            return ProgramFile(_FILE, reason=reason)
        return ProgramFile(_FILE, accelerate_yaml(job), notes=tuple(_notes(job)))


WRITER = YamlWriter()


class _Engine:
    """One engine of training in the YAML, by `strategy.kind` in `_ENGINES`.

    The answers here are those of an engine that Accelerate does not run.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def why_not(self, job: Job, strategy: Any) -> str | None:
        """The reason why the YAML cannot express the job, or None if it can."""
        return self.reason

    def entries(self, job: Job, strategy: Any) -> dict[str, Any]:
        """The file's entries of this engine."""
        return {}

    def calls(self, job: Job, strategy: Any) -> Iterator[str]:
        """Settings of the engine alone that the script makes."""
        yield from ()

    def note(self, job: Job, strategy: Any) -> str:
        """The note on what the user of the file must do."""
        return f"the script's: {', '.join((*_calls(job), *self.calls(job, strategy)))}"


class _DeepSpeed(_Engine):
    def why_not(self, job: Job, strategy: DeepSpeedConfig) -> str | None:
        if job.parallelism.pipeline > 1 or (job.parallelism.tensor > 1 and job.parallelism.style != AUTOTP):
            return self.reason
        return None

    def entries(self, job: Job, strategy: DeepSpeedConfig) -> dict[str, Any]:
        """The key `mixed_precision` is refused beside a config file."""
        block = {"deepspeed_config_file": DEEPSPEED_FILE, "zero3_init_flag": strategy.stage == 3}
        if job.num_nodes > 1:  # else pdsh and a hostfile, whatever num_machines says
            block["deepspeed_multinode_launcher"] = "standard"
        entries: dict[str, Any] = {"distributed_type": "DEEPSPEED", "deepspeed_config": block}
        if job.parallelism.context > 1:
            entries["parallelism_config"] = {"parallelism_config_sp_size": job.parallelism.context}
        return entries

    def note(self, job: Job, strategy: DeepSpeedConfig) -> str:
        return f"start it in its own folder, where {DEEPSPEED_FILE} lies"


class _Ddp(_Engine):
    """DDP, and the answers that all of torch's engines share."""

    def why_not(self, job: Job, strategy: Any) -> str | None:
        if job.training.gradient_accumulation_steps > 1 and not strategy.no_sync:
            return "it reduces gradients after the last micro-batch only (no_sync)"
        if job.parallelism.is_trivial:
            return None
        if job.parallelism.pipeline > 1:
            return "it has no pipeline under PyTorch's own engines"
        return self.why_not_degrees(job, strategy)

    def why_not_degrees(self, job: Job, strategy: Any) -> str | None:
        """The reason why it cannot express the degrees of a job without a pipeline."""
        return self.reason

    def entries(self, job: Job, strategy: Any) -> dict[str, Any]:
        precision = job.training.precision
        return {
            **self.distribution(job, strategy),
            "mixed_precision": "no" if precision == "fp32" else precision,
        }

    def distribution(self, job: Job, strategy: Any) -> dict[str, Any]:
        """The entries on how ranks share the model."""
        return {"distributed_type": "MULTI_GPU" if job.world_size > 1 else "NO"}

    def calls(self, job: Job, strategy: DdpConfig) -> Iterator[str]:
        options = []
        if strategy.bucket_cap_bytes != DdpConfig().bucket_cap_bytes:
            options.append(f"bucket_cap_mb={strategy.bucket_cap_bytes / 2**20:g}")
        if strategy.gradient_as_bucket_view:
            options.append("gradient_as_bucket_view=True")
        if options:
            yield f"kwargs_handlers=[DistributedDataParallelKwargs({', '.join(options)})]"
        if job.training.block_checkpointing:
            yield "activation checkpointing, which differs by block"
        elif job.training.activation_checkpointing != "none":
            yield checkpointing_call(job)


class _Fsdp(_Ddp):
    """Both FSDPs, in their shared answers."""

    def why_not(self, job: Job, strategy: Any) -> str | None:
        training = job.training
        if reason := super().why_not(job, strategy):
            return reason
        if strategy.param_dtype != training.precision or strategy.reduce_dtype != training.precision:
            return (
                f"it gathers and reduces in mixed_precision; this gathers in {strategy.param_dtype} and "
                f"reduces in {strategy.reduce_dtype}"
            )
        if training.block_checkpointing:
            return "it checkpoints every block or none, not each block in its own way"
        if training.activation_checkpointing not in ("none", "full") or training.checkpoint_every != 1:
            return f"it checkpoints every block or none, not '{training.activation_checkpointing}'"
        return self.why_not_sharded(job, strategy)

    def why_not_sharded(self, job: Job, strategy: Any) -> str | None:
        """The reason why it cannot express how the model is sharded."""
        return None

    def calls(self, job: Job, strategy: Any) -> Iterator[str]:
        yield from ()


class _Fsdp1(_Fsdp):
    def why_not_sharded(self, job: Job, strategy: Fsdp1Config) -> str | None:
        if not strategy.limit_all_gathers:
            return "it limits FSDP1's all-gathers whatever its file says (limit_all_gathers)"
        if strategy.replicate not in (1, job.num_nodes):
            return "torch's own hybrid groups are nodes"
        if strategy.wrapping not in ("huggingface", "peft", "none") and not strategy.wrapping.startswith(
            "size:"
        ):
            return f"it does not wrap as '{strategy.wrapping}'"
        return None

    def distribution(self, job: Job, strategy: Fsdp1Config) -> dict[str, Any]:
        return {"distributed_type": "FSDP", "fsdp_config": _fsdp1(job, strategy)}


class _Fsdp2(_Fsdp):
    def why_not_degrees(self, job: Job, strategy: Fsdp2Config) -> str | None:
        parallelism = job.parallelism
        if parallelism.sequence_parallel or parallelism.async_tensor:
            return "its tensor parallelism is without sequence parallelism, and in whole products"
        if parallelism.context > 1 and parallelism.context_method not in ROTATE_METHODS.values():
            return UNROTATED
        if parallelism.order != ParallelismConfig().order:
            return "its mesh has one order"
        shard = job.data_parallel_size // strategy.replicate
        if job.data_parallel_size % strategy.replicate or (shard == 1 and parallelism.context == 1):
            return "it wants ranks that shard beside those that share a layer"
        return None

    def why_not_sharded(self, job: Job, strategy: Fsdp2Config) -> str | None:
        if strategy.defers_all_reduce:
            return "it calls set_requires_gradient_sync, never set_requires_all_reduce"
        reshard = strategy.reshard_after_forward
        if reshard is not None and not isinstance(reshard, bool):
            return "it reshards after forward to all ranks or not at all"
        if strategy.wrapping != "torchtitan":
            return f"it wraps embedding and head apart, not as '{strategy.wrapping}'"
        if strategy.replicate > 1 and strategy.replicate == job.world_size:
            return f"its FSDP2 refuses shards of 1, here with {strategy.replicate} replicas"
        return None

    def distribution(self, job: Job, strategy: Fsdp2Config) -> dict[str, Any]:
        entries: dict[str, Any] = {"distributed_type": "FSDP", "fsdp_config": _fsdp2(job, strategy)}
        if strategy.replicate > 1 or not job.parallelism.is_trivial:
            entries["parallelism_config"] = _sizes(job, strategy)
        return entries


_ONE_LAYER = "it splits layers and sequences with FSDP2 only"
_NO_ENGINE = _Engine("it has no engine but DeepSpeed's and PyTorch's own")
_ENGINES: Mapping[str, _Engine] = {
    "ddp": _Ddp(_ONE_LAYER),
    "fsdp1": _Fsdp1(_ONE_LAYER),
    "fsdp2": _Fsdp2(_ONE_LAYER),
    "deepspeed": _DeepSpeed(
        "it prepares whole models for DeepSpeed, without a pipeline or layers split by the model"
    ),
    "megatron": _Engine("it starts Megatron through a plugin of its own, which zsim does not write"),
}


def _engine(job: Job) -> _Engine:
    return _ENGINES.get(job.kind, _NO_ENGINE)


def _notes(job: Job) -> Iterator[str]:
    yield f"{_FILE}: {_engine(job).note(job, job.strategy)}"
    if job.num_nodes > 1:
        yield (
            f"{_FILE}: every node's own: accelerate launch --machine_rank NUMBER "
            "--main_process_ip ADDRESS_OF_NODE_0 --main_process_port 29500"
        )


def _calls(job: Job) -> Iterator[str]:
    """Settings that Accelerate takes from the script and not from its YAML, under PyTorch's own engines."""
    training = job.training
    yield f"DataLoader(batch_size={training.micro_batch_size})"
    if training.gradient_accumulation_steps > 1:
        yield f"Accelerator(gradient_accumulation_steps={training.gradient_accumulation_steps})"
    if training.gradient_clipping:
        yield f"accelerator.clip_grad_norm_(model.parameters(), {training.gradient_clipping:g})"
    yield from long_sequence_calls(job)


def _why_not_accelerate(job: Job) -> str | None:
    """The reason why Accelerate's YAML cannot express this job, or None if it can."""
    if job.training.precision == "fp8":
        return "float8 needs a recipe of its own (fp8_config)"
    return _engine(job).why_not(job, job.strategy)


def accelerate_yaml(job: Job) -> str:
    """The text of the file. It expects the JSON of a DeepSpeed job as `ds_config.json` in the same folder."""
    data: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "machine_rank": 0}
    data |= _engine(job).entries(job, job.strategy)
    if job.training.compile:
        data["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    data |= {"num_machines": job.num_nodes, "num_processes": job.world_size, "rdzv_backend": "static"}
    return "\n".join(_lines(data)) + "\n"


def _sizes(job: Job, strategy: Fsdp2Config) -> dict[str, Any]:
    parallelism = job.parallelism
    sizes: dict[str, Any] = {
        PARALLELISM + "dp_replicate_size": strategy.replicate,
        PARALLELISM + "dp_shard_size": job.data_parallel_size // strategy.replicate,
        PARALLELISM + "tp_size": parallelism.tensor,
        PARALLELISM + "cp_size": parallelism.context,
    }
    if parallelism.context > 1:
        sizes |= _plain(job, PARALLELISM + "cp_comm_strategy")
    return sizes


def _plain(job: Job, *keys: str) -> dict[str, Any]:
    """The entries of keys that are written as they are declared."""
    return {key: KEYS[key].write(job) for key in keys}


def _fsdp2(job: Job, strategy: Fsdp2Config) -> dict[str, Any]:
    reshard = strategy.reshard_after_forward
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True if reshard is None else reshard,
        **_plain(job, "fsdp_offload_params", "fsdp_activation_checkpointing"),
    }


def _fsdp1(job: Job, strategy: Fsdp1Config) -> dict[str, Any]:
    block = {
        "fsdp_version": 1,
        **_plain(
            job,
            "fsdp_sharding_strategy",
            "fsdp_backward_prefetch",
            "fsdp_forward_prefetch",
            "fsdp_offload_params",
        ),
        "fsdp_use_orig_params": True,
        **_plain(job, "fsdp_activation_checkpointing"),
    }
    if strategy.wrapping.startswith("size:"):
        return block | {
            "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
            "fsdp_min_num_params": int(strategy.wrapping.partition(":")[2]),
        }
    return block | {
        "fsdp_auto_wrap_policy": "NO_WRAP" if strategy.wrapping == "none" else "TRANSFORMER_BASED_WRAP"
    }


def _lines(data: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _lines(value, indent + "  ")
        elif isinstance(value, str):
            yield f"{indent}{key}: {json.dumps(value)}"
        else:
            yield f"{indent}{key}: {str(value).lower() if isinstance(value, bool) else value}"
