"""Errors of published runs of hybrid, sparse and multimodal models by precision, with the goals beside them.

    python -m validation.published.recent_models RUNS.csv...

predicts the rows of role report, but those of dense decoders, and writes RECENT_MODELS.md: means over models,
so that one with many rows counts once, what recent_models_remaining.md says of them, and every row's error.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from validation.published.predict import predict_row
from validation.published.table import PublishedRun, read_runs
from zsim.report.views.text.plain import markdown, named_columns
from zsim.study.measured.prediction import RowResult

PAGE = Path(__file__).parent / "RECENT_MODELS.md"
_REMAINING = Path(__file__).parent / "recent_models_remaining.md"
GOALS = {"16 bits": 0.08, "fp8 and 4 bits": 0.12, "peak memory": 0.06}
_LARGE = 0.25


def kind_of(run: PublishedRun) -> str:
    """The goal that a row's step counts to."""
    precision = run.text("precision").lower()
    return "fp8 and 4 bits" if any(name in precision for name in ("fp8", "mxfp", "nvfp4")) else "16 bits"


def is_recent(run: PublishedRun) -> bool:
    """Whether the row's model is hybrid, sparse or multimodal, which a dense decoder of text is not."""
    return run.text("arch_type") != "decoder"


def lines_of(results: Sequence[tuple[PublishedRun, RowResult]], tables: str) -> list[str]:
    """The page: by goal, by model, and why rows are left out. `tables`: what was read."""
    errors: dict[str, dict[str, list[float]]] = {kind: defaultdict(list) for kind in GOALS}
    signed = []
    for run, result in results:
        model = run.text("model")
        if result.relative_error is not None:
            errors[kind_of(run)][model].append(result.relative_error)
            job = run.text("strategy").partition(" distributed")[0]
            signed.append((run.row_id, model, job, kind_of(run), f"{result.relative_error:+.1%}"))
        if result.memory_relative_error is not None:
            errors["peak memory"][model].append(result.memory_relative_error)
    rows, models = [], []
    for kind, by_model in errors.items():
        means = {name: mean(map(abs, values)) for name, values in by_model.items()}
        every = [error for values in by_model.values() for error in values]
        if not every:
            rows.append((kind, "0", "0", "no rows", "", "", f"{GOALS[kind]:.0%}"))
            continue
        large = sum(abs(error) > _LARGE for error in every)
        rows.append((
            kind, str(len(every)), str(len(means)), f"{mean(means.values()):.1%}", f"{mean(every):+.1%}",
            str(large), f"{GOALS[kind]:.0%}",
        ))  # fmt: skip
        models += [
            (kind, name, str(len(by_model[name])), f"{error:.1%}", f"{mean(by_model[name]):+.1%}")
            for name, error in sorted(means.items(), key=lambda item: -item[1])
        ]
    reasons = Counter(str(result.reason) for _, result in results if result.relative_error is None)
    return [
        "# Hybrid, sparse and multimodal models",
        "",
        "Errors of rows of role report, by which no number was chosen: predicted over measured, less one.",
        f"Written by `python -m validation.published.recent_models RUNS.csv...` from {tables}, which is not",
        "shipped. Dense decoders are left out.",
        "",
        *markdown(named_columns(
            "what", "rows", "models", "mean of models", "bias", f"beyond {_LARGE:.0%}", "goal"
        ), rows),
        "",
        *markdown(named_columns("what", "model", "rows", "mean", "bias"), models),
        "",
        *_REMAINING.read_text(encoding="utf-8").splitlines(),
        "",
        *markdown(named_columns("row", "model", "job", "what", "error"), signed),
        "",
        "Left out:",
        "",
        *(f"- {count}: {reason}" for reason, count in sorted(reasons.items())),
    ]  # fmt: skip


def main() -> None:
    """Predict the rows of the tables and write the page."""
    paths = [Path(name) for name in sys.argv[1:]]
    runs = [run for run in read_runs(paths).runs if run.text("role") == "report" and is_recent(run)]
    results = []
    for run in runs:
        result = predict_row(run)
        print(run.row_id, result.relative_error, result.memory_relative_error, result.reason, flush=True)
        results.append((run, result))
    tables = ", ".join(
        f"{path.name} (rows to {max(run.text('date') for run in read_runs([path]).runs)})" for path in paths
    )
    PAGE.write_text("\n".join(lines_of(results, tables)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
