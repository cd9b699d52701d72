"""The best configuration found on one cluster, with its days and money."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zsim.report.energy import RunCost, run_cost
from zsim.specs.experiment.run_cost import CostTable
from zsim.specs.prices import Price
from zsim.study.differences import range_of_row, verdict_of_row
from zsim.study.tune.evaluate import CandidateResult
from zsim.validated.verdict import Verdict, verdict_content

_HOURS_PER_DAY = 24.0


@dataclass(frozen=True)
class Offer:
    """A number of GPUs of a cluster, the configuration to run on them, and what the run then takes."""

    cluster: str
    gpus: int
    label: str
    """The configuration in words."""
    overrides: Mapping[str, Any]
    """The configuration as keys of an experiment."""
    verdict: Verdict
    step_seconds: float
    step_seconds_range: tuple[float, float]
    """The interval of 80 %."""
    cost: RunCost
    price: Price | None

    @property
    def hours(self) -> float:
        return _HOURS_PER_DAY * (self.cost.days or 0.0)

    @property
    def gpu_hours(self) -> float:
        return self.cost.gpu_hours or 0.0

    @property
    def money(self) -> float | None:
        return self.cost.money

    @property
    def outlay(self) -> float:
        """Money, or GPU-hours where the price is not known: the quantity to be minimised."""
        return self.gpu_hours if self.money is None else self.money

    def scale(self, value: float) -> tuple[float, float]:
        """The interval of a quantity that is proportional to the step."""
        low, high = self.step_seconds_range
        return value * low / self.step_seconds, value * high / self.step_seconds

    def to_dict(self) -> dict[str, Any]:
        money = self.money
        return {
            "cluster": self.cluster, "gpus": self.gpus, "label": self.label,
            "overrides": dict(self.overrides), **verdict_content(self.verdict),
            "step_seconds": self.step_seconds, "step_seconds_range": list(self.step_seconds_range),
            "days": self.cost.days, "days_range": list(self.scale(self.cost.days or 0.0)),
            "gpu_hours": self.gpu_hours, "money": money,
            "money_range": None if money is None else list(self.scale(money)),
            "currency": self.cost.currency,
            "price": None if self.price is None else self.price.model_dump(),
        }  # fmt: skip


def offer_of(
    result: CandidateResult, cluster: str, length: CostTable, price: Price | None, currency: str
) -> Offer:
    """The offer of a simulated configuration on a cluster, for a run of this length."""
    row, base = result.row, result.candidate.base
    table = length.model_copy(
        update={"gpu_hour_price": None if price is None else price.gpu_hour_price, "currency": currency}
    )
    cost = run_cost(
        table, None, step_seconds=result.seconds, step_tokens=row["step_tokens"],
        step_samples=base.batch_sequences, gpus=result.gpus, nodes=row["nodes"],
        parameters=base.job.model.numel,
    )  # fmt: skip
    verdict = verdict_of_row(row)
    assert verdict is not None, "a row of this release has one"
    interval = range_of_row(row) or (result.seconds, result.seconds)
    return Offer(
        cluster, result.gpus, result.candidate.label, result.candidate.overrides, verdict, result.seconds,
        interval, cost, price,
    )  # fmt: skip
