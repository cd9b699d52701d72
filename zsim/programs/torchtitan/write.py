"""A job -> torchtitan's TOML (0.2), with the command line of 0.3 as a comment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zsim.dtypes import ELEMENT_TYPES
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.programs.torchtitan.degree_keys import (
    ASYNC,
    MODULE_NAMES,
    ROTATE,
    degrees_of,
    local_batch_size,
    why_not_degrees,
)
from zsim.programs.torchtitan.keys import KEYS, PRESETS
from zsim.specs.experiment.job import Job
from zsim.specs.formats.export import ProgramFile, ProgramWriter
from zsim.specs.formats.toml import toml_text
from zsim.specs.strategy.training import TrainingConfig

_FILE = "torchtitan.toml"
_MODES = {"none": "none", "full": "full", "selective-op": "selective"}
_CHUNKED = ("torchtitan-chunked", "torchtitan-chunked-fused")  # 0.3's
_COMPILED = ("fused", "torchtitan-chunked-fused")
_LOSSES = ("eager", "fused", *_CHUNKED)
CLIPS_NOTHING = 1e9  # torchtitan computes the norm in any case
_RECIPES = ("torchao-tensorwise", "torchao-rowwise", "mxfp8")
_NOT_IN_0_2 = {("llama3", "1B"), ("llama3", "3B"), ("gpt_oss", "20b"), ("gpt_oss", "120b")}  # 0.3's


class TomlWriter(ProgramWriter):
    """Writes torchtitan.toml."""

    def write(self, job: Job) -> ProgramFile | None:
        if job.kind == "deepspeed":
            return None
        reason = _why_not_torchtitan(job)
        if reason is not None:
            return ProgramFile(_FILE, reason=reason)
        return ProgramFile(_FILE, torchtitan_toml(job), notes=tuple(_notes(job)))


WRITER = TomlWriter()


def _notes(job: Job) -> Iterator[str]:
    if torchtitan_model(job) is None:
        yield (
            f"torchtitan.toml: torchtitan 0.2 has no flavor that is {job.model.name}: without model.name and "
            "model.flavor it trains its debugmodel"
        )
    if job.training.cross_entropy in _CHUNKED:
        yield (
            "torchtitan.toml: torchtitan 0.2, which reads this file, computes the loss in one piece; 0.3, "
            "whose command line is in the file, in eight chunks, as simulated"
        )
    if not job.training.gradient_clipping:
        yield (
            "torchtitan.toml: torchtitan always takes the gradients' norm, the simulated step does not; "
            "max_norm = 1e9 clips nothing"
        )


def _why_not_torchtitan(job: Job) -> str | None:
    """The reason why torchtitan's TOML cannot express this job, or None if it can."""
    strategy, training = job.strategy, job.training
    if not isinstance(strategy, Fsdp2Config):
        return "it shards with FSDP2 only"
    if job.model.has_encoder:
        return "its trainer has decoders alone"
    if job.model.towers:
        return "torchtitan 0.2 has no flavor with towers"
    if strategy.replicate > 1 and strategy.replicate == job.data_parallel_size * job.parallelism.context:
        return f"it takes shards of 1 and {strategy.replicate} replicas for DDP"
    if training.checkpoint_offload is not None or training.mlp_tiles > 1:
        return "it has no checkpoints in host memory (checkpoint_offload) and no tiled MLPs (mlp_tiles)"
    reshard = strategy.reshard_after_forward
    if reshard is not None and not isinstance(reshard, bool):
        return "it reshards after forward to all ranks or not at all"
    if strategy.wrapping != "torchtitan":
        return f"it has its own units, not '{strategy.wrapping}'"
    if strategy.reduce_dtype != "fp32":
        return f"it reduces in fp32, not in {strategy.reduce_dtype}"
    if training.precision not in ("bf16", "fp32", "fp8"):
        return f"it trains in bf16, fp32 or fp8, not in {training.precision}"
    if strategy.param_dtype not in ("bf16", "fp32", "fp8"):
        return f"it gathers in bf16, fp32 or fp8, not in {strategy.param_dtype}"
    if training.precision == "fp8" and training.fp8.recipe not in _RECIPES:
        return f"its layers are torchao's, without recipe '{training.fp8.recipe}'"
    if job.experiment.training.bf16_first_layers + job.experiment.training.bf16_last_layers:
        return "it converts all layers, or leaves them out by name"
    if training.block_checkpointing:
        return "it checkpoints every n-th block alike, not each block in its own way"
    if training.activation_checkpointing not in _MODES:
        return f"it has no checkpointing '{training.activation_checkpointing}'"
    if training.gradient_accumulation_steps > 1 and strategy.no_sync:
        return "it reduces gradients after every micro-batch"
    if strategy.defers_all_reduce:
        return "it sums gradients over the replicas after every micro-batch"
    if training.cross_entropy not in _LOSSES:
        return f"it has no cross entropy '{training.cross_entropy}'"
    if training.optimizer not in ("adamw", "adam"):
        return f"it has no optimizer '{training.optimizer}'"
    return why_not_degrees(job)


