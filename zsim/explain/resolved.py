"""A resolved job as plain data: every value that its simulation used."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from typing import Any

from zsim.cost.flops import active_numel
from zsim.report.framework import report_role
from zsim.specs.experiment.faults import FaultsTable
from zsim.specs.experiment.job import Job
from zsim.specs.model.expert_layer import has_experts
from zsim.specs.model.prediction import remove_prediction_layers
from zsim.specs.model.spec import ModelSpec


def resolved_experiment(job: Job) -> dict[str, Any]:
    """The resolved job as plain data, with sources."""
    training = job.training
    model = job.model
    settings = report_role(job.kind).resolved_strategy(job, job.strategy)
    return {
        "model": {
            "name": model.name,
            "family": model.family,
            "parameters": model.numel,
            "layers": sum(block.is_wrapped for block in model.blocks),
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "source": _model_source(job),
        },
        "nodes": job.num_nodes,
        "gpus": job.world_size,
        "training": {name: _plain_value(getattr(training, name)) for name in training.__slots__},
        "strategy": {"kind": job.kind, **settings},
        **({} if job.parallelism.is_trivial else {"parallelism": resolved_parallelism(job)}),
        **_loop_settings(job),
        **_irregularities(job),
        **({"micro_batch_sizes": list(job.micro_batch_sizes)} if job.micro_batch_sizes else {}),
        "cluster": job.cluster.model_dump(by_alias=True, exclude=None if job.cluster.nodes else {"nodes"}),
    }


def _plain_value(value: Any) -> Any:
    """A setting that is an object (fp8's recipe) as its fields by name. Every other value is unchanged."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def model_size(job: Job) -> dict[str, int]:
    """Parameters of the whole model, whatever part of it a rank holds.

    Active ones are all but those of the experts that a token is not routed to. Trainable ones are stated if
    some are frozen. Modules for multi-token prediction are counted separately, simulated or not.
    """
    main_model = remove_prediction_layers(job.model)
    sizes = {
        "parameters": main_model.numel,
        "active_parameters": active_numel(main_model),
        "mtp_parameters": job.model.mtp_parameters,
    }
    trainable = job.model.trainable_numel
    return sizes if trainable == job.model.numel else {**sizes, "trainable_parameters": trainable}


def resolved_parallelism(job: Job) -> dict[str, Any]:
    """The degrees of all parallelisms, data parallelism's too, and how the framework runs them."""
    parallelism, experts = job.parallelism, job.parallelism.experts
    settings = {name: getattr(parallelism, name) for name in parallelism.__slots__ if name != "experts"}
    settings["style"] = parallelism.style.name
    if has_experts(job.model):
        settings |= {
            "expert": experts.ranks,
            "expert_tensor": experts.tensor,
            "dispatcher": experts.dispatcher,
            "capacity_factor": experts.capacity_factor,
            "expert_imbalance": max(experts.loads),
        }
    return {"data": job.data_parallel_size, **settings}


def _loop_settings(job: Job) -> dict[str, Any]:
    """Tables of the training loop and of the simulation where they differ from the defaults, and the
    sequences per GPU where they are set.
    """
    tables: dict[str, Any] = {
        name: table.model_dump()
        for name, table in (("trainer", job.experiment.trainer), ("simulation", job.simulation))
        if table != type(table)()
    }
    return tables if job.sequences is None else {**tables, "sequences_per_gpu": job.sequences}


def _irregularities(job: Job) -> dict[str, Any]:
    """Placement, faults and co-located jobs, where the job has them."""
    tables: dict[str, Any] = {}
    if not job.placement.is_plain:
        tables["placement"] = asdict(job.placement)
    faults = job.faults
    if faults != FaultsTable():
        tables["faults"] = faults.model_dump()
    if job.colocated_jobs:
        tables["jobs"] = {
            name: resolved_experiment(other_job) for name, other_job in job.colocated_jobs.items()
        }
    return tables


def _model_source(job: Job) -> str:
    """Source of the architecture, as the user named it."""
    model = job.experiment.model
    if isinstance(model, ModelSpec) and model.function:
        return f"torch module of {model.function}"
    if not isinstance(model, str):
        return "the experiment itself"
    return model if model.endswith(".json") or "/" in model else f"preset {model}"
