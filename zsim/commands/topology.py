"""`zsim topology`: draw, time, compare and import clusters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from zsim.commands.options import (
    AllowCode,
    answer,
    file_option,
    folder_option,
    is_output,
    named_model,
    permission,
    print_file,
)
from zsim.errors import InputError
from zsim.files import write_atomically

app = typer.Typer(
    help="Draw a cluster, time collectives on it, compare clusters, import other people's descriptions.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

ClusterName = Annotated[str, typer.Argument(help="Cluster preset, or path to a topology TOML.")]
_NODES = "Number of nodes; without it {}, or those that the cluster lists."
SomeNodes = Annotated[int | None, typer.Option(help=_NODES.format(4), min=1, max=100_000)]
Json = Annotated[Path | None, file_option("--json", help="Write JSON ('-': standard output).")]


def _num_nodes(cluster: str, usual: int) -> int:
    """The number of nodes that a cluster of several types lists, or `usual` if all its nodes are
    identical.
    """
    from zsim.specs.cluster.files import load_cluster

    return sum(node.count for node in load_cluster(cluster).nodes) or usual


@app.command()
def show(
    cluster: ClusterName,
    nodes: SomeNodes = None,
    out: Annotated[Path | None, file_option(help="Draw it into this HTML page.")] = None,
    json_: Json = None,
) -> None:
    """Show the parts of a cluster's fabric, its bandwidths, and a drawing of it."""
    from zsim.study.topologies.topologies import describe_topology, topology_lines

    nodes = nodes or _num_nodes(cluster, 4)
    facts = describe_topology(cluster, nodes)
    answer(topology_lines(facts), lambda: facts, json_)
    if out is not None:
        from zsim.study.topologies.result import topology_page

        write_atomically(out, topology_page([(cluster, nodes)], f"{facts['cluster']}, {nodes} nodes"))
        print_file("page", out)


@app.command()
def bench(
    cluster: Annotated[str | None, typer.Argument(help="Cluster preset, or path to a topology TOML.")] = None,
    nodes: Annotated[int | None, typer.Option(help=_NODES.format(1), min=1, max=100_000)] = None,
    collective: Annotated[
        str, typer.Option(help="all_reduce, all_gather, reduce_scatter, all_to_all, ...")
    ] = ("all_reduce"),
    group: Annotated[int | None, typer.Option(min=1, help="Ranks per group; all groups at once.")] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="Force it, as NCCL_ALGO does: ring, tree, nvls, ...")
    ] = None,
    protocol: Annotated[
        str | None, typer.Option(help="Force it, as NCCL_PROTO does: ll, ll128, simple.")
    ] = None,
    nccl_choice: Annotated[
        bool, typer.Option(help="Choose as NCCL's tuning model does, not what is fastest.")
    ] = False,
    curves: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="Compare with measured curves instead.")
    ] = None,
    out: Annotated[Path | None, file_option(help="With --curves: plot them into this page.")] = None,
    json_: Json = None,
) -> None:
    """An nccl-tests shaped table of one collective, or measured curves with the simulation's error."""
    from zsim.study.topologies import bench as collective_bench
    from zsim.study.topologies.result import bench_collectives
    from zsim.study.topologies.topologies import curve_lines

    if curves is not None:
        points = collective_bench.compare_curves(curves)
        answer(curve_lines(points), lambda: [asdict(point) for point in points], json_)
        if out is not None:
            from zsim.study.topologies.result import curves_page

            write_atomically(out, curves_page(points))
            if not is_output(json_):
                print_file("page", out)
        return
    if cluster is None:
        raise InputError("topology bench: expected a cluster, or --curves FILE.csv")
    nodes = nodes or _num_nodes(cluster, 1)
    result = bench_collectives(
        cluster, nodes, collective, group=group, algorithm=algorithm, protocol=protocol,
        nccl_choice=nccl_choice,
    )  # fmt: skip
    answer(result.lines(), result.to_dict, json_)


