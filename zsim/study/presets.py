"""The models that ship with zsim, by size and family, with the published runs that say how far zsim is off.

The GPUs, clusters and strategies without such a run are listed by name.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import expm1
from typing import Any

from zsim.cost.flops import active_numel
from zsim.operations.operation import Role, operations_of
from zsim.report.framework import report_role
from zsim.report.job_features import network_fabric, node_fabric
from zsim.specs.cluster.files import load_cluster
from zsim.specs.model.huggingface import load_model, read_model_config
from zsim.specs.model.spec import Attention, ModelSpec
from zsim.specs.presets import gpu_preset_names, model_preset_names, topology_preset_names
from zsim.specs.strategy.registry import kinds_in_order
from zsim.units import format_count
from zsim.validated.runs import ValidatedRun, validated_runs

SAME_SIZE = 1e-4  # a run of a model whose parameters differ by at most this fraction is one of its size
_WIDTH = 79


@dataclass(frozen=True, slots=True)
class ModelPreset:
    """A model that ships with zsim, with the accuracy of published runs of models of its size."""

    name: str
    family: str
    kind: str
    """Dense, MoE, encoder, or encoder with decoder."""
    parameters: int
    active_parameters: int
    mtp_parameters: int
    layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int | None
    is_tied: bool
    source: str
    hub_ids: tuple[str, ...]
    """The Hub ids of checkpoints of this shape."""
    validated_runs: int
    """The number of published runs of a model of as many parameters."""
    validated_sources: tuple[str, ...]
    """The sources of these runs."""
    validated_error: float | None
    """The mean absolute error of these runs (measured / predicted - 1), or None without a run."""

    def to_dict(self) -> dict[str, Any]:
        """The preset as `--json` writes it."""
        return asdict(self)

    def row(self) -> str:
        """One line of at most 79 columns."""
        active = f"{_billions(self.active_parameters)} active" if self.kind == "MoE" else ""
        number = format_count(self.validated_runs, "run")
        runs = f"{number}, {self.validated_error:.1%}" if self.validated_error else "-"
        size = _billions(self.parameters)
        return f"{self.name:<21} {size:>6} {active:<12} {self.family:<10} {self.kind:<7} {runs}".rstrip()

    def details(self) -> Iterator[str]:
        """The lines of `zsim presets NAME`."""
        yield f"{self.name}: {self.kind}, family {self.family}"
        yield f"  parameters   {self.parameters:,}" + (", embedding and head tied" if self.is_tied else "")
        if self.active_parameters != self.parameters:
            yield f"  active       {self.active_parameters:,} for one token"
        if self.mtp_parameters:
            yield f"  besides      {self.mtp_parameters:,} for multi-token prediction (`mtp_layers`)"
        yield f"  shape        {self.layers} blocks of {self.hidden_size:,}, vocabulary {self.vocab_size:,}"
        longest = "any length" if self.max_positions is None else f"{self.max_positions:,} tokens"
        yield f"  positions    {longest}"
        yield _wrap_text("  source       ", self.source)
        if self.hub_ids:
            yield _wrap_text("  on the Hub   ", ", ".join(self.hub_ids))
        if self.validated_error is None:
            yield _wrap_text("  validated    ", "no published run of a model of this size")
            return
        sources = ", ".join(self.validated_sources)
        count = f"{self.validated_runs} published runs of models of this size"
        yield _wrap_text("  validated    ", f"{count}, mean error {self.validated_error:.1%} ({sources})")


def model_presets() -> list[ModelPreset]:
    """All models that ship with zsim, by name."""
    return [model_preset(name) for name in model_preset_names()]


def model_preset(name: str) -> ModelPreset:
    """The model preset of this name. Raises InputError for an unknown name."""
    config, _, _ = read_model_config(name)
    model = load_model(name)
    runs = [run for run in validated_runs() if abs(run.features.parameters / model.numel - 1) <= SAME_SIZE]
    errors = [abs(expm1(run.error)) for run in runs]
    return ModelPreset(
        name=model.name,
        family=model.family,
        kind=_kind(model),
        parameters=model.numel,
        active_parameters=active_numel(model),
        mtp_parameters=model.mtp_parameters,
        layers=len(model.blocks),
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        max_positions=model.max_positions,
        is_tied=model.is_tied,
        source=str(config.get("_source", "")),
        hub_ids=tuple(config.get("_hub", ())),
        validated_runs=len(runs),
        validated_sources=tuple(dict.fromkeys(run.source for run in runs)),
        validated_error=sum(errors) / len(errors) if errors else None,
    )


def _kind(model: ModelSpec) -> str:
    modules = [module for block in model.blocks for module in block.modules]
    if model.has_encoder:
        return "enc-dec"
    if any(module.role is Role.EXPERTS for module in modules):
        return "MoE"
    cores = operations_of(modules, Attention)
    return "encoder" if cores and not any(core.is_causal for core in cores) else "dense"


def _billions(count: int) -> str:
    """In thousands of millions, three digits: 0.124B, 7.62B, 70.6B, 671B."""
    value = count / 1e9
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.995 else 3
    return f"{value:.{digits}f}B"


def _wrap_text(head: str, text: str) -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    )


def strategies() -> tuple[str, ...]:
    """The strategies that zsim simulates, as `strategy_name` names them. Some of them come also with their
    states in the host's memory or on NVMe.
    """
    frameworks = [report_role(kind) for kind in kinds_in_order()]
    return (
        *(name for framework in frameworks for name in framework.strategy_names),
        *(f"{name} offloaded" for framework in frameworks for name in framework.offloading_names),
    )


def list_unvalidated(runs: Sequence[ValidatedRun] | None = None) -> dict[str, tuple[str, ...]]:
    """GPUs, cluster presets and strategies that no validated run used, by kind."""
    runs = validated_runs() if runs is None else runs
    gpus = {run.features.gpu for run in runs}
    used_strategies = {run.features.strategy for run in runs}
    names_by_kind = {
        "GPUs": tuple(name for name in gpu_preset_names() if name not in gpus),
        "clusters": _unvalidated_clusters(runs),
        "strategies": tuple(name for name in strategies() if name not in used_strategies),
    }
    return {what: names for what, names in names_by_kind.items() if names}


def _unvalidated_clusters(runs: Sequence[ValidatedRun]) -> tuple[str, ...]:
    """Presets whose GPU, node links or network no validated run used."""
    gpus = {run.features.gpu for run in runs}
    fabrics = {run.features.fabric for run in runs}
    presets = []
    for name in topology_preset_names():
        cluster = load_cluster(name)
        links = {node_fabric(cluster), network_fabric(cluster)} - {""}
        if cluster.gpu.name not in gpus or not links <= fabrics:
            presets.append(name)
    return tuple(presets)
