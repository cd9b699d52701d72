"""Predict tables of steps of reinforcement learning, or of inference engines, and compare with what was
measured.

python -m validation.rl RUNS.csv ... [--json FILE]

A row that cannot be simulated is skipped with its reason. Exit code 2 says what is wrong with a table.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
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


@dataclass(frozen=True)
class PlacementPair:
    """Two steps on the same samples in two placements."""

    first: RowPrediction
    second: RowPrediction

    @property
    def is_same_gpus(self) -> bool:
        return self.first.gpus == self.second.gpus

    @property
    def is_right(self) -> bool:
        """Whether the placement that takes fewer GPU-seconds is the one that is predicted to."""
        ratios = [
            self.first.gpu_seconds(kind) / self.second.gpu_seconds(kind) for kind in ("measured", "predicted")
        ]
        return (ratios[0] > 1) == (ratios[1] > 1)


def placement_pairs(predictions: Sequence[RowPrediction]) -> list[PlacementPair]:
    """All pairs of steps that were measured and predicted, of which one or both sides are on as many GPUs or
    in the only row of their placement."""
    steps = [row for row in predictions if row.measured_seconds and row.predicted_seconds and row.gpus]
    sizes = Counter((row.batch, row.placement) for row in steps)
    return [
        PlacementPair(first, second)
        for first, second in combinations(steps, 2)
        if first.batch == second.batch and first.placement != second.placement
        if first.gpus == second.gpus or all(sizes[row.batch, row.placement] == 1 for row in (first, second))
    ]


def _placement_lines(predictions: Sequence[RowPrediction]) -> Iterator[str]:
    pairs = placement_pairs(predictions)
    for words, kind in (("on the same GPUs", True), ("per GPU, on other numbers of them", False)):
        chosen = [pair for pair in pairs if pair.is_same_gpus == kind]
        if chosen:
            right = sum(pair.is_right for pair in chosen)
            wrong = ", ".join(
                f"{pair.first.row_id} and {pair.second.row_id}" for pair in chosen if not pair.is_right
            )
            known = [pair.is_right for pair in chosen if not pair.first.doubt + pair.second.doubt]
            yield (
                f"Faster placement {words}: right in {right} of {len(chosen)} pairs, in {sum(known)} of the "
                f"{len(known)} with published lengths" + (f", wrong in {wrong}" if wrong else "")
            )


def _pairs(prediction: RowPrediction) -> Iterator[tuple[str, float, float]]:
    """What was measured and predicted: its name, and both numbers. Times between tokens, seconds,
    tokens/s, GiB."""
    if prediction.measured_seconds and prediction.predicted_seconds:
        yield "step", prediction.measured_seconds, prediction.predicted_seconds
    for name, seconds in prediction.measured_phases.items():
        if seconds and prediction.predicted_phases.get(name):
            yield name, seconds, prediction.predicted_phases[name]
    if prediction.measured_tokens_per_second and prediction.predicted_tokens_per_second:
        yield "tokens/s", prediction.measured_tokens_per_second, prediction.predicted_tokens_per_second
    if prediction.measured_itl_seconds and prediction.predicted_itl_seconds:
        yield "time per token", prediction.measured_itl_seconds, prediction.predicted_itl_seconds
    if prediction.measured_peak_bytes and prediction.predicted_peak_bytes:
        yield "peak GiB", prediction.measured_peak_bytes / 2**30, prediction.predicted_peak_bytes / 2**30


def _lines(predictions: Sequence[RowPrediction]) -> Iterator[str]:
    rows = []
    errors: dict[tuple[str, str, str], list[float]] = {}
    covered: Counter[tuple[str, str, str]] = Counter()
    for prediction in predictions:
        pairs = list(_pairs(prediction))
        text = ", ".join(
            f"{name} {predicted:,.4g} ({measured:,.4g}, {100 * (predicted / measured - 1):+.0f} %)"
            for name, measured, predicted in pairs
        )
        words = prediction.reason or text or "predicted"
        rows.append([prediction.row_id, prediction.role, "; ".join(filter(None, (words, prediction.doubt)))])
        for name, measured, predicted in pairs:
            group = prediction.source, prediction.role, name
            errors.setdefault(group, []).append(log(predicted / measured))
            interval = prediction.range_of(name)
            covered[group] += interval is not None and interval[0] <= measured <= interval[1]
    yield from table(named_columns("Row", "role", "predicted (measured, error)"), rows)
    yield ""
    summary = [
        [
            source, role, name, str(len(logs)),
            f"{100 * (exp(sum(logs) / len(logs)) - 1):+.1f} %",
            f"{100 * sum(abs(exp(value) - 1) for value in logs) / len(logs):.1f} %",
            str(covered[source, role, name] or ""),
        ]
        for (source, role, name), logs in errors.items()
    ]  # fmt: skip
    yield from table(
        named_columns("Source", "role", "what", "rows", "bias", "mean error", "in range"), summary
    )
    yield from _placement_lines(predictions)


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
