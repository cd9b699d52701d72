"""Writes zsim's errors on published runs: the table of validated runs that ships with zsim and the estimates
from it, docs/accuracy.md, errors.md with every source and the worst rows and their causes, the lines in
README.md, and the limits in validation/baseline.json that `zsim check` enforces from then on.

python validation/published/accuracy.py            # predicts all rows of the checkout first
python validation/published/accuracy.py --ranges   # only what strangers.csv and open_settings.csv tell: the
                                                   # ranges, and the tables of both pages but for memory
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from validation.kernels.__main__ import section as kernel_section
from validation.published.check import check_published
from validation.published.coverage import JudgedRun, leave_one_source_out
from validation.published.frameworks import framework_lines
from validation.published.measured_experiments import recorded_experiments
from validation.published.open_settings import open_spreads, read_steps
from validation.published.predict import shipped_tables
from validation.published.recorded import merge_runs, recorded_runs
from validation.published.regimes import accuracy_lines, regime_lines
from validation.published.shipped import format_validated_table, shipped_texts
from validation.published.strangers import join_strangers, strangers_runs
from validation.published.strangers_page import strangers_lines
from validation.published.table import read_runs
from validation.published.validation_rows import validated_runs_of
from zsim.report.views.text.plain import markdown, named_columns
from zsim.study.check.baseline import Baseline, read_baseline
from zsim.study.measured.error_summary import (
    error_summaries,
    format_error,
    overall_error_summary,
    summary_cells,
    table_lines,
)
from zsim.study.measured.prediction import CheckResult, RowResult, error_figures, summarise
from zsim.validated.runs import ESTIMATES, TABLE, ValidatedRun, read_validated
from zsim.version import __version__

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs" / "accuracy.md"
ERRORS = Path(__file__).parent / "errors.md"
README = ROOT / "README.md"
BASELINE = ROOT / "validation" / "baseline.json"
BLOCK = re.compile(r"(<!-- published runs.*?-->\n).*?(<!-- end of published runs -->)", re.DOTALL)
BEGIN = "<!-- published runs: python validation/published/accuracy.py writes this -->"
END = "<!-- end of published runs -->"
NUM_WORST = 12
MANY = 256  # GPUs, in one line of the table
LARGE = 0.10  # errors above this need a cause
ROLES = {
    "calibrate": (
        "Rows of role calibrate (fitted: mosaic-2024-01, torchtitan-pr135, fms-acceleration, litgpt-thunder; "
        "of vtrain-single, megatron-ci and nanotron-sweep what the host pays for a layer; of vtrain-single "
        "products; of simumax-b200 products and the host; of stas00-h200-b200 the CPU's rate, attention and "
        "products)"
    ),
    "report": "Rows of role report (no constant is fitted to them)",
    "": "Rows without a role",
}
KINDS = ("schedule", "cost", "unknown configuration", "memory nearly full", "not yet explained")

# Where torch's allocator is predicted to run short, the step depends on how often it does, for which 1 % of
# the memory can decide, and on the cost of each time, which grows with the ranks and is fitted to few rows.
RUNS_SHORT = "memory nearly full: torch's allocator is predicted to run short {times} a micro-batch"

# Known causes of large errors, by prefix of the row's name; the first match is printed. A cause begins with
# its kind: an error of the schedule, an error of a cost, or an unknown configuration of the row.
CAUSES = (
    (
        "mosaic-2022-12-04",
        "not yet explained: single runs, 15 to 30 % slower than those with half and twice their batch",
    ),
    ("mosaic-2022-12", "unknown configuration: composer's and torch 1.12's kernels"),
    ("mosaic-2023-02", "unknown configuration: composer's and torch 1.13's kernels; memory nearly full"),
    ("mosaic", "memory nearly full (automatic micro-batch): allocator retries that no column states"),
    (
        "azure-zero3",
        "not yet explained: with nothing hidden these rows are off by 9 %, see validation/published",
    ),
    (
        "zeropp",
        "not yet explained: with nothing hidden these rows are off by 13 %, see validation/published",
    ),
    ("azure-qwen", "cost: eager transformers' host time, and optimizer states whose type is not published"),
    (
        "nanotron-sweep",
        "not yet explained: single runs take 2 to 6 times as long; some pipelines wait 0.1 s for every send",
    ),
    ("vtrain-single", "not yet explained: 16 matrices of scores in a layer, or eight tensor ranks, are slow"),
    ("internevo-a800-0006", "cost: broadcasts from every owner over hundreds of ranks, one by one"),
    ("internevo-a800-0008", "cost: broadcasts from every owner over a thousand ranks, one by one"),
    ("internevo", "unknown configuration: kernels and network of a cluster that is called A100 and A800"),
    ("nanotron", "unknown configuration: a busy network, of which only medians over days are known"),
    (
        "dlperf-deepspeed",
        "unknown configuration: kernels of torch 1.6; its network gets half its nominal rate",
    ),
    ("dlperf", "cost: V100 SXM2 at 300 W; dropout behind the fused softmax is not a kernel of its own"),
    ("bigscience-v100-1b3", "cost: V100 SXM2 at 300 W, fitted to a DGX-2"),
    ("bigscience-v100", "unknown configuration: a network that gave a fifth of its nominal rate and less"),
    ("megatron-sc21", "unknown configuration: DeepSpeed's release and settings; reductions may wait as well"),
    ("megatron-ci-0012", "unknown configuration: steps of 0.17 to 0.83 s in one run"),
    ("megatron-ci-0016", "unknown configuration: steps of 0.18 to 1.73 s in one run"),
    ("megatron-ci", "cost: the host, of tests with 12 small layers"),
    ("mlperf", "cost: fp8, whose weights Transformer Engine casts once and not in every product"),
    ("dgxc-megatron", "cost: fp8, whose weights Transformer Engine casts once and not in every product"),
    (
        "fms-acceleration-0002",
        "cost: eager transformers' host time under FSDP, of a model of 1.1B on two GPUs",
    ),
    ("fms-acceleration-0006", "cost: eager transformers' host time under FSDP, of 1.1B on two GPUs"),
    ("fms-acceleration", "memory nearly full: flagged as such by the source"),
    ("litgpt", "schedule: gradient accumulation under DDP as lightning runs it"),
    (
        "stas00-h200-torchver",
        "unknown configuration: torch 2.10 to 2.13 and CUDA 12.9 or 13.0 on one machine, 16 % apart",
    ),
    ("ds-tutorial", "memory nearly full, kernels of 2020; the CPU's update no longer overlaps with its copy"),
    ("stas00", "unknown configuration: which of two kernel libraries the total refers to"),
)


def main() -> None:
    if "--ranges" in sys.argv[1:]:
        write_ranges()
        return
    baseline = read_baseline(BASELINE) if BASELINE.exists() else Baseline(BASELINE)
    result = check_published(shipped_tables(), baseline=baseline, update=True).measured
    baseline.write()
    runs = write_validated(result)
    judged = leave_one_source_out(runs, tomllib.loads(ESTIMATES.read_text(encoding="utf-8"))["open"])
    by_gpus = errors_by_gpus(result)
    for path, lines in ((TARGET, page(result, judged, runs)), (ERRORS, errors_page(result, by_gpus))):
        path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    block = "\n".join(accuracy_lines(judged))
    text = README.read_text(encoding="utf-8")
    README.write_text(BLOCK.sub(lambda match: match[1] + block + "\n" + match[2], text), encoding="utf-8")
    print(f"wrote {TARGET}, {ERRORS}, {README}, {BASELINE}, {TABLE}, {ESTIMATES}")


def write_ranges() -> None:
    """Rewrite the shipped table's errors as a stranger and the estimates from them, and the tables of both
    pages that they are in. No row is predicted."""
    studied = [replace(run, stranger_error=None) for run in read_validated(TABLE.read_text(encoding="utf-8"))]
    strangers = strangers_runs()
    known = {run.row_id for run in read_runs(shipped_tables()).runs}
    known |= {run.row_id for run in recorded_runs()}
    kept = [run for run in studied if run.row_id in known]
    runs = _read_back([*join_strangers(kept, strangers), *recorded_experiments()])
    opened = open_spreads(read_steps())
    for path, text in zip((TABLE, ESTIMATES), shipped_texts(runs, opened), strict=True):
        path.write_text(text, encoding="utf-8")
    judged = leave_one_source_out(runs, opened)
    pages = ((TARGET, _judged_lines(judged, runs)), (README, accuracy_lines(judged)))
    for path, lines in pages:
        text = path.read_text(encoding="utf-8")
        block = "\n".join(lines)
        path.write_text(BLOCK.sub(lambda match: match[1] + block + "\n" + match[2], text), encoding="utf-8")  # noqa: B023
    print(f"wrote {TABLE}, {ESTIMATES}, {TARGET}, {README}")


def _judged_lines(judged: Sequence[JudgedRun], runs: Sequence[ValidatedRun]) -> list[str]:
    """The tables of docs/accuracy.md that need no prediction: errors blind and as a stranger, by regime, and
    ranges."""
    return [*strangers_lines(judged), *regime_lines([run for run in runs if not run.is_blind])]


def _read_back(runs: Sequence[ValidatedRun]) -> tuple[ValidatedRun, ...]:
    """The runs as the shipped table has them, with errors to five digits."""
    return read_validated(format_validated_table(runs))


def write_validated(result: CheckResult) -> tuple[ValidatedRun, ...]:
    """Write the table of validated runs, the recorded ones included, and the estimates derived from it;
    returns the runs, read back."""
    found = validated_runs_of(read_runs(shipped_tables()).runs, result.rows)
    joined = join_strangers(merge_runs(found, recorded_runs()), strangers_runs())
    runs = _read_back([*joined, *recorded_experiments()])
    texts = shipped_texts(runs, open_spreads(read_steps()))
    for path, text in zip((TABLE, ESTIMATES), texts, strict=True):
        path.write_text(text, encoding="utf-8")
    return runs


def page(result: CheckResult, judged: Sequence[JudgedRun], runs: Sequence[ValidatedRun]) -> list[str]:
    """docs/accuracy.md: the errors that a user meets."""
    return [
        "# Accuracy",
        "",
        f"Errors of zsim {__version__} on training runs that others measured and published: predicted over",
        "measured step time, less one; memory likewise. Mean, median and worst are of absolute errors, bias",
        "is the mean signed one. [By source, with causes](../validation/published/errors.md); [the",
        "runs](../validation/published/README.md). `python validation/published/accuracy.py` writes them.",
        "",
        BEGIN,
        *_judged_lines(judged, runs),
        END,
        "",
        *_by_memory_figure(result),
        *kernel_section(),
    ]


def errors_page(result: CheckResult, by_gpus: Mapping[int, Sequence[float]]) -> list[str]:
    """errors.md: the rows of the checkout as studied, by source, and the worst with their causes."""
    lines = [
        "# Errors of published runs, as studied",
        "",
        "The rows of the checkout, predicted with what was found out of their sources.",
        "[Accuracy](../../docs/accuracy.md) has the errors to expect of a source that nobody has studied.",
        "",
        *framework_lines(result.rows),
        "## By source",
        "",
        *table_lines(error_summaries(result.rows), overall_error_summary(result.rows)),
        "",
    ]
    for role, title in ROLES.items():
        rows = tuple(row for row in result.rows if row.role == role)
        if rows:
            lines += [f"## {title}", "", *markdown_lines(CheckResult(rows, ())), ""]
    return lines + _by_tier(result) + _by_gpus(by_gpus) + _by_cause(result) + _worst(result)


def markdown_lines(result: CheckResult) -> list[str]:
    """The errors by source and role as a Markdown table."""
    summary = result.to_dict()["summary"]
    columns = named_columns(
        "source", "rows", "skipped", "mean", "median", "worst", "bias", "memory rows", "memory mean",
        "fits right",
    )  # fmt: skip
    rows = []
    for name, figures in (*summary["by_source"].items(), ("**all**", summary)):
        if not figures["simulated"]:
            continue
        memory, fits = figures["memory"], figures["fits"]
        right = f"{fits['right']} of {fits['rows']}" if fits["rows"] else ""
        mean = format_error(memory["mean_absolute_error"])
        rows.append([*summary_cells(name, figures), f"{memory['rows']}", mean, right])
    return markdown(columns, rows)


def cause_of(row: RowResult) -> str:
    """The known cause of a large error of this row."""
    if row.predicted_retries:
        kind = ".0f" if row.predicted_retries >= 10 else ".2g"
        return RUNS_SHORT.format(times=f"{row.predicted_retries:{kind}} times")
    return next((text for prefix, text in CAUSES if row.row_id.startswith(prefix)), KINDS[-1])


def kinds_of_large_errors(result: CheckResult) -> Counter[str]:
    """The number of rows off by more than `LARGE`, by kind of cause."""
    large = [row for row in result.rows if abs(row.relative_error or 0.0) > LARGE]
    return Counter(next(kind for kind in KINDS if cause_of(row).startswith(kind)) for row in large)


def _by_cause(result: CheckResult) -> list[str]:
    kinds = kinds_of_large_errors(result)
    lines = [f"## Rows off by more than {LARGE:.0%}, by likely cause", "", "| cause | rows |", "|---|---:|"]
    return [*lines, *(f"| {kind} | {kinds[kind]} |" for kind in KINDS if kinds[kind]), ""]


def _by_memory_figure(result: CheckResult) -> list[str]:
    """A table of every memory figure that the rows publish; other tables have one per row, the first of
    these."""
    lines = [
        "## Memory, by which figure was published",
        "",
        "What torch has allocated, active (what `record_stream` protects as well) and reserved at most, and",
        "what nvidia-smi reads. A row may publish several. No number is fitted to rows of role report.",
        "",
        "| figure | rows | mean | worst | bias | of role report | mean | bias |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    unseen = [row for row in result.rows if row.role == "report"]
    every, reported = (summarise(rows)["memory_by_kind"] for rows in (result.rows, unseen))
    for kind in ("allocated", "active", "reserved", "device"):
        if kind not in every:
            continue
        figures, more = every[kind], "0 | | "
        if kind in reported:
            own = reported[kind]
            more = f"{own['rows']} | {own['mean_absolute_error']:.1%} | {own['bias']:+.1%}"
        lines.append(
            f"| {kind} | {figures['rows']} | {figures['mean_absolute_error']:.1%} | "
            f"{figures['worst_absolute_error']:.1%} | {figures['bias']:+.1%} | {more} |"
        )
    return [*lines, ""]


def _by_tier(result: CheckResult) -> list[str]:
    """Errors of report rows by the completeness of their configuration."""
    lines = ["## Unfitted rows by how much of the configuration is known", ""]
    for tier, meaning in (("A", "complete"), ("B", "with assumptions"), ("C", "incomplete")):
        rows = [row for row in result.rows if row.role == "report" and row.tier == tier]
        errors = [row.relative_error for row in rows if row.relative_error is not None]
        if errors:
            lines.append(f"- tier {tier} ({meaning}): {len(errors)} rows, {_in_words(errors)}")
    return [*lines, *_without_full(result), ""]


def _without_full(result: CheckResult) -> list[str]:
    """Errors of the rows whose memory is predicted to run short, and of the others."""
    rows = [row for row in result.rows if row.role == "report" and row.relative_error is not None]
    short = [row.relative_error or 0.0 for row in rows if row.predicted_retries]
    others = [row.relative_error or 0.0 for row in rows if not row.predicted_retries]
    if not short or not others:
        return []
    return [
        f"- where torch's allocator is predicted to run short: {len(short)} rows, {_in_words(short)}; "
        f"elsewhere {len(others)}: {_in_words(others)}"
    ]


def errors_by_gpus(result: CheckResult) -> dict[int, list[float]]:
    """Errors of FSDP's report rows whose memory suffices, by number of GPUs: an indication for large jobs."""
    runs = {run.row_id: run for run in read_runs(shipped_tables()).runs}
    by_gpus: dict[int, list[float]] = {}
    for row in result.rows:
        run = runs[row.row_id]
        counts = row.role == "report" and "FSDP" in run.text("strategy") and not row.predicted_retries
        if counts and row.relative_error is not None:
            by_gpus.setdefault(run.count("n_gpus") or 1, []).append(row.relative_error)
    return by_gpus


