"""`zsim.rent`: which cluster to rent, and how many of its GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from zsim.errors import InputError
from zsim.report.views.displayable import Displayable
from zsim.specs.experiment.run_cost import CostTable
from zsim.specs.messages import validate_table
from zsim.specs.model.spec import ModelSpec
from zsim.specs.prices import read_prices
from zsim.specs.strategy.choices import default_kind, values_of
from zsim.study.experiment_source import ExperimentSource, experiment_of, plain_table
from zsim.study.progress import Counts
from zsim.study.rent.question import method_changes, rent_question
from zsim.study.rent.rent import Rents, search_rents
from zsim.study.rent.text import rent_lines, rents_to_dict, subject, verdict

_ANY_CLUSTER = "dgx-h100"  # of an experiment that names none, whose place every cluster takes in turn


class RentResult(Displayable, Rents):
    """The clusters on which a training ends in time, the cheapest first."""

    def records(self) -> Sequence[Mapping[str, Any]]:
        """The offers in time, the cheapest first."""
        offers: list[dict[str, Any]] = self.to_dict()["offers"]
        return offers

    def headline(self) -> str:
        return f"{subject(self)}. {verdict(self)}"

    def columns(self) -> Sequence[str]:
        return ("cluster", "gpus", "verdict", "fits_probability", "days", "gpu_hours", "money", "label")

    def lines(self) -> Iterable[str]:
        return rent_lines(self)

    def to_dict(self) -> dict[str, Any]:
        """The object that `zsim rent --json` writes."""
        return rents_to_dict(self)


def rent(
    experiment: ExperimentSource = None,
    *,
    model: str | ModelSpec | None = None,
    tokens: float | str | None = None,
    samples: float | str | None = None,
    epochs: float | None = None,
    method: str | None = None,
    sequence_length: int | None = None,
    batch: int | None = None,
    clusters: Sequence[str] = (),
    max_hours: float = 720.0,
    max_money: float | None = None,
    max_gpus: int = 1024,
    prices: Sequence[str] = (),
    price_file: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    jobs: int | None = None,
) -> RentResult:
    """Find the cheapest clusters for a training of so many tokens or samples, as `zsim rent` does.

    `experiment` is a file, a `zsim.Experiment` or a dict, whose cluster does not count, or None for a `model`
    alone. `method` is full, lora or qlora, by default the experiment's, or full. `batch` is the number of
    sequences of a step. `max_gpus` is the largest number of GPUs to try. `prices` are assignments
    "CLUSTER=PRICE" per GPU and hour, and `price_file` is a file of them.

        rents = zsim.rent(model="llama-3.1-8b", tokens="20M", method="lora")
        rents.offers[0].cluster, rents.offers[0].gpus, rents.offers[0].money

    Raises InputError without a model or a length, for limits that are not positive, and for unknown names.
    """
    changes = dict(overrides or {})
    is_bare = experiment is None
    if is_bare:
        if model is None and "model" not in changes:
            raise InputError("rent: which model? expected --model NAME, or an experiment file")
        experiment = {
            "model": model or changes["model"], "cluster": _ANY_CLUSTER, "gpus": 1,
            "strategy": {"kind": default_kind()},
        }  # fmt: skip
    elif model is not None:
        changes["model"] = model
    if sequence_length is not None:
        changes["training.sequence_length"] = sequence_length
    start = experiment_of(experiment, changes)
    if method is not None:
        training = start.training.model_dump(exclude_unset=True)
        start = experiment_of(start, method_changes(method, training))
    given_length = {} if start.cost is None else plain_table(start.cost)
    length = {"tokens": tokens, "samples": samples, "epochs": epochs}
    length = {key: value for key, value in length.items() if value is not None}
    if length.keys() & {"tokens", "samples"}:
        given_length = {}
    names = ("tokens", "samples", "epochs")
    table = {key: value for key, value in {**given_length, **length}.items() if key in names}
    has_kind = not is_bare or any(key.startswith("strategy.") for key in changes)
    question = rent_question(
        start, validate_table(table, "rent", CostTable), () if has_kind else values_of("rent.kind"),
        batch=batch, is_batch_usual=is_bare and "training.global_batch_size" not in changes,
        max_hours=max_hours, max_money=max_money, max_gpus=max_gpus,
    )  # fmt: skip
    price_list = read_prices(None if price_file is None else Path(price_file), prices)
    with Counts("checked", "simulated") as progress:
        rents = search_rents(
            question, price_list, clusters, jobs=jobs or os.cpu_count() or 1, on_done=progress.update
        )
    return RentResult(**{field.name: getattr(rents, field.name) for field in fields(rents)})
