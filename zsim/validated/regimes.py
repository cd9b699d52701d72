"""The regimes with validated runs, and the strategies and GPUs without one, by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zsim.validated.coverage import Coverage, JudgedRun, coverage_of
from zsim.validated.features import Features
from zsim.validated.runs import ValidatedRun, validated_runs

# Strategies that zsim simulates, as `strategy_name` names them; some of them also with their states in the
# host's memory or on NVMe.
_OFFLOADING = ("FSDP1", "FSDP2", "ZeRO-1", "ZeRO-2", "ZeRO-3")
STRATEGIES = (
    "DDP", "FSDP1", "FSDP1 SHARD_GRAD_OP", "FSDP2", "HSDP", "ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3",
    "ZeRO-3 + hpZ", "ZeRO-3 + qwZ", "ZeRO-3 + qgZ", "ZeRO-3 + hpZ + qwZ + qgZ", "MiCS",
    "Megatron DDP", "Megatron, distributed optimizer",
    *(f"ZeRO stage {stage}, the reference engine" for stage in range(4)),
    *(f"{name} offloaded" for name in _OFFLOADING),
)  # fmt: skip


def regime_title(features: Features) -> str:
    """Title of a regime, e.g. "FSDP, several nodes"."""
    return f"{features.framework}, {'several nodes' if features.is_several else 'one node'}"


def coverage_per_regime(judged: Sequence[JudgedRun]) -> dict[str, Coverage]:
    """The coverage by framework and number of nodes, in alphabetical order."""
    coverages = {}
    for title in sorted({regime_title(judgement.run.features) for judgement in judged}):
        coverage = coverage_of(
            judgement for judgement in judged if regime_title(judgement.run.features) == title
        )
        if coverage is not None:
            coverages[title] = coverage
    return coverages


def unvalidated_names(names: Iterable[str], validated: Iterable[str]) -> tuple[str, ...]:
    """The `names` that are not among `validated`."""
    validated_names = set(validated)
    return tuple(name for name in names if name not in validated_names)


def unvalidated_strategies(runs: Sequence[ValidatedRun] | None = None) -> tuple[str, ...]:
    """Names of the strategies without a validated run."""
    runs = validated_runs() if runs is None else runs
    return unvalidated_names(STRATEGIES, (run.features.strategy for run in runs))


def unvalidated_gpus(gpus: Iterable[str], runs: Sequence[ValidatedRun] | None = None) -> tuple[str, ...]:
    """GPUs without a validated run."""
    runs = validated_runs() if runs is None else runs
    return unvalidated_names(gpus, (run.features.gpu for run in runs))
