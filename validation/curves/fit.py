"""Fits the constants of collectives to measured curves, one set per machine type.

    python validation/curves/fit.py [NAME ...]

Robust least squares (soft L1) on the logarithm of simulated over measured seconds, up to 16 GiB, of the
fastest algorithm and protocol, over curves of role `fit` only; errors are reported for 64 KiB to 4 GiB. A
weak pull keeps constants that the points do not determine at the values of NCCL's tables. Prints the
constants to write into the preset's [collectives], and the remaining errors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from statistics import median

import numpy as np
from scipy.optimize import least_squares

from validation.curves.measured import GATHER, INSIDE, Constants, Curve, preset_constants, read_curves
from zsim.specs.cluster.collectives import ProtocolCosts

SCALE = 0.05  # larger errors count linearly instead of quadratically
PULL = 0.02  # cost of a factor of e from a number's start, as the error of one point
SEED = 20010

Key = tuple[str, str, str]  # algorithm, protocol, field; "fraction": of all links
Theta = Sequence[float]
_REDUCES, _GATHERS = ("all_reduce",), ("all_gather", "reduce_scatter")
# Start values: NCCL's tables (zsim.cost.collectives.nccl_tuning), and guesses for ramps, which those tables
# lack.
_RING: Mapping[Key, float] = {
    ("ring", "ll", "base"): 6.6e-6,
    ("ring", "ll", "ramp"): 1e-6,
    ("ring", "ll", "intra_fraction"): 0.25,
    ("ring", "ll128", "ramp"): 3e-6,
    ("ring", "ll128", "intra_fraction"): 0.92,
    ("ring", "simple", "ramp"): 10e-6,
}
_NVLS: Mapping[Key, float] = {
    ("nvls", "simple", "intra_round"): 25e-6,
    ("nvls", "simple", "ramp"): 10e-6,
}
_ACROSS: Mapping[Key, float] = {
    ("tree", "ll", "inter_round"): 5e-6,
    ("tree", "ll", "fraction"): 0.053,
    ("tree", "ll128", "inter_round"): 8.5e-6,
    ("tree", "ll128", "fraction"): 0.86,
    ("nvls_tree", "simple", "intra_round"): 25e-6,
    ("nvls_tree", "simple", "inter_round"): 20.9e-6,
    ("nvls_tree", "simple", "ramp"): 10e-6,
}
_GATHER_ACROSS: Mapping[Key, float] = {
    (GATHER, "ll", "base"): 6.6e-6,
    (GATHER, "ll", "inter_round"): 2.7e-6,
    (GATHER, "ll", "network_ramp"): 1e-6,
    (GATHER, "ll128", "inter_round"): 4e-6,
    (GATHER, "ll128", "network_ramp"): 3e-6,
    (GATHER, "simple", "inter_round"): 14e-6,
    (GATHER, "simple", "network_ramp"): 5e-6,
    (GATHER, "simple", "inter_fraction"): 1.0,
}
_EXCHANGE: Mapping[Key, float] = {
    (INSIDE, "simple", "ramp"): 5e-6,
    (INSIDE, "simple", "intra_fraction"): 0.9,
}
# Over EFA the plugin determines the round, not the protocol: one set for all rings.
_EFA_RING: Mapping[Key, float] = {
    ("ring", "ll", "inter_round"): 2.7e-6,
    ("ring", "ll128", "inter_round"): 4e-6,
    ("ring", "ll128", "fraction"): 0.5,
    ("ring", "simple", "inter_round"): 14e-6,
    ("ring", "simple", "network_ramp"): 10e-6,
}
_RINGS_ALIKE = {("ring", protocol): (GATHER, protocol) for protocol in ("ll", "ll128", "simple")}


@dataclass(frozen=True)
class Fit:
    """One joint fit: the curves of `clusters` and `kinds`, with the numbers of `starts` as parameters. `also`
    copies fitted values to further places. The fastest algorithm changes with the constants, so there are
    several local minima: the best of `num_starts` starts is taken."""

    preset: str
    clusters: tuple[str, ...]
    kinds: tuple[str, ...]
    starts: Mapping[Key, float]
    also: Mapping[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    num_starts: int = 4

    def has(self, curve: Curve) -> bool:
        return curve.cluster.name in self.clusters and curve.kind in self.kinds


FITS: Mapping[str, Fit] = {
    "dgx-a100-80gb": Fit("dgx-a100-80gb", ("dgx-a100-80gb",), _REDUCES, _RING),
    "dgx-h100": Fit("dgx-h100", ("dgx-h100",), _REDUCES, {**_RING, **_NVLS, **_ACROSS}),
    "dgx-h100, gathers": Fit("dgx-h100", ("dgx-h100", "hgx-h200"), _GATHERS, _GATHER_ACROSS),
    "dgx-h100, all-to-alls": Fit("dgx-h100", ("dgx-h100",), ("all_to_all",), _EXCHANGE),
    "aws-p5": Fit(
        "aws-p5",
        ("aws-p5",),
        (*_REDUCES, *_GATHERS),
        {**_EFA_RING, **_ACROSS, (GATHER, "ll128", "inter_round"): 4e-6, (GATHER, "ll128", "fraction"): 0.2},
        {key: _RINGS_ALIKE[key] for key in (("ring", "ll"), ("ring", "simple"))},
        num_starts=8,
    ),
    "aws-p4d": Fit(
        "aws-p4d",
        ("aws-p4d",),
        _REDUCES,
        {key: start for key, start in _EFA_RING.items() if key[1] == "simple"},
        _RINGS_ALIKE,
    ),
    "hgx-b200": Fit("hgx-b200", ("hgx-b200",), _REDUCES, {**_RING, **_NVLS}),
}


def fitted_curves(name: str, curves: Iterable[Curve]) -> list[Curve]:
    """The curves to which the numbers may be fitted."""
    return [curve for curve in curves if FITS[name].has(curve) and curve.role == "fit"]


def constants_at(
    name: str, theta: Theta, base: Constants | None = None
) -> dict[tuple[str, str], ProtocolCosts]:
    """The preset's constants (`base`, to avoid loading them) with the fitted ones (`theta`: logarithms) in
    their places."""
    own = FITS[name]
    constants = dict(base or preset_constants(own.preset))
    for (algorithm, protocol, what), value in zip(own.starts, theta, strict=True):
        fields = ("intra_fraction", "inter_fraction") if what == "fraction" else (what,)
        update = dict.fromkeys(fields, exp(value))
        place = algorithm, protocol
        for target in (place, own.also[place]) if place in own.also else (place,):
            constants[target] = constants[target].model_copy(update=update)
    return constants


def fit(name: str, curves: Sequence[Curve]) -> list[float]:
    """Logarithms of the constants that fit the curves' points best."""
    starts = FITS[name].starts
    start = np.log(list(starts.values()))
    highest = [0.0 if key[2].endswith("fraction") else start[i] + 3 for i, key in enumerate(starts)]

    base = preset_constants(FITS[name].preset)

    def residuals(theta: np.ndarray) -> np.ndarray:
        constants = constants_at(name, theta.tolist(), base)
        errors = [error for curve in curves for error in curve.errors(constants)]
        return np.array([*errors, *(PULL * (theta - start))])

    bounds = (start - 4, np.maximum(highest, start + 1e-6))
    generator = np.random.default_rng(SEED)
    begins = [start, *(start + 0.7 * generator.standard_normal((FITS[name].num_starts - 1, len(start))))]
    found = [
        least_squares(
            residuals,
            np.clip(begin, *bounds),
            bounds=bounds,
            loss="soft_l1",
            f_scale=SCALE,
            diff_step=np.full_like(start, 0.01),
        )
        for begin in begins
    ]
    return [float(value) for value in min(found, key=lambda one: float(one.cost)).x]


def main(names: Sequence[str]) -> None:
    curves = read_curves()
    for name in names or FITS:
        own = fitted_curves(name, curves)
        theta = fit(name, own)
        starts = FITS[name].starts
        for (algorithm, protocol, what), value, start in zip(starts, theta, starts.values(), strict=True):
            unit, scale = ("", 1) if what.endswith("fraction") else (" us", 1e6)
            print(
                f"{name:<18} {algorithm:<10} {protocol:<7} {what:<15} {exp(value) * scale:8.3f}{unit:<3} "
                f"(started at {start * scale:.3g})"
            )
        preset = preset_constants(FITS[name].preset)
        for which, constants in (("fitted", constants_at(name, theta)), ("preset", preset)):
            errors = [abs(exp(error) - 1) for curve in own for error in curve.errors(constants, scored=True)]
            print(f"{name:<18} {which}: median {median(errors):.1%} of {len(errors)} points")


if __name__ == "__main__":
    main(sys.argv[1:])
