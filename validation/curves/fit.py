"""Fits the constants of all-reduces to measured curves, one set per machine type: the preset a curve names.

    python validation/curves/fit.py

Robust least squares (soft L1) on the logarithm of simulated over measured seconds, up to 16 GiB, of the
fastest algorithm and protocol; errors are of 64 KiB to 4 GiB. A weak pull keeps what the points cannot tell
where NCCL's tables have it. Prints the constants to write into the preset's [collectives.algorithms], and the
errors left.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import median

import numpy as np
from scipy.optimize import least_squares

from zsim.cost.collectives import edge_bytes
from zsim.cost.nccl_chunks import fill_seconds, tree_pieces
from zsim.fabric.communicators import Instance, ring_latency
from zsim.fabric.idle import idle_fabric
from zsim.fabric.methods import Method
from zsim.plan.ops import Collective, Group
from zsim.specs.cluster_files import load_cluster
from zsim.specs.hardware import Cluster, ProtocolCosts
from zsim.specs.topology import Topology
from zsim.study.collective_bench import CurvePoint, compare_curves

TABLE = Path(__file__).with_name("all_reduce.csv")
SCALE = 0.05  # beyond such an error a point pulls with its distance, no longer with its square
PULL = 0.02  # what a factor of e away from where a number starts costs, as the error of one point
MIB = 2.0**20
LARGEST = 2**34
NUM_STARTS = 4
SEED = 20010

Key = tuple[str, str, str]  # algorithm, protocol, field; "fraction": of all links
Constants = Mapping[tuple[str, str], ProtocolCosts]
Theta = Sequence[float]
# Where each number starts: NCCL's tables (zsim.cost.nccl_tuning), and for what they have not, ramps, a guess.
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
_EFA: Mapping[Key, float] = {
    ("ring", "ll", "inter_round"): 2.7e-6,
    ("ring", "ll128", "inter_round"): 4e-6,
    ("ring", "ll128", "fraction"): 0.92,
    ("ring", "simple", "inter_round"): 14e-6,
}
FITTED: Mapping[str, Mapping[Key, float]] = {
    "dgx-a100-80gb": _RING,
    "dgx-h100": {**_RING, **_NVLS, **_ACROSS},
    "aws-p5": {
        **_EFA,
        **{key: start for key, start in _ACROSS.items() if key != ("tree", "ll128", "fraction")},
    },
    "hgx-b200": {**_RING, **_NVLS},
}


@dataclass(frozen=True)
class Option:
    """One algorithm and protocol on one curve: bus bytes per second that links inside domains and links
    between them allow."""

    method: Method
    protocol: str
    intra: float
    inter: float


@dataclass(frozen=True)
class Curve:
    """A measured curve, and what of its topology the time depends on; the constants come from outside."""

    name: str
    cluster: Cluster
    gpus: int
    communicator: Instance
    options: tuple[Option, ...]
    points: tuple[CurvePoint, ...]
    harness_seconds: float

    def seconds(self, size: int, constants: Constants) -> float:
        """Of the fastest, as `zsim.fabric.fabric.Fabric.options` has it."""
        return min(self._seconds(option, size, constants) for option in self.options) + self.harness_seconds

    def _seconds(self, option: Option, size: int, constants: Constants) -> float:
        method, rounds = option.method, option.method.rounds
        costs = constants[method.algorithm, option.protocol]
        size_bytes = edge_bytes("all_reduce", size, self.gpus)
        inside = size_bytes / (option.intra * costs.intra_fraction)
        across = size_bytes / (option.inter * costs.inter_fraction)
        latency = ring_latency(rounds, costs, self.communicator.longer) + costs.ramp * (size / MIB) ** 0.5
        if method.shape == "tree":
            channels, domains = self.cluster.collectives.channels, self.communicator.num_domains
            pieces = tree_pieces(option.protocol, size, channels, self.gpus, domains)
            latency += fill_seconds(rounds, inside, across, pieces)
        return latency + max(inside, across)

    def errors(self, constants: Constants, *, scored: bool = False) -> list[float]:
        """Logarithm of simulated over measured seconds, point by point, or only of the scored points."""
        return [
            log(self.seconds(point.size_bytes, constants) / self.measured_seconds(point))
            for point in self.points
            if point.is_scored or not scored
        ]

    def measured_seconds(self, point: CurvePoint) -> float:
        return edge_bytes("all_reduce", point.size_bytes, self.gpus) / point.measured_bus_bytes_per_second


def read_curves(path: Path = TABLE) -> list[Curve]:
    """All curves of the table with their points up to 16 GiB; those from 64 KiB to 4 GiB are scored."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = {row["curve"]: row for row in csv.DictReader(file)}
    points = [
        point
        for point in compare_curves(path)
        if point.measured_bus_bytes_per_second > 0 and point.size_bytes <= LARGEST
    ]
    return [_curve(row, [point for point in points if point.curve == name]) for name, row in rows.items()]


