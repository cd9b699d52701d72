"""Many simulations: `zsim sweep`, `scaling`, `sensitivity`, `needs`, `tune` and `rent`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zsim.commands.options import (
    AllowCode,
    ExperimentOptions,
    Jobs,
    Set,
    answer,
    complete_clusters,
    folder_option,
    is_output,
    json_option,
    named_model,
    permission,
    print_file,
    settings,
    takes_experiment,
)
from zsim.errors import InputError
from zsim.specs.strategy.registry import values_of

if TYPE_CHECKING:
    from zsim.specs.experiment.tables import Experiment


def sweep(
    study: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="The study: an experiment, and axes.")],
    out: Annotated[Path | None, folder_option(help="Where results go; STUDY-results without it.")] = None,
    jobs: Jobs = None,
    set_: Set = None,
    backend: Annotated[
        str, typer.Option(help="What runs them: loky (processes here), dask, or another of joblib's.")
    ] = "loky",
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A running Dask scheduler, tcp://HOST:PORT.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Finished points, to share between studies.")
    ] = None,
    allow_code: AllowCode = False,
    list_: Annotated[bool, typer.Option("--list", help="Only say which points there are.")] = False,
) -> None:
    """Simulate an experiment at every point of a study: results.csv, and results.parquet with pyarrow.

    Run it again to go on where it was stopped, and to get new points only.
    """
    if list_:
        from zsim.study.sweep.points import study_points
        from zsim.study.sweep.study_file import load_study

        points = study_points(load_study(study, settings(set_), permission(allow_code)))
        for point in points:
            values = ", ".join(f"{key} = {value}" for key, value in point.values.items())
            print(f"{point.number:>6}  {values}" + (f"  ({point.error})" if point.error else ""))
        return
    from zsim.study.sweep.sweep import sweep as run_sweep

    folder = out or Path(f"{study.stem}-results")
    done = run_sweep(
        study, overrides=settings(set_), out=folder, jobs=jobs, backend=backend, scheduler=scheduler,
        cache=cache, code=permission(allow_code),
    )  # fmt: skip
    print(f"{done}\n")
    for kind, path in done.files.items():
        print_file(kind, path)
    if "parquet" not in done.files:
        print("no results.parquet: it needs pyarrow (pip install zsim[parquet])")
    if done.is_stopped:
        print(f"stopped: {len(done.rows) - done.done} points are left; the same command goes on with them")
        raise typer.Exit(130)
    if done.failed == len(done.rows):  # probably a mistake in the study itself
        raise typer.Exit(1)


@takes_experiment(without=("nodes", "gpus"))
def scaling(
    options: ExperimentOptions,
    counts: Annotated[
        str, typer.Option("--gpus", metavar="COUNTS", help="8..16384 (doubling), 8..4096:4, or 8,24,64.")
    ] = "8..1024",
    strong: Annotated[
        bool, typer.Option("--strong/--weak", help="The same batch in all, or on every GPU.")
    ] = False,
    fill: Annotated[
        bool,
        typer.Option(
            help="On every GPU the largest micro-batch that fits and that torch's allocator does not hold up."
        ),
    ] = False,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of all GPUs (--strong); else the experiment's.")
    ] = None,
    grow: Annotated[
        str | None,
        typer.Option(metavar="DEGREE", help="tensor, pipeline or context: grows in place of the replicas."),
    ] = None,
    out: Annotated[Path, folder_option(help="Where scaling.html, scaling.json and the points go.")] = Path(
        "scaling"
    ),
    jobs: Jobs = None,
) -> None:
    """How far from linear on more GPUs, where it bends, and what the reason is."""
    from zsim.study.scaling.scaling import scaling as run_scaling

    if strong and fill:
        raise InputError("--strong keeps the batch of all GPUs, --fill lets it grow; give one")
    result = run_scaling(
        options.load(), counts, mode="fill" if fill else "strong" if strong else "weak", jobs=jobs,
        global_batch=global_batch, grow=grow, cache=out / "points",
    )  # fmt: skip
    print(result)
    if not result.runs:
        raise typer.Exit(130)
    print()
    _end_study(result.save(out), is_stopped=result.is_stopped)


def _end_study(files: Sequence[Path], *, is_stopped: bool) -> None:
    """Name the files of a study. Raises typer.Exit with the code of an interrupt if it was stopped."""
    for path in files:
        print_file(path.suffix[1:], path)
    if is_stopped:
        print("stopped: the same command goes on")
        raise typer.Exit(130)


@takes_experiment()
def sensitivity(
    options: ExperimentOptions,
    spread: Annotated[float, typer.Option(help="How far a number is turned, each way.")] = 0.2,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="What would have to be true: step_seconds=, mfu=, tokens_per_second_per_gpu=, or fits.",
        ),
    ] = None,
    resource: Annotated[
        list[str] | None, typer.Option(help="For --target: only these, e.g. 'network bandwidth'.")
    ] = None,
    out: Annotated[Path, folder_option(help="Where sensitivity.html, .json and the points go.")] = Path(
        "sensitivity"
    ),
    jobs: Jobs = None,
) -> None:
    """Turn every number of the hardware and the framework: what the step depends on.

    With --target also the least of each resource that reaches it, by simulation. With [run] also what the
    days of the whole run depend on: failures, detection, start-up, the store, saves, spares.
    """
    from zsim.study.sensitivity.result import sensitivity as find_sensitivity
    from zsim.study.sensitivity.sensitivity import memory_to_fit

    experiment = options.load()
    if target == "fits":
        print(memory_to_fit(experiment))
        return
    result = find_sensitivity(
        experiment, spread=spread, target=target, resources=resource or (), jobs=jobs, cache=out / "points"
    )
    print(f"{result}\n")
    _end_study(result.save(out), is_stopped=result.is_stopped)


@takes_experiment()
def needs(
    options: ExperimentOptions,
    resource: Annotated[
        list[str] | None,
        typer.Option(help="drives, drive bandwidth, pcie, c2c, host memory or cpu; all of them without."),
    ] = None,
    json_: Annotated[Path | None, json_option("the needs")] = None,
) -> None:
    """How much more of what would hide the offloading, found by simulation."""
    from zsim.study.needs import needs as find_needs

    result = find_needs(options.load(), resource)
    answer(result.lines(), result.to_dict, json_)


_KINDS = ", ".join(values_of("tune.kind"))
_DEGREE_KINDS = ", ".join(values_of("tune.parallelism"))


@takes_experiment()
def tune(
    options: ExperimentOptions,
    goal: Annotated[
        str,
        typer.Option(
            help="fastest, cheapest, fewest-days (of [run], saves and failures included), smallest-cluster, "
            "largest-model, largest-batch or longest-sequence."
        ),
    ] = "fastest",
    kind: Annotated[
        list[str] | None, typer.Option(help=f"Strategies to look at: {_KINDS}; else the experiment's own.")
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="AXIS", help="What to leave as it is, e.g. micro-batch; or all."),
    ] = None,
    quantised: Annotated[
        bool, typer.Option("--quantised", help="ZeRO++'s int8 gathers and int4 reductions too.")
    ] = False,
    parallelism: Annotated[
        bool,
        typer.Option(
            "--parallelism", help=f"Tensor, pipeline and context degrees too, with {_DEGREE_KINDS}."
        ),
    ] = False,
    simulations: Annotated[
        int | None, typer.Option(min=1, help="With degrees: how many configurations to simulate at most.")
    ] = None,
    headroom: Annotated[float, typer.Option(help="Fraction of GPU memory to leave free.")] = 0.0,
    top: Annotated[int, typer.Option(min=1, help="How many to show and write.")] = 5,
    jobs: Jobs = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Simulated points, shared with `zsim sweep --cache`.")
    ] = None,
    json_: Annotated[Path | None, json_option("the result")] = None,
    out: Annotated[Path | None, folder_option(help="Write the best few's files and tune.html there.")] = None,
) -> None:
    """Find the best configuration that fits. Say what to change in the one given, each change simulated.

    The global batch stays as it is. The experiment may be a DeepSpeed JSON, an Accelerate YAML or a
    torchtitan TOML. Without any of them (and without --kind) DeepSpeed and FSDP2 are looked at.

    With [rl]: the placement, the GPUs of the rollout, the ranks of its engines and their part of the memory,
    the tokens of micro-batches and the way of new weights (--keep placement, split, engine, utilization,
    micro-batch, sync).
    """
    from zsim.study.tune.framework import usual_kinds
    from zsim.study.tune.tune import tune as find_best

    experiment = options.load()
    if experiment.rl is not None:
        given = {
            "--goal": goal != "fastest", "--kind": kind, "--quantised": quantised,
            "--parallelism": parallelism, "--simulations": simulations, "--headroom": headroom,
            "--jobs": jobs, "--cache": cache, "--out": out,
        }  # fmt: skip
        for name, value in given.items():
            if value:
                raise InputError(
                    f"{name}: does nothing for an experiment with [rl], whose placement and engines are "
                    "searched in this process; expected --keep, --top and --json alone"
                )
        from zsim.study.rollouts import tune_rollout

        layouts = tune_rollout(experiment, keep=keep or (), count=top)
        answer(layouts.lines(), layouts.to_dict, json_)
        return
    is_open = options.experiment is None and not any(
        text.startswith("strategy.") for text in options.set_ or []
    )
    kinds = kind or (usual_kinds() if is_open else [])
    result = find_best(
        experiment, goal, kinds=kinds, keep=keep or (), quantised=quantised, parallelism=parallelism,
        simulations=simulations, headroom=headroom, top=top, jobs=jobs, cache=cache,
    )  # fmt: skip
    answer(result.lines(), result.to_dict, json_)
    if out is not None:
        result.save(out)
        if not is_output(json_):
            print_file("files", f"{out}/best, tune.html")


@takes_experiment(without=("cluster", "gpu", "nodes", "gpus"))
def rent(
    options: ExperimentOptions,
    tokens: Annotated[str | None, typer.Option(help="Tokens to train on in all (20M, 1T).")] = None,
    samples: Annotated[str | None, typer.Option(help="Rows of the data set, instead.")] = None,
    epochs: Annotated[float | None, typer.Option(help="How often they are trained on.")] = None,
    method: Annotated[
        str | None,
        typer.Option(help="full, lora (of rank 16) or qlora; else the experiment's, without one full."),
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence; else the model's longest up to 4096.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Sequences of a step; else the experiment's, without one Llama 2's: 64, from 1B tokens on "
            "4M tokens.",
        ),
    ] = None,
    max_hours: Annotated[float, typer.Option(help="When the run must be over.")] = 720.0,
    max_money: Annotated[float | None, typer.Option(help="What it may cost.")] = None,
    max_gpus: Annotated[int, typer.Option(min=1, help="The largest number of GPUs to try.")] = 1024,
    cluster: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this preset or topology file, again for more; else every preset that has a price.",
            autocompletion=complete_clusters,
        ),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(metavar="CLUSTER=PRICE", help="Your price per GPU and hour; =PRICE: of every cluster."),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file of prices, in the form of presets/prices.toml."),
    ] = None,
    jobs: Jobs = None,
    json_: Annotated[Path | None, json_option("all offers")] = None,
) -> None:
    """Which cluster to rent, and how many GPUs: the cheapest that ends in time, for every preset.

    A coarse search, which simulates the clusters that may be among the cheapest. The cluster of an experiment
    file does not count.
    """
    from zsim.study.rent.rent import rent as find_rents

    overrides = settings(options.set_)
    experiment = None if options.experiment is None else _load(options)
    model = None if experiment is not None or options.model is None else named_model(options.model)
    result = find_rents(
        experiment, model=model, tokens=tokens, samples=samples, epochs=epochs, method=method,
        sequence_length=sequence, batch=batch, clusters=cluster or (), max_hours=max_hours,
        max_money=max_money, max_gpus=max_gpus,
        prices=price or (), price_file=prices, overrides=overrides if experiment is None else None, jobs=jobs,
    )  # fmt: skip
    answer(result.lines(), result.to_dict, json_)
    if not result.offers:
        raise typer.Exit(1)


def _load(options: ExperimentOptions) -> Experiment:
    """The experiment file, on any cluster where it is a training file that names none."""
    from zsim.specs.formats.detect import names_training_file

    assert options.experiment is not None
    if names_training_file(options.experiment):
        options = replace(options, cluster="dgx-h100")
    return options.load()
