"""`zsim.compare_topologies` and `zsim.bench_collectives`: clusters side by side, collectives by size."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zsim.report.views.displayable import DisplayableList, Figures
from zsim.report.views.html.figure import Figure
from zsim.report.views.html.figures import layout
from zsim.report.views.meanings import COMMUNICATION
from zsim.specs.cluster.files import load_cluster
from zsim.study.experiment_source import ExperimentSource
from zsim.study.topologies import bench, figures, topologies
from zsim.study.topologies.bench import BenchRow
from zsim.study.topologies.page import comparison_page
from zsim.study.topologies.text import bench_lines, comparison_lines
from zsim.study.topologies.topologies import TopologyComparison

_COLUMNS = ("cluster", "nodes", "gpus", "step_seconds", "tokens_per_second_per_gpu", "mfu_fraction", "fits")


@dataclass(frozen=True, repr=False, eq=False)
class TopologiesResult(DisplayableList[TopologyComparison]):
    """One experiment on several clusters, in the order in which they were given."""

    items: tuple[TopologyComparison, ...]

    def records(self) -> Sequence[Mapping[str, Any]]:
        """One row per cluster: the step, its breakdown, and what the fabric is built of."""
        rows = []
        for comparison in self.items:
            content = comparison.to_dict()
            row = {name: content[name] for name in _COLUMNS}
            row |= {f"{name}_seconds": value for name, value in content["breakdown_seconds"].items()}
            row |= {name: comparison.facts[f"num_{name}"] for name in ("switches", "ports", "cables")}
            rows.append(row | {"bisection_bytes_per_second": comparison.facts["bisection_bytes_per_second"]})
        return rows

    def headline(self) -> str:
        labels = self.items[0].report.labels
        return f"{labels.get('model')} | {labels.get('strategy')} | {self.items[0].gpus} GPUs"

    def columns(self) -> Sequence[str]:
        return [
            *_COLUMNS,
            "exposed_communication_seconds",
            "switches",
            "cables",
            "bisection_bytes_per_second",
        ]

    def lines(self) -> Iterator[str]:
        return comparison_lines(self.items)

    def to_dict(self) -> list[dict[str, Any]]:
        """The content of compare.json."""
        return [comparison.to_dict() for comparison in self.items]

    def plots(self) -> Figures:
        return {
            "steps": lambda: figures.breakdowns(self.items),
            "links": lambda: figures.heat_map(self.items),
            "traffic": lambda: figures.traffic(self.items),
            "scaling": lambda: figures.scaling(self.items),
            "price": lambda: figures.price(self.items),
        }

    def pages(self) -> Mapping[str, str]:
        content = json.dumps(self.to_dict(), indent=1) + "\n"
        return {"compare.html": comparison_page(self.items), "compare.json": content}


def compare_topologies(
    clusters: Sequence[str | Path],
    experiment: ExperimentSource = None,
    *,
    model: str | None = None,
    gpus: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> TopologiesResult:
    """Simulate one experiment on several clusters with the same number of GPUs, as `zsim topology compare`.

    `clusters` are presets, or paths of topology TOMLs. `experiment` is a file, a `zsim.Experiment`, a dict,
    or None for the README's example. Its cluster is not used.

        found = zsim.compare_topologies(["dgx-h100", "dgx-a100-80gb"], gpus=64)
        found.to_frame(), found.figure("steps")

    Raises InputError for an unknown cluster, and where the experiment does not run on one.
    """
    names = [str(cluster) for cluster in clusters]
    comparisons = topologies.compare_topologies(
        names, experiment, model=model, overrides=overrides, gpus=gpus
    )
    return TopologiesResult(tuple(comparisons))


@dataclass(frozen=True, repr=False, eq=False)
class BenchResult(DisplayableList[BenchRow]):
    """The times of one collective by size, in nccl-tests' words: algorithm and bus bandwidth."""

    items: tuple[BenchRow, ...]
    cluster: str
    gpus: int
    collective: str
    group: int | None = None

    def records(self) -> Sequence[Mapping[str, Any]]:
        """One row per size."""
        return self.to_dict()

    def headline(self) -> str:
        groups = self.group or self.gpus
        return f"{self.cluster}: {self.collective}, {self.gpus} GPUs, groups of {groups}"

    def lines(self) -> Iterator[str]:
        return bench_lines(self.items, self.cluster, self.gpus, self.collective, self.group)

    def to_dict(self) -> list[dict[str, Any]]:
        """The array that `zsim topology bench --json` writes."""
        return [dict(row.to_dict()) for row in self.items]

    def plots(self) -> Figures:
        return {"bandwidth": self._bandwidth}

    def _bandwidth(self) -> Figure:
        figure = Figure(layout(420, hovermode="closest"))
        figure.add_scatter(
            name="bus bandwidth", mode="lines+markers", line={"color": COMMUNICATION.color, "width": 2},
            x=[row.size_bytes for row in self.items],
            y=[row.bus_bytes_per_second / 1e9 for row in self.items],
            hovertext=[f"{row.algorithm}, {row.protocol}" for row in self.items],
        )  # fmt: skip
        figure.update_xaxes(title_text="bytes", type="log")
        figure.update_yaxes(title_text="bus bandwidth, GB/s", rangemode="tozero", automargin=True)
        return figure


def bench_collectives(
    cluster: str | Path,
    nodes: int = 1,
    collective: str = "all_reduce",
    *,
    group: int | None = None,
    algorithm: str | None = None,
    protocol: str | None = None,
    nccl_choice: bool = False,
    sizes: Sequence[int] | None = None,
) -> BenchResult:
    """Times of one collective by size on idle links, as `zsim topology bench` prints them.

    `group` is the number of ranks per group, all groups at once, by default all GPUs. `algorithm` and
    `protocol` are forced, as NCCL_ALGO and NCCL_PROTO do. With `nccl_choice` NCCL's tuning model chooses.
    `sizes` are bytes of the full tensor, by default powers of two from 8 B to 16 GiB.

        zsim.bench_collectives("dgx-h100", nodes=4, collective="all_gather").figure()

    Raises InputError for an unknown cluster, collective, algorithm or protocol.
    """
    chosen_cluster = bench.force_choice(load_cluster(str(cluster)), algorithm, protocol, nccl_choice)
    rows = bench.bench(chosen_cluster, nodes, collective, group, sizes=sizes)
    return BenchResult(
        tuple(rows), chosen_cluster.name, nodes * chosen_cluster.gpus_per_node, collective, group
    )
