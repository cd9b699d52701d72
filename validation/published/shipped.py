"""Writes the shipped files: the table of validated runs, and the estimates from it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence

from validation.published.ratio_errors import estimate_ratio_errors
from validation.published.spread_fit import estimate_spread
from zsim.validated.runs import (
    COLUMNS,
    FEATURE_COLUMNS,
    INPUT_COLUMNS,
    RUN_COLUMNS,
    SEPARATOR,
    SETTING_COLUMNS,
    ValidatedRun,
)
from zsim.validated.spread import SpreadEstimates

_NUMBERS = frozenset(("gradient_accumulation_steps", "network_gbps"))
_HEAD = """\
# Estimated from validated_runs.csv; rewritten with it by `python validation/published/accuracy.py`.

# The spread of errors as a stranger would make them (zsim/validated/spread.py), as logarithms: what any run
# costs, and what each further respect of a job adds.
"""
_EXTRAPOLATION = """
# What a respect adds in which no validated run of another source vouches for a job
# (zsim/validated/extrapolation.py); of what is counted, per doubling.
"""
_OPEN = """
# The spread of a step over the choices of a setting that is left open, which adds in squares
# (validation/published/open_settings.py).
"""
_SCORES = """
# The errors over spreads between which 80 % lie, of the sources that were predicted blind.
"""
_UNEXPLAINED = """
# The mean error of a regime's sources that is not explained, ln(measured / predicted).
"""
_SHARED = """
# As ratios, of pairs in which several ranks share a replica of the model.
"""
_RATIOS = """
# How far the logarithm of a ratio of two steps is off, for 80 % of pairs of runs of one source on one GPU
# that differ in one setting; what differs in several is at least as far off as each of them
# (zsim/validated/ratios.py).
"""


def shipped_texts(
    runs: Sequence[ValidatedRun], open_settings: Mapping[str, float] | None = None
) -> tuple[str, str]:
    """The texts of validated_runs.csv and validated_errors.toml."""
    estimates = estimate_spread(runs, open_settings=open_settings)
    compared = [run for run in runs if not run.is_blind]  # of the others not every setting is recorded
    ratios, shared = (estimate_ratio_errors(compared, is_shared=is_shared) for is_shared in (False, True))
    return format_validated_table(runs), "".join(
        [
            *_spread_texts(estimates),
            _RATIOS,
            _table("ratios", ratios),
            _SHARED,
            _table("shared_ratios", shared),
        ]
    )


def _spread_texts(estimates: SpreadEstimates) -> Iterator[str]:
    yield from (_HEAD, _table("spread", estimates.shares))
    yield from (_EXTRAPOLATION, _table("extrapolation", estimates.extrapolation))
    yield from (_OPEN, _table("open", estimates.open))
    yield from (_SCORES, _table("scores", {"low": estimates.low, "high": estimates.high}))
    yield from (_UNEXPLAINED, _table("unexplained", estimates.unexplained))


def _table(name: str, values: Mapping[str, float]) -> str:
    return "".join([f"[{name}]\n", *(f'"{key}" = {value:.4f}\n' for key, value in values.items())])


def format_validated_table(runs: Iterable[ValidatedRun]) -> str:
    """The table as CSV, with errors to five digits, finer than repeated runs differ. The spreads of inputs
    are columns where a run has any.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    rows = list(runs)
    inputs = INPUT_COLUMNS if any(run.input_fast != 1 or run.input_slow != 1 for run in rows) else ()
    writer.writerow([name for name in COLUMNS if name in inputs or name not in INPUT_COLUMNS])
    for run in rows:
        run_values = [getattr(run, name) for name in RUN_COLUMNS]
        feature_values = [_cell(getattr(run.features, name)) for name in FEATURE_COLUMNS]
        settings = [f"{getattr(run.settings, name):g}" if name in _NUMBERS else getattr(run.settings, name)
                    for name in SETTING_COLUMNS]  # fmt: skip
        errors = ["" if error is None else f"{error:.5f}" for error in (run.error, run.stranger_error)]
        ends = ["" if (end := getattr(run, name)) == 1 else f"{end:.5f}" for name in inputs]
        writer.writerow([*run_values, *feature_values, *settings, *errors, *ends])
    return text.getvalue()


def _cell(value: object) -> object:
    return SEPARATOR.join(value) if isinstance(value, tuple) else value
