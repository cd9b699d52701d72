"""The clusters to rent in words: a table by money, and the clusters that are not in it, with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zsim.report.views.result import Column
from zsim.report.views.text.plain import paragraph, table
from zsim.specs.prices import PRICES
from zsim.study.rent.offer import Offer
from zsim.study.rent.rent import Rents
from zsim.study.rent.search import ClusterSearch
from zsim.units import format_amount, format_gpus, format_tokens

_MOST_ROWS = 18
_DETAILED = 3  # rows whose configuration is written out
_MOST_NAMES = 6
_DAY = 24.0
_COLUMNS = [
    Column("cluster", is_left=True), Column("GPUs"), Column("fits", is_left=True), Column("time"),
    Column("80 %"), Column("", is_left=True), Column("money"), Column("80 %"), Column("GPU-hour"),
]  # fmt: skip


def rent_lines(rents: Rents) -> Iterator[str]:
    """The output of `zsim rent`, at most 40 lines of 80 columns."""
    yield from paragraph(subject(rents))
    offers = rents.offers
    yield from paragraph(verdict(rents), indent=2)
    if offers:
        yield ""
        yield from _table(offers, rents.prices.currency)
        yield ""
        for offer in offers[:_DETAILED]:
            yield from paragraph(f"{offer.cluster}: {offer.label}", indent=2)
    yield from _left_out(rents)
    yield from paragraph(_method(rents))


def subject(rents: Rents) -> str:
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


def verdict(rents: Rents) -> str:
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


def _left_out(rents: Rents) -> Iterator[str]:
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


def _method(rents: Rents) -> str:
    used = [rents.prices.cluster.get(search.cluster) for search in rents.searches]
    dates = sorted({price.date for price in used if price is not None and price.date})
    period = "" if not dates else f" of {dates[0]}" + (f" to {dates[-1]}" if dates[-1] != dates[0] else "")
    return (
        f"A coarse search: {rents.num_checked:,} configurations checked, {rents.num_simulated:,} steps "
        f"simulated, by {' and '.join(rents.question.kinds)}; `zsim tune --cluster NAME --gpus N` refines "
        f"one. List prices{period} on demand: zsim/presets/{PRICES.name}"
    )


def rents_to_dict(rents: Rents) -> dict[str, Any]:
    """The object that `zsim rent --json` writes."""
    question = rents.question
    reasons = {
        **{search.cluster: search.reason for search in rents.dearer},
        **{search.cluster: "too slow" for search in rents.late},
        **{offer.cluster: "too dear" for offer in rents.dear},
        **{search.cluster: search.reason for search in rents.refused},
        **dict.fromkeys(rents.without_price, "no price"),
    }
    return {
        "model": rents.model, "tokens": rents.tokens(), "sequence_length": rents.sequence_length,
        "batch_sequences": question.batch, "strategies": list(question.kinds),
        "max_hours": question.max_hours, "max_money": question.max_money, "max_gpus": question.max_gpus,
        "currency": rents.prices.currency,
        "offers": [offer.to_dict() for offer in rents.offers],
        "others": [
            {
                "cluster": name, "reason": reason,
                "offer": next(
                    (search.offer.to_dict() for search in rents.searches
                     if search.cluster == name and search.offer is not None), None,
                ),
            }
            for name, reason in reasons.items()
        ],
        "tried_gpus": {search.cluster: list(search.counts) for search in rents.searches},
        "checked": rents.num_checked, "simulated": rents.num_simulated,
    }  # fmt: skip
