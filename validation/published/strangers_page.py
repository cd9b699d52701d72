"""Errors on runs that nobody here has studied, in Markdown: the first tables of docs/accuracy.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import expm1
from statistics import fmean, median

from validation.published.coverage import Coverage, JudgedRun, coverage_of, mean_of_sources
from validation.published.sources import source_rules
from zsim.report.views.text.plain import markdown, named_columns
from zsim.validated.runs import ValidatedRun

NUM_CAUSES = 10
NUM_NAMES = 5  # of what was found out, in a line of the causes
_STUDIED = 6  # the column of errors as studied
Groups = Mapping[str, Callable[[ValidatedRun], bool] | None]
GROUPS: Groups = {
    "**all**": None,
    "dense": lambda run: not run.features.is_mixture,
    "mixtures of experts": lambda run: run.features.is_mixture,
    "one node": lambda run: not run.features.is_several,
    "several nodes": lambda run: run.features.is_several,
    "8 or 4 bits": lambda run: run.features.is_low_precision,
    "offloading": lambda run: run.features.is_offloaded,
}
_OF_BLIND: Groups = {
    "LoRA": lambda run: "LoRA" in run.settings.training,
    "one GPU and DDP": lambda run: run.features.framework == "DDP",
    "DeepSpeed": lambda run: run.features.framework == "DeepSpeed",
    "FSDP": lambda run: run.features.framework == "FSDP",
    "Megatron": lambda run: run.features.framework == "Megatron",
    "A100 and older": lambda run: run.features.chip in ("a100", "v100"),
    "H100, H200, H800": lambda run: run.features.chip in ("h100", "h200"),
    "B200, B300, GB200, GB300": lambda run: run.features.chip in ("b200", "b300", "gb200", "gb300"),
    "MI300X, MI325X, MI355X": lambda run: run.features.chip.startswith("mi"),
}


def strangers_lines(judged: Sequence[JudgedRun]) -> list[str]:
    """The sections: the errors of sources that were predicted blind and the intervals' coverage, and the
    errors of the others as a stranger beside those as studied, and where the largest of these come from."""
    blind, studied = ([row for row in judged if row.run.is_blind is flag] for flag in (True, False))
    overall = coverage_of(studied)
    if overall is None:
        return ["No run has been predicted as a stranger's yet (`python -m validation.published.strangers`)."]
    return [
        *_blind_lines(blind),
        "## Sources that zsim was developed with",
        "",
        "Every row is predicted twice: as a stranger would write it from its table, and *as studied*, with",
        "[what was found out](../validation/published/published_sources.toml) of its container, flags and",
        "network. Their causes were looked for, so these errors are smaller than those of blind predictions.",
        "",
        f"{overall.rows:,} rows, at most 30 of each of {overall.sources} sources; every source counts once.",
        "",
        *_group_lines(studied, GROUPS),
        "",
        *_unseen_lines(studied),
        f"## The {NUM_CAUSES} largest causes that remain",
        "",
        "The sources with the largest errors as a stranger, and what was found out of them that a stranger",
        "does not say.",
        "",
        *_cause_lines(studied),
        "",
    ]


def _unseen_lines(judged: Sequence[JudgedRun]) -> list[str]:
    """The error of the sources to which no number was fitted. Empty where there are no others, or none."""
    fitted = {row.run.source for row in judged if row.run.role == "calibrate"}
    unseen = [row for row in judged if row.run.source not in fitted]
    if not fitted or not unseen:
        return []
    sources = [row.run.source for row in unseen]
    mean = mean_of_sources([abs(expm1(-row.error)) for row in unseen], sources)
    return [
        f"To rows of {len(fitted)} of these sources numbers of zsim were fitted. Of the "
        f"{len(set(sources))} others",
        f"the mean is {mean:.1%}.",
        "",
    ]


def _blind_lines(judged: Sequence[JudgedRun]) -> list[str]:
    """The section on sources that were predicted blind. Empty without any."""
    if not judged:
        return []
    return [
        "## Sources predicted before anything was known of them",
        "",
        "**This is the error to expect of a job of yours**: the first predictions of "
        f"{len(judged)} measured steps",
        f"of {len({row.run.source for row in judged})} sources, as a careful user would write them "
        "(57 rows of 8 sources: those of 0.3.0).",
        "Nothing was fitted to them (`python -m validation.published.measured_experiments`).",
        "",
        "The 80 % interval of every answer is made from these errors; here each source is judged by",
        "intervals made from the others. Half width: the median, as a part of the step",
        "(`zsim/validated/spread.py`).",
        "",
        *_group_lines(judged, {**GROUPS, **_OF_BLIND}, is_studied=False),
        "",
    ]


def _group_lines(judged: Sequence[JudgedRun], groups: Groups, *, is_studied: bool = True) -> list[str]:
    """The errors and the coverage by group of jobs. Without `is_studied` nothing was found out of sources."""
    names = [
        "runs", "rows", "sources", "as a stranger, mean of sources", "median", "bias",
        "as studied, mean", "within the interval", "within, sources", "above it", "half width",
    ]  # fmt: skip
    columns = named_columns(*(name for name in names if is_studied or name != "as studied, mean"))
    cells = []
    for title, holds in groups.items():
        of_group = [row for row in judged if holds is None or holds(row.run)]
        coverage = coverage_of(of_group)
        if coverage is not None:
            row = _group_cells(title, coverage, of_group)
            cells.append(row if is_studied else (*row[:_STUDIED], *row[_STUDIED + 1 :]))
    return markdown(columns, cells)


def _group_cells(title: str, coverage: Coverage, judged: Sequence[JudgedRun]) -> tuple[str, ...]:
    sources = [row.run.source for row in judged]
    studied = mean_of_sources([abs(expm1(-row.run.error)) for row in judged], sources)
    return (
        title,
        f"{coverage.rows}",
        f"{coverage.sources}",
        f"{coverage.mean_absolute_error_by_source:.1%}",
        f"{median(abs(expm1(-row.error)) for row in judged):.1%}",
        f"{coverage.bias_by_source:+.1%}",
        f"{studied:.1%}",
        f"{coverage.covered:.0%}",
        f"{coverage.covered_by_source:.0%}",
        f"{coverage.above:.0%}",
        f"{coverage.half_width:.1%}",
    )


def _cause_lines(judged: Sequence[JudgedRun]) -> list[str]:
    by_source: dict[str, list[ValidatedRun]] = {}
    for row in judged:
        by_source.setdefault(row.run.source, []).append(row.run)
    errors = {
        source: fmean(abs(expm1(-run.error_for_others)) for run in own) for source, own in by_source.items()
    }
    cells = []
    for source in sorted(errors, key=lambda name: -errors[name])[:NUM_CAUSES]:
        own = by_source[source]
        cells.append(
            (
                source,
                f"{len(own)}",
                f"{errors[source]:.1%}",
                f"{fmean(expm1(-run.error_for_others) for run in own):+.1%}",
                f"{fmean(abs(expm1(-run.error)) for run in own):.1%}",
                _first_names(found_out(source)),
            )
        )
    columns = named_columns("source", "rows", "as a stranger", "bias", "as studied", "what was found out")
    return markdown(columns, cells)


def _first_names(names: Sequence[str]) -> str:
    """The first few of the names, and how many more there are."""
    if not names:
        return "nothing"
    hidden = len(names) - NUM_NAMES
    return ", ".join(names[:NUM_NAMES]) + (f" and {hidden} more" if hidden > 0 else "")


def found_out(source: str) -> list[str]:
    """The columns and keys that the rules on a source fill in or set, but for those without effect on the
    step."""
    names: list[str] = []
    for rule in source_rules():
        pattern = rule.when.get("source")
        if pattern is not None and re.search(pattern, source, re.IGNORECASE):
            names += [*rule.cells, *rule.changes]
    return [name for name in dict.fromkeys(names) if name not in ("network", "mem_kind")]