def _by_gpus(by_gpus: Mapping[int, Sequence[float]]) -> list[str]:
    lines = [
        "## Unfitted FSDP rows by number of GPUs, where torch's allocator is not predicted to run short",
        "",
        "| GPUs | rows | mean | median | bias |",
        "|---|---:|---:|---:|---:|",
    ]
    rows: dict[int, list[float]] = {}
    for gpus, errors in by_gpus.items():
        rows.setdefault(min(gpus, MANY), []).extend(errors)
    for gpus, errors in sorted(rows.items()):
        figures = error_figures(errors)
        label = f"{gpus} and more" if gpus == MANY else str(gpus)
        lines.append(
            f"| {label} | {len(errors)} | {figures['mean_absolute_error']:.1%} | "
            f"{figures['median_absolute_error']:.1%} | {figures['bias']:+.1%} |"
        )
    return [
        *lines,
        "",
        "The lines mix models and releases; on 32 GPUs six runs of 125M of December 2022 are 15 to 30 %",
        "slower than those with half and twice their batch ([caveats](README.md)).",
        "",
    ]


def _in_words(errors: Sequence[float]) -> str:
    figures = error_figures(errors)
    return (
        f"mean {figures['mean_absolute_error']:.1%}, bias {figures['bias']:+.1%}, "
        f"{figures['within_10_percent_fraction']:.0%} within 10 %"
    )


def _worst(result: CheckResult) -> list[str]:
    rows = [row for row in result.rows if row.relative_error is not None]
    rows.sort(key=lambda row: -abs(row.relative_error or 0.0))
    lines = [
        "## Worst rows of each source",
        "",
        "| row | measured | predicted | error | likely cause |",
        "|---|---:|---:|---:|---|",
    ]
    shown: dict[str, int] = {}
    for row in rows:
        if shown.get(row.source, 0) < 2 and abs(row.relative_error or 0.0) > LARGE:
            shown[row.source] = shown.get(row.source, 0) + 1
            lines.append(_worst_line(row))
        if sum(shown.values()) == 2 * NUM_WORST:
            break
    return lines


def _worst_line(row: RowResult) -> str:
    cause = cause_of(row)
    assert row.relative_error is not None
    return (
        f"| {row.row_id} | {row.measured_seconds:.4g} s | {row.predicted_seconds:.4g} s | "
        f"{row.relative_error:+.1%} | {cause} |"
    )


if __name__ == "__main__":
    main()
