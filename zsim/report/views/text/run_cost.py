"""Money, energy and time of a training run in words."""

from __future__ import annotations

from collections.abc import Iterator

from zsim.report.energy import RunCost
from zsim.report.report import Report
from zsim.specs.experiment.run_cost import CostTable
from zsim.units import format_amount

HEADINGS = ("", "run", "per 1e9 tokens", "per parameter", "at")


def bill(gpu_hours: float, cost: RunCost | CostTable | None) -> str:
    """GPU-hours, with their money where the price is known."""
    text = f"{format_amount(gpu_hours)} GPU-hours"
    if cost is None or cost.gpu_hour_price is None:
        return text
    return f"{text}, {format_amount(gpu_hours * cost.gpu_hour_price)} {cost.currency}"


def cost_rows(report: Report) -> Iterator[tuple[str, ...]]:
    """A row for each figure that `[cost]` asks for, under `HEADINGS`. There are none without `[cost]`."""
    energy, cost = report.energy, report.cost
    if cost is None:
        return
    billion_seconds = 1e9 / report.step_tokens * report.step_seconds
    gpu_hours = billion_seconds * report.simulation.world_size / 3600
    tokens = "" if cost.tokens is None else f"{cost.tokens:.4g} tokens"
    yield "days", _format_optional(cost.days, "{:,.1f}"), f"{billion_seconds / 86400:,.3g}", "", tokens
    yield "GPU-hours", format_amount(cost.gpu_hours), f"{gpu_hours:,.1f}", "", ""
    if cost.gpu_hour_price is not None:
        yield (
            cost.currency,
            format_amount(cost.money),
            _format_optional(cost.money_per_billion_tokens, "{:,.2f}"),
            _format_optional(cost.money_per_parameter, "{:.3g}"),
            f"{cost.gpu_hour_price:g} per GPU-hour",
        )
    if energy is not None:
        servers = f"+ {cost.node_power_watts:,.0f} W/node" if cost.node_power_watts else "GPUs alone"
        yield (
            "MWh",
            format_amount(cost.megawatt_hours),
            _format_optional(cost.megawatt_hours_per_billion_tokens, "{:,.3g}"),
            "",
            f"{servers}, PUE {cost.pue:g}",
        )
        yield "W per GPU", f"{energy.watts:.0f}", "", "", f"mean of the step; {energy.evidence}"


def _format_optional(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