@app.command()
def compare(
    clusters: Annotated[
        list[str],
        typer.Argument(help="Clusters to put side by side (one alone is shown too): presets, or TOMLs."),
    ],
    experiment: Annotated[
        Path | None,
        typer.Option("--experiment", "-e", help="Experiment file; without it the README's example."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Another model than the experiment's.")] = None,
    allow_code: AllowCode = False,
    gpus: Annotated[int | None, typer.Option(help="GPUs, the same on every cluster.")] = None,
    out: Annotated[Path | None, folder_option(help="Write compare.html and compare.json there.")] = None,
) -> None:
    """One experiment on several clusters: step time, traffic, what the fabrics are built of."""
    from zsim.specs.experiment.load import experiment_of
    from zsim.study.topologies.result import compare_topologies

    overrides = {} if model is None else {"model": named_model(model)}
    base = experiment_of(experiment, overrides, origin="command line", code=permission(allow_code))
    result = compare_topologies(clusters, base, gpus=gpus)
    print(result)
    if out is not None:
        result.save(out)
        print_file("page", out / "compare.html")


@app.command()
def new(
    file: Annotated[Path, typer.Argument(help="The topology TOML to write.")],
    like: Annotated[str | None, typer.Option(help="Preset or TOML whose nodes they are.")] = None,
    fabric: Annotated[
        str | None, typer.Option(help="single-switch, fat-tree, rail-optimized, dragonfly ...")
    ] = None,
    nodes_per_leaf: Annotated[int | None, typer.Option(help="Nodes under one leaf switch.", min=1)] = None,
    oversubscription: Annotated[
        float | None, typer.Option(help="Downlinks of a leaf over its uplinks: 2 for 2:1.", min=1)
    ] = None,
    shape: Annotated[str | None, typer.Option(help="Nodes of a torus, as 4x4 or 4x4x4.")] = None,
    cards: Annotated[int | None, typer.Option(help="Network cards of a node.", min=1)] = None,
    card_bandwidth: Annotated[str | None, typer.Option(help='Of one card, as "400 Gb/s".')] = None,
    source: Annotated[str | None, typer.Option(help="Where these numbers come from.")] = None,
) -> None:
    """Write a topology TOML. On a terminal it asks for what no option says."""
    from zsim.specs.cluster.files import load_cluster
    from zsim.specs.formats.topology.new_file import NewTopology, parse_fabric, parse_shape

    if file.exists():
        raise InputError(f"{file}: exists; expected the name of a new file")
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if not is_interactive and (like is None or fabric is None):
        raise InputError(
            "topology new: nobody to ask here; expected --like (such as dgx-h100) and --fabric (such as "
            "fat-tree)"
        )
    if is_interactive:
        like = like or _prompt_until_valid("Nodes like (a preset or a TOML)", "dgx-h100", load_cluster)
        fabric = fabric or _prompt_until_valid("Fabric", "fat-tree", parse_fabric)
        if fabric in ("fat-tree", "rail-optimized"):
            nodes_per_leaf = nodes_per_leaf or int(
                _prompt_until_valid("Nodes per leaf switch", "16", _require_at_least_one(int))
            )
            oversubscription = oversubscription or float(
                _prompt_until_valid("Oversubscription (2 for 2:1)", "1", _require_at_least_one(float))
            )
        if fabric == "torus":
            shape = shape or _prompt_until_valid("Nodes along each dimension", "4x4", parse_shape)
        if source is None:
            source = typer.prompt("Where these numbers come from", default="", show_default=False) or None
    assert like is not None
    assert fabric is not None
    topology = NewTopology(
        file.stem, like, fabric, nodes_per_leaf, oversubscription, cards, card_bandwidth, source,
        None if shape is None else parse_shape(shape),
    )  # fmt: skip
    write_atomically(file, topology.text())
    print(f"written: {file}")
    print(f"look at it: zsim topology show {file} --nodes 8")


def _require_at_least_one(number: type[int] | type[float]) -> Callable[[str], None]:
    def check(text: str) -> None:
        try:
            is_valid = 1 <= number(text) < inf
        except ValueError:
            is_valid = False
        if not is_valid:
            kind = "a whole number" if number is int else "a number"
            raise InputError(f"found '{text}', expected {kind} of 1 or more")

    return check


def _prompt_until_valid(question: str, default: str, check: Callable[[str], object]) -> str:
    """The answer to a question, which is repeated until `check` raises no InputError."""

    def check_answer(text: str) -> str:
        try:
            check(text)
        except InputError as error:
            raise typer.BadParameter(str(error)) from None
        return text

    reply: str = typer.prompt(question, default=default, value_proc=check_answer)
    return reply


@app.command("import")
def import_(
    file: Annotated[
        Path, typer.Argument(help="NCCL topology XML, nvidia-smi topo -m, ibnetdiscover, lldpctl, Slurm ...")
    ],
    output: Annotated[Path, file_option("-o", "--output", metavar=None, help="The topology TOML to write.")],
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="nccl, nvidia-smi, rocm-smi, hwloc, ibnetdiscover, lldp, slurm or astra-sim; else by the "
            "content.",
        ),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Preset for what the file does not say (NVLink, cards, host, ...).")
    ] = None,
    network: Annotated[
        Path | None,
        typer.Option(help="File whose [network] table joins the nodes (a node's file knows none)."),
    ] = None,
) -> None:
    """Turn other people's description of a machine or fabric into a topology TOML."""
    from zsim.specs.formats.topology.read import import_topology

    imported = import_topology(file, format_=format_, base=base, network=network, name=output.stem)
    write_atomically(output, imported.toml)
    from zsim.specs.cluster.files import load_cluster

    load_cluster(output)
    for note in imported.notes:
        print(f"note: {note}")
    print(f"written: {output}")


@app.command("export")
def export(
    cluster: ClusterName,
    output: Annotated[
        Path, file_option("-o", "--output", metavar=None, help="The ASTRA-sim network yml to write.")
    ],
    nodes: SomeNodes = None,
) -> None:
    """A cluster as ASTRA-sim's network yml: one dimension inside the node, one between nodes."""
    from zsim.specs.cluster.files import load_cluster
    from zsim.specs.formats.topology.astra_sim import astra_sim_yaml

    write_atomically(output, astra_sim_yaml(load_cluster(cluster), nodes or _num_nodes(cluster, 4)))
    print(f"written: {output}")
