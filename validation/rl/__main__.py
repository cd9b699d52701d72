"""Predict tables of steps of reinforcement learning, or of inference engines, and compare with what was
measured.

python -m validation.rl RUNS.csv ... [--json FILE]

A row that cannot be simulated is skipped with its reason. Exit code 2 says what is wrong with a table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from math import exp, log
from pathlib import Path
from typing import Any

from validation.rl.predict import RowPrediction, predict_rows
from validation.rl.table import read_rows
from zsim.commands.options import answer
from zsim.errors import ZsimError
from zsim.report.views.text.plain import named_columns, table


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        predictions = list(predict_rows(read_rows(options.tables)))
    except ZsimError as error:
        print(f"validation.rl: {error}", file=sys.stderr)
        return 2
    answer(_lines(predictions), lambda: _to_dict(predictions), options.json)
    return 0


def _to_dict(predictions: Sequence[RowPrediction]) -> dict[str, Any]:
    return {"rows": [prediction.to_dict() for prediction in predictions]}


def _pairs(prediction: RowPrediction) -> Iterator[tuple[str, float, float]]:
    """What was measured and predicted: its name, and both numbers. Times between tokens, seconds,
    tokens/s."""
    if prediction.measured_seconds and prediction.predicted_seconds:
        yield "step", prediction.measured_seconds, prediction.predicted_seconds
    for name, seconds in prediction.measured_phases.items():
        if seconds and prediction.predicted_phases.get(name):
            yield name, seconds, prediction.predicted_phases[name]
    if prediction.measured_tokens_per_second and prediction.predicted_tokens_per_second:
        yield "tokens/s", prediction.measured_tokens_per_second, prediction.predicted_tokens_per_second
    if prediction.measured_itl_seconds and prediction.predicted_itl_seconds:
        yield "time per token", prediction.measured_itl_seconds, prediction.predicted_itl_seconds


def _lines(predictions: Sequence[RowPrediction]) -> Iterator[str]:
    rows = []
    errors: dict[tuple[str, str, str], list[float]] = {}
    for prediction in predictions:
        pairs = list(_pairs(prediction))
        text = ", ".join(
            f"{name} {predicted:,.4g} ({measured:,.4g}, {100 * (predicted / measured - 1):+.0f} %)"
            for name, measured, predicted in pairs
        )
        rows.append([prediction.row_id, prediction.role, prediction.reason or text or "predicted"])
        for name, measured, predicted in pairs:
            errors.setdefault((prediction.source, prediction.role, name), []).append(
                log(predicted / measured)
            )
    yield from table(named_columns("Row", "role", "predicted (measured, error)"), rows)
    yield ""
    summary = [
        [
            source, role, name, str(len(logs)),
            f"{100 * (exp(sum(logs) / len(logs)) - 1):+.1f} %",
            f"{100 * sum(abs(exp(value) - 1) for value in logs) / len(logs):.1f} %",
        ]
        for (source, role, name), logs in errors.items()
    ]  # fmt: skip
    yield from table(named_columns("Source", "role", "what", "rows", "bias", "mean error"), summary)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m validation.rl",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tables", nargs="+", type=Path, metavar="RUNS.csv")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every row as JSON; - for standard output"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
