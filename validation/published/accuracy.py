"""Writes docs/accuracy.md: zsim's errors on published runs, by source, and the worst rows with their causes.

python validation/published/accuracy.py [TABLE.csv]...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from zsim.study.published import CheckResult, RowResult, check_runs, shipped_tables
from zsim.study.published_print import markdown_lines
from zsim.version import __version__

TARGET = Path(__file__).resolve().parents[2] / "docs" / "accuracy.md"
NUM_WORST = 12
ROLES = {
    "calibrate": "Rows of role calibrate (fitted: mosaic-2024-01 and torchtitan-pr135)",
    "report": "Rows of role report (no constant is fitted to them)",
    "": "Rows without a role",
}

# What is known about the large errors, by the beginning of the row's name; the first that fits is printed.
CAUSES = (
    (
        "mosaic-2022-12",
        "unknown configuration: torch 1.12's kernels, an unpublished `min_params`, memory filled by "
        "automatic micro-batches",
    ),
    ("mosaic-2023-02", "unknown configuration: composer's and torch 1.13's kernels; memory nearly full"),
    ("mosaic", "memory nearly full (automatic micro-batch): allocator retries that no column states"),
    (
        "azure-zero3",
        "cost: communication of DeepSpeed 0.6 on 2022's network reaches less of its nominal rate",
    ),
    ("zeropp", "cost: 2023's network at 100 to 800 Gb/s per node reaches less of its nominal rate"),
    ("azure-qwen", "cost: eager transformers' host time, and optimizer states whose type is not published"),
    ("fms-acceleration", "memory nearly full: flagged as such by the source"),
    ("litgpt", "schedule: gradient accumulation under DDP as lightning runs it"),
    ("stas00-h200-torchver", "software: torch 2.10 to 2.13 and CUDA 12.9 or 13.0 on one machine, 16 % apart"),
    ("ds-tutorial", "memory nearly full, kernels of 2020; the CPU's update no longer overlaps with its copy"),
    ("stas00", "unknown configuration: which of two kernel libraries the total refers to"),
)


def main(paths: Sequence[str]) -> None:
    result = check_runs([Path(path) for path in paths] or shipped_tables())
    lines = [
        "# Accuracy",
        "",
        f"Errors of zsim {__version__} on training runs that others measured and published: predicted over",
        "measured step time, less one; memory against torch's own peak. Rewrite this page with",
        "`python validation/published/accuracy.py`. What the rows are, and their caveats:",
        "[validation/published/README.md](../validation/published/README.md).",
        "",
        "Mean, median and worst are of absolute errors, bias is the mean signed one.",
        "",
    ]
    for role, title in ROLES.items():
        rows = tuple(row for row in result.rows if row.role == role)
        if rows:
            lines += [f"## {title}", "", *markdown_lines(CheckResult(rows, ())), ""]
    lines += _by_tier(result) + _worst(result)
    TARGET.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {TARGET}")


def _by_tier(result: CheckResult) -> list[str]:
    """Report rows by how complete their configuration is."""
    lines = ["## Unfitted rows by how much of the configuration is known", ""]
    for tier, meaning in (("A", "complete"), ("B", "with assumptions"), ("C", "incomplete")):
        rows = [row for row in result.rows if row.role == "report" and row.tier == tier]
        errors = [row.relative_error for row in rows if row.relative_error is not None]
        if errors:
            within = sum(abs(error) <= 0.1 for error in errors) / len(errors)
            mean = sum(map(abs, errors)) / len(errors)
            bias = sum(errors) / len(errors)
            lines.append(
                f"- tier {tier} ({meaning}): {len(errors)} rows, mean {mean:.1%}, bias {bias:+.1%}, "
                f"{within:.0%} within 10 %"
            )
    return [*lines, ""]


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
        if shown.get(row.source, 0) < 2 and abs(row.relative_error or 0.0) > 0.1:
            shown[row.source] = shown.get(row.source, 0) + 1
            lines.append(_worst_line(row))
        if sum(shown.values()) == 2 * NUM_WORST:
            break
    return lines


def _worst_line(row: RowResult) -> str:
    cause = next((text for prefix, text in CAUSES if row.row_id.startswith(prefix)), "not yet explained")
    assert row.relative_error is not None
    return (
        f"| {row.row_id} | {row.measured_seconds:.4g} s | {row.predicted_seconds:.4g} s | "
        f"{row.relative_error:+.1%} | {cause} |"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