def torchtitan_toml(job: Job) -> str:
    """The file's text."""
    sections = _sections(job)
    words = " ".join(
        f"--{section}.{key} {' '.join(value)}" if isinstance(value, list) else f"--{section}.{key}={value}"
        for section, key, value in _options_of_0_3(sections)
    )
    mode = sections["activation_checkpoint"]["mode"]
    return toml_text(
        sections,
        "torchtitan 0.2 reads this file; 0.3 takes the same as\n"
        f"  --module MODEL --config CONFIG {words} activation-checkpoint:{mode}",
    )


def _options_of_0_3(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    """(section, key, value) of 0.3's command line, which takes no lists of lists, and gathers for context
    parallelism in any case."""
    for section in ("training", "parallelism", "compile"):
        for key, value in sections[section].items():
            if key == ASYNC:
                yield "compile", key, value
            elif key not in (MODULE_NAMES, ROTATE):
                yield section, key, value


def _sections(job: Job) -> dict[str, dict[str, Any]]:
    strategy, training = job.strategy, job.training
    assert isinstance(strategy, Fsdp2Config)
    checkpoint: dict[str, Any] = {"mode": _MODES[training.activation_checkpointing]}
    if training.activation_checkpointing == "selective-op":
        checkpoint["selective_ac_option"] = "op"
    elif training.activation_checkpointing == "full" and training.checkpoint_every > 1:
        checkpoint = {"mode": "selective", "selective_ac_option": str(training.checkpoint_every)}
    checkpoint["early_stop"] = training.checkpoint_stops_early
    sections: dict[str, dict[str, Any]] = {
        "model": _model(job),
        "optimizer": {
            "name": {"adamw": "AdamW", "adam": "Adam"}[training.optimizer],
            "implementation": training.optimizer_implementation.replace("_", "-"),
        },
        "training": {
            "local_batch_size": local_batch_size(job),
            "global_batch_size": (
                training.micro_batch_size * training.gradient_accumulation_steps * job.data_parallel_size
            ),
            "seq_len": KEYS["training.seq_len"].write(job),
            "max_norm": training.gradient_clipping or CLIPS_NOTHING,
            **({} if training.stored_dtype == "fp32" else {"dtype": KEYS["training.dtype"].write(job)}),
            "mixed_precision_param": ELEMENT_TYPES["fp32" if training.precision == "fp32" else "bf16"].torch,
            "mixed_precision_reduce": "float32",
            "enable_cpu_offload": KEYS["training.enable_cpu_offload"].write(job),
        },
        "parallelism": {
            "data_parallel_replicate_degree": KEYS["parallelism.data_parallel_replicate_degree"].write(job),
            "data_parallel_shard_degree": job.data_parallel_size // strategy.replicate,
            "fsdp_reshard_after_forward": KEYS["parallelism.fsdp_reshard_after_forward"].write(job),
            **degrees_of(job),
        },
        "activation_checkpoint": checkpoint,
        "compile": _compile(training),
    }
    if training.precision == "fp8":
        sections["quantize"] = {"linear": _quantize(strategy, training)}
    if job.experiment.parallelism.expert_imbalance == 1:
        sections["debug"] = {"moe_force_load_balance": True}
    return sections


def _quantize(strategy: Fsdp2Config, training: TrainingConfig) -> dict[str, Any]:
    """`[quantize.linear]`: no `recipe_name` is torchao's tensorwise scaling, which alone gathers in fp8."""
    if training.fp8.recipe == "mxfp8":
        return {"mx": {"recipe_name": "mxfp8_cublas"}}
    if training.fp8.recipe == "torchao-rowwise":
        return {"float8": {"recipe_name": "rowwise"}}
    gathers: dict[str, Any] = {"enable_fsdp_float8_all_gather": strategy.param_dtype == "fp8"}
    if strategy.precomputes_scales:
        gathers["precompute_float8_dynamic_scale_for_fsdp"] = True
    return {"float8": gathers}


def _compile(training: TrainingConfig) -> dict[str, Any]:
    """The section `[compile]`. Model and loss are compiled, or one of them (`components`). A loss that is not
    compiled is eager.
    """
    is_loss_compiled = training.cross_entropy in _COMPILED
    components = [
        name for name, is_compiled in (("model", training.compile), ("loss", is_loss_compiled)) if is_compiled
    ]
    return {"enable": bool(components), **({"components": components} if len(components) == 1 else {})}


def torchtitan_model(job: Job) -> tuple[str, str] | None:
    """The name and flavor of the job's model in torchtitan 0.2, or None if it has none."""
    job_model = job.experiment.model
    return next(
        (key for key, preset in PRESETS.items() if preset == job_model and key not in _NOT_IN_0_2), None
    )


def _model(job: Job) -> dict[str, Any]:
    name_and_flavor = torchtitan_model(job)
    model: dict[str, Any] = (
        {} if name_and_flavor is None else {"name": name_and_flavor[0], "flavor": name_and_flavor[1]}
    )
    if job.training.precision != "fp8":
        return model
    kind = "mx" if job.training.fp8.recipe == "mxfp8" else "float8"
    return model | {"converters": [f"quantize.linear.{kind}"]}
