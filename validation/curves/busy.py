"""Fits what a busy network adds to aws-p5's collectives, to the medians of busy.csv.

    python validation/curves/busy.py

Two numbers: seconds more for every round between nodes, of every algorithm and protocol, and the fraction of
the bandwidth that all-gathers and reduce-scatters get inside a node. Robust least squares (soft L1) on the
logarithm of simulated over measured bus bandwidth. Prints them, for the preset aws-p5-busy, and the errors.

busy.csv: 256 MB on 1 to 64 p5.48xlarge of Hugging Face's cluster, medians over days of jobs among others
(nanotron/ultrascale-playbook, pp_comm_bandwidth.html).
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from math import exp, log
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from validation.curves.measured import GATHER, Constants, Curve, curve_of, preset_constants
from zsim.cost.collectives.rounds import bus_bytes
from zsim.plan.ops import CollectiveKind

TABLE = Path(__file__).with_name("busy.csv")
KINDS: Mapping[str, CollectiveKind] = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
}  # fmt: skip
SIZE = 256 * 2**20
SCALE = 0.1  # larger errors count linearly instead of quadratically


def busy_constants(base: Constants, more_seconds: float, fraction: float) -> Constants:
    """The constants with longer rounds between nodes and slower gathers inside them."""
    found = {}
    for (algorithm, protocol), costs in base.items():
        update = {"inter_round": costs.inter_round + more_seconds}
        if (algorithm, protocol) == (GATHER, "simple"):
            update["intra_fraction"] = costs.intra_fraction * fraction
        found[algorithm, protocol] = costs.model_copy(update=update)
    return found


def read_busy() -> list[tuple[Curve, float]]:
    """Curves without points, and the measured bus bytes per second of `SIZE` bytes."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        (
            curve_of("aws-p5", KINDS[row["collective"]], int(row["nodes"]), 8 * int(row["nodes"])),
            1e9 * float(row["median_bus_bandwidth"]),
        )
        for row in rows
    ]


def errors(curves: Sequence[tuple[Curve, float]], constants: Constants) -> list[float]:
    """Logarithm of simulated over measured bus bandwidth."""
    return [
        log(bus_bytes(curve.kind, SIZE, curve.gpus) / curve.seconds(SIZE, constants) / measured)
        for curve, measured in curves
    ]


def main() -> None:
    curves, base = read_busy(), preset_constants("aws-p5")

    def constants(theta: np.ndarray) -> Constants:
        return busy_constants(base, exp(theta[0]), 1 / (1 + exp(-theta[1])))

    def residuals(theta: np.ndarray) -> np.ndarray:
        return np.array(errors(curves, constants(theta)))

    found = least_squares(
        residuals,
        [log(2e-4), 0.5],
        loss="soft_l1",
        f_scale=SCALE,
        diff_step=[0.02, 0.02],
    ).x
    print(f"{exp(found[0]) * 1e6:.0f} us more for a round between nodes, ", end="")
    print(f"{1 / (1 + exp(-found[1])):.2f} of the bandwidth for gathers inside a node")
    left = errors(curves, constants(found))
    print(f"root mean square error {np.sqrt(np.mean(np.square(left))):.0%}, worst {max(map(abs, left)):.0%}")
    for (curve, measured), error in zip(curves, left, strict=True):
        print(f"{curve.kind:<15} {curve.gpus // 8:>3} nodes {measured / 1e9:8.1f} GB/s {exp(error) - 1:+.0%}")


if __name__ == "__main__":
    main()
