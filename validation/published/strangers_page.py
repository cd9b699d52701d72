"""Errors on runs that nobody here has studied, in Markdown: the first tables of docs/accuracy.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import expm1
from statistics import fmean, median

from validation.published.coverage import Coverage, JudgedRun, coverage_of, mean_of_sources
from validation.published.sources import source_rules
from zsim.report.views.text.plain import markdown, named_columns
from zsim.validated.features import Features
from zsim.validated.runs import ValidatedRun

NUM_CAUSES = 10
NUM_NAMES = 5  # of what was found out, in a line of the causes
_STUDIED = 6  # the column of errors as studied
GROUPS: Mapping[str, Callable[[Features], bool] | None] = {
    "**all**": None,
    "dense": lambda job: not job.is_mixture,
    "mixtures of experts": lambda job: job.is_mixture,
    "one node": lambda job: not job.is_several,
    "several nodes": lambda job: job.is_several,
    "8 or 4 bits": lambda job: job.is_low_precision,
    "offloading": lambda job: job.is_offloaded,
}


def strangers_lines(judged: Sequence[JudgedRun], experiments: Sequence[JudgedRun] = ()) -> list[str]:
    """The sections: the errors as a stranger beside those as studied, the intervals' coverage, the same of
    measured experiments from which no interval is made, and where the largest errors come from."""
    overall = coverage_of(judged)
    if overall is None:
        return ["No run has been predicted as a stranger's yet (`python -m validation.published.strangers`)."]
    return [
        "## As a stranger, and as studied",
        "",
        "What was found out of a source (its container, its flags, its network) stands in",
        "[published_sources.toml](../validation/published/published_sources.toml). A job of yours is of a",
        "source that nobody here has studied. So every row is predicted twice: as a stranger would write it",
        "from what its table says, and with what was found out. **The first is the error to expect.**",
        "",
        f"{overall.rows:,} rows, at most 30 of each of {overall.sources} sources; every source counts once.",
        "",
        *_group_lines(judged),
        "",
        *_unseen_lines(judged),
        "The interval of 80 % beside every answer is made of errors as a stranger; every row is judged by",
        "intervals made of the other sources alone. Half of its width is the median, as a part of the step.",
        "How it is made, and what it assumes: `zsim/validated/spread.py`.",
        "",
        *_experiment_lines(experiments),
        f"## The {NUM_CAUSES} largest causes that remain",
        "",
        "The sources with the largest errors as a stranger, and what was found out of them that a stranger",
        "does not say. Causes by row: [errors of published runs](../validation/published/errors.md).",
        "",
        *_cause_lines(judged),
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
        f"the mean is {mean:.1%}; intervals are made of rows to which nothing was fitted.",
        "",
    ]


def _experiment_lines(judged: Sequence[JudgedRun]) -> list[str]:
    """The section on measured experiments. Empty without any."""
    if not judged:
        return []
    return [
        "## Runs as experiments that a careful user would write",
        "",
        f"{len(judged)} measured steps of {len({row.run.source for row in judged})} further sources, written",
        "as experiment files without any rule on their source. No number of zsim is made of them, though how",
        "often they lie within was in view when the form of the interval was chosen",
        "(`python -m validation.published.measured_experiments`).",
        "",
        *_group_lines(judged, is_studied=False),
        "",
    ]


def _group_lines(judged: Sequence[JudgedRun], *, is_studied: bool = True) -> list[str]:
    """The errors and the coverage by group of jobs. Without `is_studied` nothing was found out of sources."""
    names = [
        "runs", "rows", "sources", "as a stranger, mean of sources", "median", "bias",
        "as studied, mean", "within the interval", "above it", "half width",
    ]  # fmt: skip
    columns = named_columns(*(name for name in names if is_studied or name != "as studied, mean"))
    cells = []
    for title, holds in GROUPS.items():
        coverage = coverage_of(judged, holds)
        if coverage is not None:
            of_group = [row for row in judged if holds is None or holds(row.run.features)]
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