def _curve(row: Mapping[str, str], points: Sequence[CurvePoint]) -> Curve:
    cluster = load_cluster(row["cluster"])
    nodes, gpus = int(row["nodes"]), int(row["gpus"])
    work = Collective("all_reduce", 8, "fp32", "world")
    topology = Topology(cluster, nodes, gpus // nodes)
    communicator = idle_fabric(topology, Group("world", gpus), [work]).communicator("world")
    options = tuple(
        Option(
            choice.method,
            choice.protocol,
            choice.limits.inside / choice.costs.intra_fraction,
            choice.limits.across / choice.costs.inter_fraction,
        )
        for choice in communicator.choices["all_reduce"]
    )
    harness = float(row["harness_seconds"] or 0)
    return Curve(row["curve"], cluster, gpus, communicator, options, tuple(points), harness)


def preset_constants(name: str) -> dict[tuple[str, str], ProtocolCosts]:
    """What the preset has today."""
    own = load_cluster(name).collectives
    constants = {("ring", protocol): costs for protocol, costs in own.protocols.items()}
    for algorithm, protocols in own.algorithms.items():
        constants |= {(algorithm, protocol): costs for protocol, costs in protocols.items()}
    return constants


def constants_at(
    name: str, theta: Theta, base: Constants | None = None
) -> dict[tuple[str, str], ProtocolCosts]:
    """The preset's constants (`base`, where they are at hand) with the fitted ones (`theta`: logarithms) in
    their places."""
    constants = dict(base or preset_constants(name))
    for (algorithm, protocol, field), value in zip(FITTED[name], theta, strict=True):
        fields = ("intra_fraction", "inter_fraction") if field == "fraction" else (field,)
        update = dict.fromkeys(fields, exp(value))
        constants[algorithm, protocol] = constants[algorithm, protocol].model_copy(update=update)
    return constants


def fit(name: str, curves: Sequence[Curve]) -> list[float]:
    """Logarithms of the constants that fit the curves' points best."""
    start = np.log(list(FITTED[name].values()))
    highest = [0.0 if key[2].endswith("fraction") else start[i] + 3 for i, key in enumerate(FITTED[name])]

    base = preset_constants(name)

    def residuals(theta: np.ndarray) -> np.ndarray:
        constants = constants_at(name, theta.tolist(), base)
        errors = [error for curve in curves for error in curve.errors(constants)]
        return np.array([*errors, *(PULL * (theta - start))])

    bounds = (start - 4, np.maximum(highest, start + 1e-6))
    # Which algorithm is fastest changes with the constants, so there are several dips: the deepest of a few.
    generator = np.random.default_rng(SEED)
    starts = [start, *(start + 0.7 * generator.standard_normal((NUM_STARTS - 1, len(start))))]
    found = [
        least_squares(
            residuals, np.clip(begin, *bounds), bounds=bounds, loss="soft_l1", f_scale=SCALE, diff_step=0.01
        )
        for begin in starts
    ]
    return [float(value) for value in min(found, key=lambda one: float(one.cost)).x]


def main() -> None:
    curves = read_curves()
    for name in FITTED:
        own = [curve for curve in curves if curve.cluster.name == name]
        theta = fit(name, own)
        for (algorithm, protocol, field), value, start in zip(
            FITTED[name], theta, FITTED[name].values(), strict=True
        ):
            unit, scale = ("", 1) if field.endswith("fraction") else (" us", 1e6)
            print(
                f"{name:<14} {algorithm:<10} {protocol:<7} {field:<15} {exp(value) * scale:8.3f}{unit:<3} "
                f"(started at {start * scale:.3g})"
            )
        for what, constants in (("fitted", constants_at(name, theta)), ("preset", preset_constants(name))):
            errors = [abs(exp(error) - 1) for curve in own for error in curve.errors(constants, scored=True)]
            print(f"{name:<14} {what}: median {median(errors):.1%} of {len(errors)} points")


if __name__ == "__main__":
    main()
