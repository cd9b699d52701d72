"""Fits few numbers to many points so that disturbed points do not pull them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from zsim.arrays import Floats
from zsim.extras import require

Predict = Callable[[Mapping[str, float]], Sequence[float]]

# Residuals of the logarithm beyond this count as disturbance rather than error: about the spread of one
# quiet microbenchmark.
_RESIDUAL_SCALE = 0.05


@dataclass(frozen=True, slots=True)
class FitParameter:
    """A number to fit, between `low` and `high`. The search begins at `start`. All are above 0."""

    name: str
    start: float
    low: float
    high: float


@dataclass(frozen=True)
class FitPoint:
    """One measurement and its prediction by the fitted numbers."""

    label: str
    x: float
    """Its abscissa in plots."""
    measured_seconds: float
    predicted_seconds: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_seconds / self.measured_seconds - 1


@dataclass(frozen=True)
class CurveFit:
    """A group of numbers fitted jointly."""

    title: str
    values: Mapping[str, float]
    """By dotted name in the hardware file."""
    points: tuple[FitPoint, ...]
    ranges: Mapping[str, tuple[float, float]]
    """The range of the points, by the name of what varies."""
    sources: tuple[str, ...]
    units: Mapping[str, str] = field(default_factory=dict)
    """The unit of each value."""
    at_bound: tuple[str, ...] = ()
    """Numbers that stopped at a limit, which the points therefore do not determine."""

    @property
    def median_error(self) -> float:
        return float(np.median([abs(point.error) for point in self.points])) if self.points else 0.0

    @property
    def worst_error(self) -> float:
        return max((abs(point.error) for point in self.points), default=0.0)

    @property
    def bias(self) -> float:
        return float(np.mean([point.error for point in self.points])) if self.points else 0.0


def robust_fit(
    parameters: Sequence[FitParameter], predict: Predict, measured: Sequence[float]
) -> tuple[dict[str, float], tuple[str, ...]]:
    """The numbers that bring `predict` nearest to `measured`, and those that stopped at a limit.

    Minimises the sum of soft-L1 losses of log(predicted / measured), over the logarithms of the numbers:

        sum 2 s^2 (sqrt(1 + (r/s)^2) - 1),   s = 0.05

    which is least squares for small residuals and their absolute values for large ones (scipy's
    `least_squares`, loss "soft_l1", and Triggs et al. 1999). Raises InputError where scipy is not installed.
    """
    require("scipy", "zsim calibrate")
    from scipy.optimize import least_squares

    names = [parameter.name for parameter in parameters]
    target = np.log(np.asarray(measured, dtype=np.float64))

    def residuals(theta: Floats) -> Floats:
        values = dict(zip(names, np.exp(theta).tolist(), strict=True))
        return np.log(np.maximum(np.asarray(predict(values), dtype=np.float64), 1e-12)) - target

    low = np.log([parameter.low for parameter in parameters])
    high = np.log([parameter.high for parameter in parameters])
    start = np.clip(np.log([parameter.start for parameter in parameters]), low + 1e-6, high - 1e-6)
    solution = least_squares(
        residuals,
        start,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=_RESIDUAL_SCALE,
        diff_step=[1e-3],
        max_nfev=200,
    )
    values = dict(zip(names, np.exp(solution.x).tolist(), strict=True))
    is_at_bound = (np.abs(solution.x - low) < 1e-3) | (np.abs(solution.x - high) < 1e-3)
    return values, tuple(name for name, is_stuck in zip(names, is_at_bound.tolist(), strict=True) if is_stuck)


def fit_points(
    labels: Sequence[str], xs: Sequence[float], measured: Sequence[float], predicted: Sequence[float]
) -> tuple[FitPoint, ...]:
    return tuple(FitPoint(*row) for row in zip(labels, xs, measured, predicted, strict=True))


def value_range(values: Sequence[float]) -> tuple[float, float]:
    return (float(min(values)), float(max(values)))
