"""`zsim rent`: which cluster to rent, and how many of its GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zsim.commands.options import (
    ExperimentOptions,
    Jobs,
    answer,
    completion_of,
    json_option,
    named_model,
    settings,
    takes_experiment,
)

if TYPE_CHECKING:
    from zsim.specs.experiment.tables import Experiment


@takes_experiment(without=("cluster", "gpu", "nodes", "gpus"))
def rent(
    options: ExperimentOptions,
    tokens: Annotated[str | None, typer.Option(help="Tokens to train on in all (20M, 1T).")] = None,
    samples: Annotated[str | None, typer.Option(help="Sequences of the data set, instead.")] = None,
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
            autocompletion=completion_of("clusters"),
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
