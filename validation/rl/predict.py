"""Predict the rows of a table, each by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from validation.rl.engines import predict_engine
from validation.rl.steps import RowExperiment, row_experiment
from validation.rl.table import RlRow
from validation.rl.words import reason_of
from zsim.engine.micro_batches import simulate_step
from zsim.engine.simulator import Simulator
from zsim.errors import ZsimError
from zsim.specs.library import Library
from zsim.workflows.rl.job import resolve_rl
from zsim.workflows.rl.phases import sync_seconds
from zsim.workflows.rl.result import simulate_rl

# Column of a measured phase -> its name.
PHASE_COLUMNS = {
    "generation_s": "rollout", "reward_s": "reward", "logprob_s": "old_logprobs", "ref_s": "reference",
    "critic_s": "values", "train_s": "training", "sync_s": "weight_sync",
}  # fmt: skip


@dataclass(frozen=True)
class RowPrediction:
    """A row's measurement beside zsim's prediction, or the reason why there is none."""

    row_id: str
    source: str
    role: str
    status: str
    """"predicted", or "skipped"."""
    reason: str = ""
    measured_seconds: float | None = None
    predicted_seconds: float | None = None
    predicted_range_seconds: tuple[float, float] | None = None
    measured_phases: Mapping[str, float] = field(default_factory=dict)
    predicted_phases: Mapping[str, float] = field(default_factory=dict)
    measured_tokens_per_second: float | None = None
    predicted_tokens_per_second: float | None = None
    measured_itl_seconds: float | None = None
    predicted_itl_seconds: float | None = None
    assumptions: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The row of the JSON."""
        data: dict[str, Any] = {
            "row_id": self.row_id,
            "source": self.source,
            "role": self.role,
            "status": self.status,
            "reason": self.reason,
            "measured_seconds": self.measured_seconds,
            "predicted_seconds": self.predicted_seconds,
            "predicted_range_seconds": self.predicted_range_seconds,
            "measured_phases_seconds": dict(self.measured_phases),
            "predicted_phases_seconds": dict(self.predicted_phases),
            "assumptions": list(self.assumptions),
        }
        if self.predicted_tokens_per_second is not None:
            data |= {
                "measured_tokens_per_second": self.measured_tokens_per_second,
                "predicted_tokens_per_second": self.predicted_tokens_per_second,
                "measured_itl_seconds": self.measured_itl_seconds,
                "predicted_itl_seconds": self.predicted_itl_seconds,
            }
        return data


def predict_rows(rows: Iterable[RlRow]) -> Iterator[RowPrediction]:
    """zsim's prediction of every row. What goes wrong in one is that row's."""
    simulator, library = Simulator(), Library()
    for row in rows:
        try:
            yield _predict(row, simulator, library)
        except ZsimError as error:
            yield _skipped(row, reason_of(error))
        except Exception as error:  # a row of a table that others wrote must not end the table
            yield _skipped(row, f"{type(error).__name__}: {reason_of(error)}")


def _skipped(row: RlRow, reason: str) -> RowPrediction:
    return RowPrediction(**_measured(row), status="skipped", reason=reason)


def _measured(row: RlRow) -> dict[str, Any]:
    phases = {}
    for column, name in PHASE_COLUMNS.items():
        value = row.number(column)
        if value is not None:
            phases[name] = value
    itl = row.number("itl_mean_ms")
    return {
        "row_id": row.row_id,
        "source": row.text("source"),
        "role": row.text("role"),
        "measured_seconds": row.number("step_time_s") or row.number("duration_s"),
        "measured_phases": phases,
        "measured_tokens_per_second": row.number("output_tokens_per_s"),
        "measured_itl_seconds": None if itl is None else itl / 1e3,
    }


def _predict(row: RlRow, simulator: Simulator, library: Library) -> RowPrediction:
    measured = _measured(row)
    if row.is_engine:
        engine = predict_engine(row, library)
        return RowPrediction(
            **measured,
            status="predicted",
            predicted_tokens_per_second=engine.tokens_per_second,
            predicted_itl_seconds=engine.seconds_per_token,
        )
    asked = row_experiment(row, library)
    seconds, seconds_range, phases = _predict_step(asked, simulator)
    return RowPrediction(
        **measured,
        status="predicted",
        predicted_seconds=seconds,
        predicted_range_seconds=seconds_range,
        predicted_phases=phases,
        assumptions=asked.assumptions,
    )


def _predict_step(
    asked: RowExperiment, simulator: Simulator
) -> tuple[float | None, tuple[float, float] | None, dict[str, float]]:
    """Seconds of the step, their range, and seconds of its phases."""
    if asked.phase == "training":
        step = simulate_step(simulator.job(asked.experiment), simulate=simulator.outcome)
        return None, None, {"training": step.seconds}
    if asked.phase == "weight_sync":
        return None, None, {"weight_sync": sync_seconds(resolve_rl(asked.experiment, simulator))}
    result = simulate_rl(asked.experiment, simulator)
    phases = {name: float(seconds) for name, seconds in result.phases_seconds.items()}
    return float(result.step.seconds), result.step_seconds_range, phases
