"""Published times of Adam on CPUs against zsim's model: bytes over one rate per machine.

    python validation/published/cpu_adam.py

`validation/curves/cpu_adam.csv`. Where a machine has rows of several sizes, each is predicted from the mean
rate of the others (left out in turn): the sizes of that table are ambiguous by a factor of four, but not
between its rows, so this tests that time goes with bytes. torch's own Adam, which makes a pass per operation
(84 bytes per parameter where the fused one moves 28), is predicted from DeepSpeed's rate on the same machine.
A machine's only row predicts nothing; the DGX-2's is what its file is fitted to.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from zsim.cost.kernels.update import update_bytes
from zsim.cost.rates.offload import optimizer_bytes_per_second
from zsim.specs.cluster.files import load_cluster

TABLE = Path(__file__).resolve().parents[1] / "curves" / "cpu_adam.csv"
CLUSTERS = {"DGX-2 host (Xeon 8168 x2)": "dgx-2"}


@dataclass(frozen=True)
class Prediction:
    """The prediction of one row; `basis` says which rows it is based on, and seconds are None where there are
    none."""

    row_id: str
    hardware: str
    implementation: str
    parameters: int
    measured_seconds: float
    predicted_seconds: float | None
    basis: str

    @property
    def relative_error(self) -> float | None:
        if self.predicted_seconds is None:
            return None
        return self.predicted_seconds / self.measured_seconds - 1


def moved_bytes(implementation: str, parameters: int) -> int:
    """Bytes that one update reads and writes."""
    return update_bytes(parameters, "adamw", "foreach" if implementation == "torch" else "fused")


def predictions(path: Path = TABLE) -> list[Prediction]:
    """The predictions of all rows of the table, in its order."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [Prediction(**_common(row), **_predicted(row, rows)) for row in rows]  # type: ignore[arg-type]


def _common(row: Mapping[str, str]) -> dict[str, str | int | float]:
    names = {name: row[name] for name in ("row_id", "hardware", "implementation")}
    return {**names, "parameters": int(row["parameters"]), "measured_seconds": float(row["seconds"])}


def _rate(row: Mapping[str, str]) -> float:
    return moved_bytes(row["implementation"], int(row["parameters"])) / float(row["seconds"])


def _predicted(row: Mapping[str, str], rows: Sequence[Mapping[str, str]]) -> dict[str, float | str | None]:
    size = moved_bytes(row["implementation"], int(row["parameters"]))
    beside = [other for other in rows if other is not row and other["hardware"] == row["hardware"]]
    if row["hardware"] in CLUSTERS:
        cluster = load_cluster(CLUSTERS[row["hardware"]])
        rate = optimizer_bytes_per_second(cluster.host, cluster.offload)
        return {"predicted_seconds": size / rate, "basis": f"{cluster.name}'s file, fitted to it"}
    alike = row["implementation"] if row["implementation"] != "torch" else "deepspeed"
    known = [_rate(other) for other in beside if other["implementation"] == alike]
    if not known:
        return {"predicted_seconds": None, "basis": "the machine's only row"}
    what = "the other sizes" if alike == row["implementation"] else "DeepSpeed's rate"
    return {"predicted_seconds": size / fmean(known), "basis": what}


def lines(rows: Sequence[Prediction]) -> Iterator[str]:
    """The rows as a Markdown table."""
    yield "| row | machine | Adam | parameters | measured | predicted | error | from |"
    yield "|---|---|---|---:|---:|---:|---:|---|"
    for row in rows:
        error, seconds = row.relative_error, row.predicted_seconds
        predicted = "" if seconds is None else f"{seconds:.3g} s"
        signed = "" if error is None else f"{error:+.1%}"
        yield (
            f"| {row.row_id} | {row.hardware} | {row.implementation} | {row.parameters / 1e9:.3g}B | "
            f"{row.measured_seconds:.3g} s | {predicted} | {signed} | {row.basis} |"
        )


if __name__ == "__main__":
    print("\n".join(lines(predictions())))
