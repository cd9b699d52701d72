"""Costs of a step and of a whole training run: energy, GPU-hours, money, days."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zsim.cost.rates.power import GpuActivity, energy_joules
from zsim.report.breakdown import Breakdown
from zsim.specs.cluster.gpu import Power
from zsim.specs.experiment.tables import CostTable
from zsim.units import format_amount, format_tokens

_JOULES_PER_MEGAWATT_HOUR = 3.6e9
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Energy:
    """Energy of one GPU in a step."""

    joules: float
    watts: float
    """The mean power."""
    activity_seconds: Mapping[str, float]
    """They add up to the step."""
    evidence: str
    source: str


@dataclass(frozen=True, slots=True)
class RunCost:
    """Costs by the experiment's `[cost]`.

    A "run" is training on `tokens`, those of all epochs, and its fields are None without `tokens`. Money is
    None without a price, energy where the GPU's power is not known. Energy is at the meter: GPUs and
    `node_power`, times `pue`.
    """

    currency: str
    gpu_hour_price: float | None
    pue: float
    node_power_watts: float
    tokens: float | None
    epochs: float
    step_money: float | None
    step_megawatt_hours: float | None
    gpu_hours: float | None
    days: float | None
    money: float | None
    megawatt_hours: float | None
    money_per_billion_tokens: float | None
    megawatt_hours_per_billion_tokens: float | None
    money_per_parameter: float | None


_IDLE = ("bubble", "offload_stall", "allocator", "host_bound")


def step_energy(breakdown: Breakdown, kernels: GpuActivity, power: Power | None) -> Energy | None:
    """The energy of one GPU in a step. None where its power is not known.

    `kernels` has the seconds of the compute stream's kernels by limiting resource, on an idle GPU. They are
    scaled to the time that the kernels took in the step. Exposed communication counts as communication, every
    other wait as idle, a pipeline's bubbles too.
    """
    seconds = breakdown.seconds
    computing = seconds["compute"] + seconds["optimizer"]
    activity = (
        kernels.scaled(computing / kernels.seconds) if kernels.seconds > 0 else GpuActivity(idle=computing)
    )
    activity = activity._replace(
        communication=seconds["exposed_communication"],
        idle=sum((seconds[name] for name in _IDLE), activity.idle),
    )
    joules = None if power is None else energy_joules(activity, power)
    if power is None or joules is None:
        return None
    return Energy(joules, joules / activity.seconds, activity._asdict(), power.evidence, power.source)


def run_cost(
    cost: CostTable,
    energy: Energy | None,
    *,
    step_seconds: float,
    step_tokens: int,
    step_samples: float,
    gpus: int,
    nodes: int,
    parameters: int,
) -> RunCost:
    """Money and energy of a step of all `gpus` (`step_tokens` and `step_samples` of all of
    them), and of the whole run.

        money = price * GPUs * t / 3600        energy = PUE * (GPUs * E + nodes * P * t)

    Here t is the seconds of a step, E the joules of one GPU, and P the watts of the rest of a node. A run of
    less than one step takes one.
    """
    step_hours = gpus * step_seconds / _SECONDS_PER_HOUR
    money = None if cost.gpu_hour_price is None else cost.gpu_hour_price * step_hours
    megawatt_hours = None
    if energy is not None:
        node_joules = nodes * cost.node_power * step_seconds
        megawatt_hours = cost.pue * (gpus * energy.joules + node_joules) / _JOULES_PER_MEGAWATT_HOUR
    tokens = cost.run_tokens(step_tokens / step_samples)
    steps = None if tokens is None else max(tokens / step_tokens, 1.0)
    run_money = _times(money, steps)
    run_seconds = _times(step_seconds, steps)
    return RunCost(
        currency=cost.currency,
        gpu_hour_price=cost.gpu_hour_price,
        pue=cost.pue,
        node_power_watts=cost.node_power,
        tokens=tokens,
        epochs=cost.epochs,
        step_money=money,
        step_megawatt_hours=megawatt_hours,
        gpu_hours=_times(step_hours, steps),
        days=None if run_seconds is None else run_seconds / 86400.0,
        money=run_money,
        megawatt_hours=_times(megawatt_hours, steps),
        money_per_billion_tokens=_times(money, 1e9 / step_tokens),
        megawatt_hours_per_billion_tokens=_times(megawatt_hours, 1e9 / step_tokens),
        money_per_parameter=None if run_money is None else run_money / parameters,
    )


def _times(value: float | None, factor: float | None) -> float | None:
    return None if value is None or factor is None else value * factor


def run_length_text(tokens: float, epochs: float) -> str:
    """The tokens of a run, those of all epochs."""
    text = f"{format_tokens(tokens)} tokens"
    return text if epochs == 1 else f"{text} in {epochs:g} epochs"


def bill(gpu_hours: float, cost: RunCost | CostTable | None) -> str:
    """GPU-hours, with their money where the price is known."""
    text = f"{format_amount(gpu_hours)} GPU-hours"
    if cost is None or cost.gpu_hour_price is None:
        return text
    return f"{text}, {format_amount(gpu_hours * cost.gpu_hour_price)} {cost.currency}"
