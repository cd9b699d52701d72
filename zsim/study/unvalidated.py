"""The GPUs, clusters and strategies without a validated run, by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zsim.report.framework import report_role
from zsim.report.job_features import network_fabric, node_fabric
from zsim.specs.cluster.files import load_cluster
from zsim.specs.presets import gpu_preset_names, topology_preset_names
from zsim.specs.strategy.registry import kinds_in_order
from zsim.validated.runs import ValidatedRun, validated_runs


def strategies() -> tuple[str, ...]:
    """The strategies that zsim simulates, as `strategy_name` names them. Some of them come also with their
    states in the host's memory or on NVMe.
    """
    frameworks = [report_role(kind) for kind in kinds_in_order()]
    return (
        *(name for framework in frameworks for name in framework.strategy_names),
        *(f"{name} offloaded" for framework in frameworks for name in framework.offloading_names),
    )


def unvalidated_names(names: Iterable[str], validated: Iterable[str]) -> tuple[str, ...]:
    """The `names` that are not among `validated`."""
    validated_names = set(validated)
    return tuple(name for name in names if name not in validated_names)


def unvalidated_strategies(runs: Sequence[ValidatedRun] | None = None) -> tuple[str, ...]:
    """Names of the strategies without a validated run."""
    runs = validated_runs() if runs is None else runs
    return unvalidated_names(strategies(), (run.features.strategy for run in runs))


def unvalidated_gpus(gpus: Iterable[str], runs: Sequence[ValidatedRun] | None = None) -> tuple[str, ...]:
    """GPUs without a validated run."""
    runs = validated_runs() if runs is None else runs
    return unvalidated_names(gpus, (run.features.gpu for run in runs))


def list_unvalidated(runs: Sequence[ValidatedRun] | None = None) -> dict[str, tuple[str, ...]]:
    """GPUs, cluster presets and strategies that no validated run used, by kind."""
    runs = validated_runs() if runs is None else runs
    names_by_kind = {
        "GPUs": unvalidated_gpus(gpu_preset_names(), runs),
        "clusters": _unvalidated_clusters(runs),
        "strategies": unvalidated_strategies(runs),
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
