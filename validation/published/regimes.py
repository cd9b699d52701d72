"""Errors and coverage by regime in Markdown, and the hardware and strategies without a validated run."""

from __future__ import annotations

from collections.abc import Sequence
from math import expm1
from statistics import fmean, median

from validation.published.coverage import (
    Coverage,
    JudgedRun,
    coverage_of,
    coverage_per_regime,
    mean_of_sources,
    regime_title,
)
from validation.published.ratio_errors import ratio_coverage
from zsim.report.views.text.plain import markdown, named_columns
from zsim.study.presets import list_unvalidated
from zsim.validated.runs import ValidatedRun

_ALL = "**all**"
_REGIME = "framework and nodes", "rows", "sources"


def regime_table(runs: Sequence[ValidatedRun]) -> list[str]:
    """By framework and number of nodes: the mean error over rows and over sources, as studied."""
    rows = [(title, *_studied_cells(group)) for title, group in _regime_groups(runs).items()]
    return markdown(named_columns(*_REGIME, "mean, rows", "mean, sources", "worst", "bias, rows",
                                  "bias, sources"), rows)  # fmt: skip


def _studied_cells(runs: Sequence[ValidatedRun]) -> tuple[str, ...]:
    errors, sources = [expm1(-run.error) for run in runs], [run.source for run in runs]
    sizes = [abs(error) for error in errors]
    return (
        f"{len(runs)}",
        f"{len(set(sources))}",
        f"{fmean(sizes):.1%}",
        f"{mean_of_sources(sizes, sources):.1%}",
        f"{max(sizes):.1%}",
        f"{fmean(errors):+.1%}",
        f"{mean_of_sources(errors, sources):+.1%}",
    )


def _regime_groups(runs: Sequence[ValidatedRun]) -> dict[str, list[ValidatedRun]]:
    """The runs by framework and nodes, those with shared replicas, mixtures of experts, and all."""
    groups: dict[str, list[ValidatedRun]] = {}
    for run in sorted(runs, key=lambda run: regime_title(run.features)):
        groups.setdefault(regime_title(run.features), []).append(run)
    groups["several ranks to a replica"] = [run for run in runs if run.features.is_shared]
    groups["mixtures of experts"] = [run for run in runs if run.features.is_mixture]
    groups[_ALL] = list(runs)
    return {title: group for title, group in groups.items() if group}


def regime_lines(runs: Sequence[ValidatedRun]) -> list[str]:
    """The sections of docs/accuracy.md on studied runs by regime: errors, those of a ratio, and what has no
    validated run."""
    return [
        "## By framework and number of nodes, as studied",
        "",
        "Most rows are of three sources (MosaicML's FSDP on A100, nanotron's sweep, vTrain's tables), so",
        "the mean over sources says more. Rows of tables that are not in the checkout:",
        "[recorded_errors.csv](../validation/published/recorded_errors.csv). Runs that timed only their",
        "first steps are left out.",
        "",
        *regime_table(runs),
        "",
        *_ratio_lines(runs),
        *_unvalidated_lines(runs),
    ]


def _ratio_lines(runs: Sequence[ValidatedRun]) -> list[str]:
    columns = named_columns(
        "ranks to a replica",
        "what differs",
        "pairs",
        "sources",
        "80 % within",
        "within, pairs",
        "within, sources",
    )
    rows = [
        (
            ranks,
            coverage.kind,
            f"{coverage.pairs:,}",
            f"{coverage.sources}",
            f"{expm1(coverage.bound):.1%}",
            f"{coverage.covered:.0%}",
            f"{coverage.covered_by_source:.0%}",
        )
        for ranks, is_shared in (("one", False), ("several", True))
        for coverage in ratio_coverage(runs, is_shared=is_shared)
    ]
    return [
        "## How far a difference is to be trusted",
        "",
        "Errors of two runs of one source, model and GPU are similar, so their ratio is more exact. By what",
        "they differ: the error that 80 % of ratios stay within, each source with equal weight, and how many",
        'stay within what the other sources say. Smaller differences are called "no difference that zsim can',
        'tell".',
        "",
        *markdown(columns, rows),
        "",
    ]


def _unvalidated_lines(runs: Sequence[ValidatedRun]) -> list[str]:
    lines = [
        "## Without a validated run",
        "",
        "zsim simulates these, and no published run says how well:",
        "",
    ]
    return [
        *lines,
        *(f"- {category}: {', '.join(names)}" for category, names in list_unvalidated(runs).items()),
        "",
    ]


def accuracy_lines(judged: Sequence[JudgedRun]) -> list[str]:
    """The README's lines: the error on sources that were predicted blind and how often intervals hold, and
    the mean error of the others by framework, every source alike."""
    blind, studied = ([row for row in judged if row.run.is_blind is flag] for flag in (True, False))
    overall, unseen, regimes = coverage_of(studied), coverage_of(blind), coverage_per_regime(studied)
    if overall is None or unseen is None:
        return []
    frameworks = dict.fromkeys(title.split(", ")[0] for title in regimes)
    rows = [
        (
            name,
            *(
                _format_source_error(regimes.get(f"{name}, {nodes}"))
                for nodes in ("one node", "several nodes")
            ),
        )
        for name in frameworks
    ]
    details = mean_of_sources(
        [abs(expm1(-row.run.error)) for row in studied], [row.run.source for row in studied]
    )
    new, known = unseen.mean_absolute_error_by_source, overall.mean_absolute_error_by_source
    return [
        f"Sources predicted before anything was known of them: {unseen.sources}, with {unseen.rows} runs.",
        f"**Their step times are off by {new:.0%} in the mean**, with equal weight for every source; half of",
        f"the runs are within {_median_error(blind):.0%}. Expect this of a job of yours. The 80 % interval",
        f"given with every answer holds for {unseen.covered:.0%} of these runs, each judged by the other",
        f"sources; half of its width is {unseen.half_width:.0%} of the step in the median.",
        "",
        f"Sources that zsim was developed with: {overall.sources}, with {overall.rows:,} runs, predicted",
        f"from what each publication says. Their mean error is {known:.1%}, half of the runs are within",
        f"{_median_error(studied):.1%}. With details found elsewhere (container, flags, network) the mean",
        f"is {details:.1%}.",
        "",
        *markdown(named_columns("mean error (number of sources)", "one node", "several nodes"), rows),
    ]


def _format_source_error(coverage: Coverage | None) -> str:
    return "" if coverage is None else f"{coverage.mean_absolute_error_by_source:.1%} ({coverage.sources})"


def _median_error(judged: Sequence[JudgedRun]) -> float:
    return median(abs(expm1(-row.error)) for row in judged)
