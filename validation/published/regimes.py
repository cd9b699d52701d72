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


def _regimes(judged: Sequence[JudgedRun]) -> dict[str, Coverage]:
    """The coverage of each framework, of all jobs with shared replicas, of all mixtures of experts, and of
    all jobs.
    """
    groups = {
        "several ranks to a replica": coverage_of(judged, lambda job: job.is_shared),
        "mixtures of experts": coverage_of(judged, lambda job: job.is_mixture),
        _ALL: coverage_of(judged),
    }
    return {
        **coverage_per_regime(judged),
        **{name: coverage for name, coverage in groups.items() if coverage is not None},
    }


def regime_lines(judged: Sequence[JudgedRun], runs: Sequence[ValidatedRun]) -> list[str]:
    """The first sections of docs/accuracy.md: errors by regime, coverage of the intervals, and what has no
    validated run."""
    return [
        "## By framework and number of nodes, as studied",
        "",
        "Most rows are of three sources, MosaicML's FSDP on A100, nanotron's sweep and vTrain's tables,",
        "so the mean over rows is mostly their error. Beside it stands the mean of the sources' own",
        "means: a job of yours is a new source. Rows of tables that are not in the checkout are in",
        "[recorded_errors.csv](../validation/published/recorded_errors.csv); runs of which a few first",
        "steps were timed, by their flags, are in none.",
        "",
        *regime_table(runs),
        "",
        *_coverage_lines(judged),
        *_ratio_lines(runs),
        *_unvalidated_lines(runs),
    ]


def _coverage_lines(judged: Sequence[JudgedRun]) -> list[str]:
    rows = [
        (
            title,
            f"{coverage.rows}",
            f"{coverage.sources}",
            f"{coverage.covered:.0%}",
            f"{coverage.covered_by_source:.0%}",
            f"{coverage.half_width:.1%}",
        )
        for title, coverage in _regimes(judged).items()
    ]
    return [
        "## How often the 80 % interval holds",
        "",
        "Every row is predicted as a stranger would and judged by the other sources only (one source left",
        "out). Over rows, and as the mean of sources; the half width is the median, as a part of the step.",
        "",
        *markdown(named_columns(*_REGIME, "within, rows", "within, sources", "half width"), rows),
        "",
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
        "Two runs of one source, model and GPU are off for the same reasons, so that their ratio is off by",
        "less than either. By what they differ: how far off 80 % of the ratios are, every source alike, and",
        "how many are within what the other sources say. Of differences below that, commands that compare",
        'say "no difference that zsim can tell".',
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
    """The README's lines: the mean error by framework, every source alike, and how often intervals hold."""
    overall, regimes = coverage_of(judged), coverage_per_regime(judged)
    if overall is None:
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
    studied = mean_of_sources(
        [abs(expm1(-row.run.error)) for row in judged], [row.run.source for row in judged]
    )
    error, held = overall.mean_absolute_error_by_source, overall.covered_by_source
    return [
        f"{overall.rows:,} published training runs of {overall.sources} sources were predicted from what",
        f"each publication says. The mean error of the step time is {error:.1%}, with equal weight for every",
        f"source; half of the runs are within {_median_error(judged):.1%}. With details found elsewhere",
        f"(container, flags, network) the mean is {studied:.1%}. The 80 % interval given with every answer",
        f"holds for {held:.0%}.",
        "",
        *markdown(named_columns("mean error (number of sources)", "one node", "several nodes"), rows),
    ]


def _format_source_error(coverage: Coverage | None) -> str:
    return "" if coverage is None else f"{coverage.mean_absolute_error_by_source:.1%} ({coverage.sources})"


def _median_error(judged: Sequence[JudgedRun]) -> float:
    return median(abs(expm1(-row.error)) for row in judged)
