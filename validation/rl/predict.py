"""Predict the rows of a table, each by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from validation.published.measured_experiments import memory_figures
from validation.rl.engines import predict_engine
from validation.rl.steps import ASSUMED_RESPONSES, RowExperiment, placement_of, row_experiment
from validation.rl.table import RlRow
from validation.rl.words import reason_of
from zsim.engine.micro_batches import simulate_step
from zsim.engine.simulator import Simulator
from zsim.errors import ZsimError
from zsim.explain.report_of import report_of_step
from zsim.specs.library import Library
from zsim.workflows.rl.job import resolve_rl
from zsim.workflows.rl.phases import TRAINED_BYTES, sync_seconds
from zsim.workflows.rl.result import PASSES, phase_spread, simulate_rl

# Column of a measured phase -> its name.
PHASE_COLUMNS = {
    "generation_s": "rollout", "reward_s": "reward", "logprob_s": "old_logprobs", "ref_s": "reference",
    "critic_s": "values", "train_s": "training", "sync_s": "weight_sync",
}  # fmt: skip
_FRESH_MEMORY = 0.27e-9
"""Seconds a byte that a copy takes more into memory that was not there before, as the kernel zeroes and maps
every page at its first write: 1.1 us for 4 KiB. One thread of torch 2.13 copies 32, 128 and 512 MiB on a Xeon
in a virtual machine at 2.2 to 2.4 GB/s by `clone`, and at 6.0 to 6.2 GB/s into the clone again (medians of 9,
CPU time, 30 November 2026)."""
BATCH_COLUMNS = (
    "source", "version", "model", "gpu", "prompts_per_step", "samples_per_prompt", "response_len_max",
    "total_len_max", "precision_train", "precision_gen", "algorithm",
)  # fmt: skip


@dataclass(frozen=True)
class RowPrediction:
    """A row's measurement beside zsim's prediction, or the reason why there is none."""

    row_id: str
    source: str
    role: str
    status: str
    """"predicted", or "skipped"."""
    reason: str = ""
    placement: str = ""
    gpus: int | None = None
    batch: tuple[str, ...] = ()
    """What rows have in common that train on the same samples with the same model and release."""
    measured_seconds: float | None = None
    predicted_seconds: float | None = None
    predicted_range_seconds: tuple[float, float] | None = None
    measured_phases: Mapping[str, float] = field(default_factory=dict)
    predicted_phases: Mapping[str, float] = field(default_factory=dict)
    predicted_phase_ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    measured_tokens_per_second: float | None = None
    predicted_tokens_per_second: float | None = None
    measured_itl_seconds: float | None = None
    predicted_itl_seconds: float | None = None
    measured_peak_bytes: float | None = None
    predicted_peak_bytes: float | None = None
    """Of a trainer that is measured alone: what torch reserves on the fullest GPU, which prime-rl prints."""
    assumptions: tuple[str, ...] = ()

    @property
    def doubt(self) -> str:
        """What is assumed of the responses, and how much longer training takes with it than was measured:
        about that much longer they are than they were. Empty where their length is published.
        """
        assumed = next((text for text in self.assumptions if text.startswith(ASSUMED_RESPONSES)), "")
        phases = self.predicted_phases, self.measured_phases
        predicted, measured = (seconds.get("training", 0.0) for seconds in phases)
        if not assumed or not measured:
            return assumed and f"assumed: {assumed}"
        return f"assumed: {assumed}, with which training takes {predicted / measured:.1f} times as long"

    def gpu_seconds(self, kind: str) -> float:
        """GPU-seconds of the whole step, "measured" or "predicted"."""
        seconds: float = getattr(self, f"{kind}_seconds")
        return seconds * (self.gpus or 1)

    def range_of(self, name: str) -> tuple[float, float] | None:
        """The range of "step", or of a phase. None where none is predicted."""
        return self.predicted_range_seconds if name == "step" else self.predicted_phase_ranges.get(name)

    def to_dict(self) -> dict[str, Any]:
        """The row of the JSON."""
        data: dict[str, Any] = {
            "row_id": self.row_id,
            "source": self.source,
            "role": self.role,
            "status": self.status,
            "reason": self.reason,
            "placement": self.placement,
            "gpus": self.gpus,
            "measured_seconds": self.measured_seconds,
            "predicted_seconds": self.predicted_seconds,
            "predicted_range_seconds": self.predicted_range_seconds,
            "measured_phases_seconds": dict(self.measured_phases),
            "predicted_phases_seconds": dict(self.predicted_phases),
            "predicted_phases_range_seconds": dict(self.predicted_phase_ranges),
            "measured_peak_bytes": self.measured_peak_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
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


def measured_phases(row: RlRow) -> dict[str, float]:
    """Measured seconds by phase."""
    return {
        name: value for column, name in PHASE_COLUMNS.items() if (value := row.number(column)) is not None
    }


def _measured(row: RlRow) -> dict[str, Any]:
    itl, peak = row.number("itl_mean_ms"), row.number("peak_mem_gib")
    return {
        "row_id": row.row_id,
        "source": row.text("source"),
        "role": row.text("role"),
        "placement": "" if row.is_engine else placement_of(row),
        "gpus": row.count("n_gpus"),
        "batch": tuple(row.text(column) for column in BATCH_COLUMNS),
        "measured_seconds": row.number("step_time_s") or row.number("duration_s"),
        "measured_phases": measured_phases(row),
        "measured_tokens_per_second": row.number("output_tokens_per_s"),
        "measured_itl_seconds": None if itl is None else itl / 1e3,
        "measured_peak_bytes": None if peak is None else peak * 2**30,
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
    return RowPrediction(
        **measured, status="predicted", assumptions=asked.assumptions, **_predict_step(asked, simulator)
    )


def _predict_step(asked: RowExperiment, simulator: Simulator) -> dict[str, Any]:
    """What is predicted of a step: its seconds, those of its phases, and their ranges."""
    if asked.phase == "training":
        step = simulate_step(simulator.job(asked.experiment), simulate=simulator.outcome)
        cluster, numel = step.job.cluster, step.job.model.numel
        per_byte = 1 / cluster.offload.pageable_bandwidth + _FRESH_MEMORY
        gather = TRAINED_BYTES * numel * per_byte if asked.gathers_weights else 0.0
        reading = 2 * cluster.host.seconds_per_launch * asked.read_tokens
        seconds = step.seconds + gather + reading
        return {
            **_phases({"training": (seconds, PASSES.range_of(seconds))}),
            "predicted_peak_bytes": memory_figures(report_of_step(step, 0.0))["reserved"],
        }
    if asked.phase == "weight_sync":
        job = resolve_rl(asked.experiment, simulator)
        seconds = sync_seconds(job)
        return _phases(
            {"weight_sync": (seconds, phase_spread("weight_sync", job.transport).range_of(seconds))}
        )
    result = simulate_rl(asked.experiment, simulator)
    ranges = result.phases_seconds_range
    return {
        "predicted_seconds": float(result.step.seconds),
        "predicted_range_seconds": result.step_seconds_range,
        **_phases({name: (float(value), ranges[name]) for name, value in result.phases_seconds.items()}),
    }


def _phases(phases: Mapping[str, tuple[float, tuple[float, float]]]) -> dict[str, Any]:
    return {
        "predicted_phases": {name: seconds for name, (seconds, _) in phases.items()},
        "predicted_phase_ranges": {name: ends for name, (_, ends) in phases.items()},
    }
