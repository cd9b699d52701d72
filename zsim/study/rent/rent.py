"""Every cluster that has a price, sorted by the money of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from typing import Any, Literal

from zsim.engine.simulator import Simulator
from zsim.errors import InputError, ZsimError
from zsim.report.views.displayable import Displayable
from zsim.report.views.result import Column
from zsim.report.views.text.plain import paragraph, table
from zsim.specs.experiment.load import ExperimentSource, experiment_of, plain_table
from zsim.specs.experiment.tables import CostTable
from zsim.specs.messages import validate_table
from zsim.specs.model.spec import ModelSpec
from zsim.specs.presets import server_of_gpu, topology_preset_names
from zsim.specs.prices import PRICES, PriceList, read_prices
from zsim.specs.strategy.registry import default_kind, values_of
from zsim.study.progress import Counts
from zsim.study.rent.search import (
    ClusterQuestion,
    ClusterSearch,
    Offer,
    RentQuestion,
    method_changes,
    rent_question,
)
from zsim.study.tune.evaluate import Evaluator
from zsim.units import format_amount, format_gpus, format_tokens

# A cluster on which a run costs so many times the cheapest by a lower bound is not looked at any closer: the
# ranges of 80 % of two offers overlap where one costs up to about 1.4 times the other, and steps take up to
# a quarter longer than their bounds.
_DEARER = 1.25

_Stage = Literal["kernels", "plans", "simulation"]


@dataclass(frozen=True, repr=False)
class RentResult(Displayable):
    """The clusters on which a training ends in time, the cheapest first. The others have their reasons."""

    question: RentQuestion
    model: str
    sequence_length: int
    prices: PriceList
    searches: Sequence[ClusterSearch]
    without_price: Sequence[str]
    """The presets that were not looked at, since nobody says what they cost."""
    num_checked: int
    """Configurations whose memory was computed."""
    num_simulated: int

    @property
    def offers(self) -> list[Offer]:
        """The offers in time and within the money, the cheapest first, those without a price last."""
        offers = [search.offer for search in self.searches if search.offer and search.is_in_time]
        affordable = [offer for offer in offers if not self._is_dear(offer)]
        return sorted(affordable, key=lambda offer: (offer.money is None, offer.outlay, offer.cluster))

    @property
    def dear(self) -> list[Offer]:
        """The offers in time that cost more than the limit."""
        offers = [search.offer for search in self.searches if search.offer and search.is_in_time]
        return [offer for offer in offers if self._is_dear(offer)]

    @property
    def late(self) -> list[ClusterSearch]:
        """The clusters on which it fits but does not finish in time."""
        return [search for search in self.searches if search.offer and not search.is_in_time]

    @property
    def refused(self) -> list[ClusterSearch]:
        """The clusters on which nothing fits, or that cannot run it."""
        return [search for search in self.searches if search.offer is None and search.least_outlay is None]

    @property
    def dearer(self) -> list[ClusterSearch]:
        """The clusters that were not simulated, since a run costs much more there, the cheapest first."""
        skipped = [search for search in self.searches if search.least_outlay is not None]
        return sorted(skipped, key=lambda search: search.least_outlay or 0.0)

    def _is_dear(self, offer: Offer) -> bool:
        limit = self.question.max_money
        return limit is not None and offer.money is not None and offer.money > limit

    def records(self) -> Sequence[Mapping[str, Any]]:
        """The offers in time, the cheapest first."""
        return [offer.to_dict() for offer in self.offers]

    def headline(self) -> str:
        return f"{subject(self)}. {verdict(self)}"

    def columns(self) -> Sequence[str]:
        return ("cluster", "gpus", "verdict", "fits_probability", "days", "gpu_hours", "money", "label")

    def lines(self) -> Iterator[str]:
        """The output of `zsim rent`, at most 40 lines of 80 columns."""
        yield from paragraph(subject(self))
        offers = self.offers
        yield from paragraph(verdict(self), indent=2)
        if offers:
            yield ""
            yield from _table(offers, self.prices.currency)
            yield ""
            for offer in offers[:_DETAILED]:
                yield from paragraph(f"{offer.cluster}: {offer.label}", indent=2)
        yield from _left_out(self)
        yield from paragraph(_method(self))

    def to_dict(self) -> dict[str, Any]:
        """The object that `zsim rent --json` writes."""
        question = self.question
        reasons = {
            **{search.cluster: search.reason for search in self.dearer},
            **{search.cluster: "too slow" for search in self.late},
            **{offer.cluster: "too dear" for offer in self.dear},
            **{search.cluster: search.reason for search in self.refused},
            **dict.fromkeys(self.without_price, "no price"),
        }
        return {
            "model": self.model, "tokens": self.tokens(), "sequence_length": self.sequence_length,
            "batch_sequences": question.batch, "strategies": list(question.kinds),
            "max_hours": question.max_hours, "max_money": question.max_money, "max_gpus": question.max_gpus,
            "currency": self.prices.currency,
            "offers": [offer.to_dict() for offer in self.offers],
            "others": [
                {
                    "cluster": name, "reason": reason,
                    "offer": next(
                        (search.offer.to_dict() for search in self.searches
                         if search.cluster == name and search.offer is not None), None,
                    ),
                }
                for name, reason in reasons.items()
            ],
            "tried_gpus": {search.cluster: list(search.counts) for search in self.searches},
            "checked": self.num_checked, "simulated": self.num_simulated,
        }  # fmt: skip

    def tokens(self) -> float:
        """Tokens of the run."""
        tokens = self.question.length.run_tokens(self.sequence_length)
        assert tokens is not None, "a question has a length"
        return tokens


def search_clusters(
    question: RentQuestion, prices: PriceList, names: Sequence[str], evaluator: Evaluator, dearer: float
) -> dict[str, ClusterSearch]:
    """The outcome on each cluster, best first: the cluster that may be the cheapest by what is known of it is
    looked at more closely, until no other can cost less than `dearer` times the cheapest.
    """
    searches: dict[str, ClusterSearch] = {}
    queue: list[tuple[float, int, _Stage]] = []
    questions: dict[int, ClusterQuestion] = {}

    def look(number: int, stage: _Stage) -> None:
        name = names[number]
        try:
            if stage == "kernels":
                price = prices.cluster.get(name)
                questions[number] = ClusterQuestion(question, name, price, prices.currency, evaluator)
                heappush(queue, (questions[number].kernel_outlay(), number, "plans"))
            elif stage == "plans":
                heappush(queue, (questions[number].plan_outlay(), number, "simulation"))
            else:
                searches[name] = questions[number].simulate()
        except ZsimError as error:
            searches[name] = ClusterSearch(name, None, False, (), str(error))

    for number in range(len(names)):
        look(number, "kernels")
    cheapest = inf
    while queue:
        outlay, number, stage = heappop(queue)
        if outlay < inf and outlay > cheapest * dearer:
            searches[names[number]] = questions[number].skip(outlay)
            continue
        look(number, stage)
        search = searches.get(names[number])
        if search is not None and search.offer is not None and search.is_in_time:
            cheapest = min(cheapest, search.offer.outlay)
    return searches


_MOST_ROWS = 18
_DETAILED = 3  # rows whose configuration is written out
_MOST_NAMES = 6
_DAY = 24.0
_COLUMNS = [
    Column("cluster", is_left=True), Column("GPUs"), Column("fits", is_left=True), Column("time"),
    Column("80 %"), Column("", is_left=True), Column("money"), Column("80 %"), Column("GPU-hour"),
]  # fmt: skip


def subject(rents: RentResult) -> str:
    """The title, e.g. "llama-3.1-8b, LoRA: 20M tokens in steps of 64 x 4,096, within 30 days"."""
    question = rents.question
    limits = f"within {format_hours(question.max_hours)}"
    if question.max_money is not None:
        limits += f" and {format_amount(question.max_money)} {rents.prices.currency}"
    return (
        f"{rents.model}{method_label(question.data)}: {format_tokens(rents.tokens())} tokens in steps of "
        f"{question.batch:,} x {rents.sequence_length:,}, {limits}"
    )


def method_label(data: Mapping[str, Any]) -> str:
    """The words on how a model is trained, where that is not in full."""
    lora = data.get("training", {}).get("lora")
    if lora is None:
        return ""
    return ", QLoRA" if lora.get("quantized") else ", LoRA"


def verdict(rents: RentResult) -> str:
    """The cheapest offer, and the others that may be as cheap for all that zsim can tell."""
    if not rents.offers:
        return "no cluster does that: see below"
    best = rents.offers[0]
    text = f"cheapest: {best.cluster}, {format_gpus(best.gpus)}, {format_hours(best.hours)}"
    if best.money is not None:
        text += f", {format_amount(best.money)} {rents.prices.currency}"
        rivals = [offer.cluster for offer in rents.offers[1:] if _may_be_cheaper(offer, best)]
        if rivals:
            text += f"; as cheap within the ranges: {_names(rivals)}"
    return text


def _may_be_cheaper(offer: Offer, best: Offer) -> bool:
    """Whether the two intervals of money overlap."""
    if offer.money is None or best.money is None:
        return False
    return offer.scale(offer.money)[0] < best.scale(best.money)[1]


def format_hours(hours: float) -> str:
    """Hours as minutes, hours or days: "23 min", "4.2 h", "30 days"."""
    if hours < 1:
        return f"{hours * 60:.0f} min" if hours * 60 >= 1 else "1 min"
    return f"{hours:.3g} h" if hours < 2 * _DAY else f"{format_amount(hours / _DAY).removesuffix('.0')} days"


def _table(offers: Sequence[Offer], currency: str) -> Iterator[str]:
    rows = [_cells(offer) for offer in offers[:_MOST_ROWS]]
    columns = [
        Column(currency if column.title == "money" else column.title, is_left=column.is_left)
        for column in _COLUMNS
    ]
    yield from table(columns, rows)
    if len(offers) > _MOST_ROWS:
        yield f"and {len(offers) - _MOST_ROWS} more, which cost more (--json)"


def _cells(offer: Offer) -> list[str]:
    unit, size = (
        ("min", 1 / 60) if offer.hours < 1 else ("h", 1.0) if offer.hours < 2 * _DAY else ("days", _DAY)
    )
    money = offer.money
    fits = f"{offer.verdict.word.removeprefix('fits ')} {offer.verdict.probability * 100:.0f} %"
    return [
        offer.cluster, f"{offer.gpus:,}", fits, format_amount(offer.hours / size),
        _interval(*(value / size for value in offer.scale(offer.hours))), unit,
        "-" if money is None else format_amount(money),
        "" if money is None else _interval(*offer.scale(money)),
        "-" if offer.price is None else f"{offer.price.gpu_hour_price:.2f}",
    ]  # fmt: skip


def _interval(low: float, high: float) -> str:
    return f"{format_amount(low)}-{format_amount(high)}"


def _left_out(rents: RentResult) -> Iterator[str]:
    """Paragraphs on the clusters that are not in the table."""
    late = [
        f"{search.cluster} ({format_hours(search.offer.hours)} on {search.offer.gpus:,})"
        for search in sorted(rents.late, key=_hours)
        if search.offer is not None
    ]
    dear = [f"{offer.cluster} ({format_amount(offer.money)})" for offer in rents.dear]
    dearer = [f"{search.cluster} (from {format_amount(search.least_outlay)})" for search in rents.dearer]
    too_small = [search.cluster for search in rents.refused if search.counts]
    for label, names in (
        (f"dearer by a lower bound, in {rents.prices.currency}", dearer),
        ("too slow", late), ("too dear", dear), ("does not fit on any number that was tried", too_small),
        ("no price", list(rents.without_price)),
    ):  # fmt: skip
        if names:
            hint = " (--price CLUSTER=PRICE, per GPU and hour)" if label == "no price" else ""
            yield from paragraph(f"{label}: {_names(names)}{hint}", indent=2)
    for search in [search for search in rents.refused if not search.counts][:2]:
        yield from paragraph(f"{search.cluster}: {search.reason}", indent=2)


def _hours(search: ClusterSearch) -> float:
    return 0.0 if search.offer is None else search.offer.hours


def _names(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _method(rents: RentResult) -> str:
    used = [rents.prices.cluster.get(search.cluster) for search in rents.searches]
    dates = sorted({price.date for price in used if price is not None and price.date})
    period = "" if not dates else f" of {dates[0]}" + (f" to {dates[-1]}" if dates[-1] != dates[0] else "")
    return (
        f"A coarse search over {' and '.join(rents.question.kinds)}: {rents.num_checked:,} configurations "
        f"checked, {rents.num_simulated:,} steps simulated. `zsim tune --cluster NAME --gpus N` refines "
        f"one. List prices{period} on demand: zsim/presets/{PRICES.name}"
    )


_ANY_CLUSTER = "dgx-h100"  # of an experiment that names none, whose place every cluster takes in turn


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

    Raises InputError without a model or a length, for limits that are not positive, for unknown names, and
    where no cluster can run the training at all.
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
    keys = ("tokens", "samples", "epochs")
    table = {key: value for key, value in {**given_length, **length}.items() if key in keys}
    has_kind = not is_bare or any(key.startswith("strategy.") for key in changes)
    for name, limit in (("--max-hours", max_hours), ("--max-money", max_money)):
        if limit is not None and not limit > 0:
            raise InputError(f"{name} {limit:g}: expected more than 0")
    question = rent_question(
        start, validate_table(table, "rent", CostTable), () if has_kind else values_of("rent.kind"), batch,
        is_usual=is_bare and "training.global_batch_size" not in changes,
    )  # fmt: skip
    question = replace(question, max_hours=max_hours, max_money=max_money, max_gpus=max_gpus)
    price_list = read_prices(None if price_file is None else Path(price_file), prices)
    wanted = [server_of_gpu(name) or name for name in clusters]
    presets = topology_preset_names()
    names = wanted or list(dict.fromkeys([*filter(price_list.cluster.get, presets), *price_list.cluster]))
    if not names:
        raise InputError("rent: no cluster has a price; expected --price CLUSTER=PRICE or --cluster NAME")
    with Counts("checked", "simulated") as progress:
        # Plans hold no hardware, so that clusters share them.
        evaluator = Evaluator(jobs or os.cpu_count() or 1, on_done=progress.update, simulator=Simulator())
        first = question.base(names[0], question.model_ranks, question.kinds[0], evaluator.simulator).job
        by_name = search_clusters(question, price_list, names, evaluator, inf if wanted else _DEARER)
    searches = [by_name[name] for name in names]
    if all(search.offer is None and not search.counts for search in searches):
        raise InputError(f"rent: {searches[0].cluster}: {searches[0].reason}")
    return RentResult(
        question, first.model.name, first.training.sequence_length, price_list, searches,
        () if wanted else [name for name in presets if name not in names],
        evaluator.num_checked, evaluator.num_simulated,
    )  # fmt: skip
