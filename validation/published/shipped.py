"""Writes the shipped files: the table of validated runs, and the estimates from it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from validation.published.ratio_errors import estimate_ratio_errors
from validation.published.widening import estimate_widening
from zsim.validated.runs import COLUMNS, FEATURE_COLUMNS, RUN_COLUMNS, SETTING_COLUMNS, ValidatedRun

_NUMBERS = frozenset(("gradient_accumulation_steps", "network_gbps"))
_HEAD = """\
# Estimated from validated_runs.csv; rewritten with it by `python validation/published/accuracy.py`.

# How many times as far from the prediction the ends of an interval are where no validated run vouches for
# a job in a respect (zsim/validated/extrapolation.py); of what is counted, per doubling.
"""
_SHARED = """
# As ratios, of pairs in which several ranks share a replica of the model.
"""
_RATIOS = """
# How far the logarithm of a ratio of two steps is off, for 80 % of pairs of runs of one source on one GPU
# that differ in one setting; what differs in several is at least as far off as each of them
# (zsim/validated/ratios.py).
"""


def shipped_texts(runs: Sequence[ValidatedRun]) -> tuple[str, str]:
    """The texts of validated_runs.csv and validated_errors.toml."""
    return format_validated_table(runs), _HEAD + _table(
        "widening", estimate_widening(runs)
    ) + _RATIOS + _table("ratios", estimate_ratio_errors(runs, is_shared=False)) + _SHARED + _table(
        "shared_ratios", estimate_ratio_errors(runs, is_shared=True)
    )


def _table(name: str, values: dict[str, float]) -> str:
    return "".join([f"[{name}]\n", *(f'"{key}" = {value:.4f}\n' for key, value in values.items())])


def format_validated_table(runs: Iterable[ValidatedRun]) -> str:
    """The table as CSV, with errors to five digits, finer than repeated runs differ."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for run in runs:
        run_values = [getattr(run, name) for name in RUN_COLUMNS]
        feature_values = [getattr(run.features, name) for name in FEATURE_COLUMNS]
        settings = [f"{getattr(run.settings, name):g}" if name in _NUMBERS else getattr(run.settings, name)
                    for name in SETTING_COLUMNS]  # fmt: skip
        writer.writerow([*run_values, *feature_values, *settings, f"{run.error:.5f}"])
    return text.getvalue()
