"""`zsim topology`: draw, time, compare and import clusters."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from zsim.commands.options import (
    answer,
    file_option,
    folder_option,
    is_output,
    print_file,
)
from zsim.errors import InputError
from zsim.files import write_whole

app = typer.Typer(
    help="Draw a cluster, time collectives on it, compare clusters, import other people's descriptions.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

ClusterName = Annotated[str, typer.Argument(help="Cluster preset, or path to a topology TOML.")]
Nodes = Annotated[int, typer.Option(help="Number of nodes.", min=1, max=100_000)]
Json = Annotated[Path | None, file_option("--json", help="Write JSON ('-': standard output).")]


@app.command()
def show(
    cluster: ClusterName,
    nodes: Nodes = 4,
    out: Annotated[Path | None, file_option(help="Draw it into this HTML page.")] = None,
    json_: Json = None,
) -> None:
    """Show the parts of a cluster's fabric, its bandwidths, and a drawing of it."""
    from zsim.study.topologies.text import topology_lines
    from zsim.study.topologies.topologies import describe_topology

    facts = describe_topology(cluster, nodes)
    answer(topology_lines(facts), lambda: facts, json_)
    if out is not None:
        from zsim.study.topologies.page import topology_page

        write_whole(out, topology_page([(cluster, nodes)], f"{facts['cluster']}, {nodes} nodes"))
        print_file("page", out)


@app.command()
def bench(
    cluster: Annotated[str | None, typer.Argument(help="Cluster preset, or path to a topology TOML.")] = None,
    nodes: Nodes = 1,
    collective: Annotated[
        str, typer.Option(help="all_reduce, all_gather, reduce_scatter, all_to_all, ...")
    ] = ("all_reduce"),
    group: Annotated[int | None, typer.Option(help="Ranks per group; all groups at once.")] = None,
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
    from zsim.notebook.topologies import bench_collectives
    from zsim.study.topologies import bench as collective_bench
    from zsim.study.topologies.text import curve_lines

    if curves is not None:
        points = collective_bench.compare_curves(curves)
        answer(curve_lines(points), lambda: [asdict(point) for point in points], json_)
        if out is not None:
            from zsim.study.topologies.page import curves_page

            write_whole(out, curves_page(points))
            if not is_output(json_):
                print_file("page", out)
        return
    if cluster is None:
        raise InputError("topology bench: expected a cluster, or --curves FILE.csv")
    found = bench_collectives(
        cluster, nodes, collective, group=group, algorithm=algorithm, protocol=protocol,
        nccl_choice=nccl_choice,
    )  # fmt: skip
    answer(found.lines(), found.to_dict, json_)


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
    gpus: Annotated[int | None, typer.Option(help="GPUs, the same on every cluster.")] = None,
    out: Annotated[Path | None, folder_option(help="Write compare.html and compare.json there.")] = None,
) -> None:
    """One experiment on several clusters: step time, traffic, what the fabrics are built of."""
    from zsim.notebook.topologies import compare_topologies

    found = compare_topologies(clusters, experiment, model=model, gpus=gpus)
    print(found)
    if out is not None:
        found.save(out)
        print_file("page", out / "compare.html")


@app.command("import")
def import_(
    file: Annotated[
        Path, typer.Argument(help="NCCL topology XML, `nvidia-smi topo -m`, Slurm topology, ...")
    ],
    output: Annotated[Path, file_option("-o", "--output", metavar=None, help="The topology TOML to write.")],
    format_: Annotated[
        str | None,
        typer.Option("--format", help="nccl, nvidia-smi, slurm or astra-sim; without it, by the content."),
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
    write_whole(output, imported.toml)
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
    nodes: Nodes = 4,
) -> None:
    """A cluster as ASTRA-sim's network yml: one dimension inside the node, one between nodes."""
    from zsim.specs.cluster.files import load_cluster
    from zsim.specs.formats.topology.astra_sim import astra_sim_yaml

    write_whole(output, astra_sim_yaml(load_cluster(cluster), nodes))
    print(f"written: {output}")
