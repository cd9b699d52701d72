"""Writes docs/papers.md: what papers claim, and what zsim says for the same.

python -m validation.papers.page
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap

from validation.papers.paper import Claim, Paper, Slip, experiment_of, read_papers
from validation.papers.quantities import QUANTITIES, zsim_value

TARGET = Path(__file__).resolve().parents[2] / "docs" / "papers.md"

HEAD = """\
# What papers claim

Numbers of papers and zsim's for the same experiment; nothing in zsim was fitted to them. The ratio is
zsim's over the paper's. `python -m validation.papers.page` writes this page from `validation/papers/`.
"""


def main() -> None:
    TARGET.write_text(page(), encoding="utf-8")
    print(f"wrote {TARGET}")


Values = Mapping[tuple[str, str], float | None]


def page(values: Values | None = None) -> str:
    """The text of the page, with zsim's `values` by paper and claim."""
    papers = read_papers()
    values = all_values(papers) if values is None else values
    return "\n".join([HEAD, *(line for paper in papers for line in _section(paper, values))]) + "\n"


def all_values(papers: Sequence[Paper]) -> Values:
    """What zsim says for every claim, by the paper's title and the claim's text."""
    return {(paper.title, claim.text): zsim_value(paper, claim) for paper in papers for claim in paper.claims}


def _section(paper: Paper, values: Values) -> Iterator[str]:
    yield f"## {paper.title}"
    yield ""
    if paper.kind == "paper":
        first, *others = paper.authors.replace(" and others", ", others").split(", ")
        authors = f"{first} and others" if others else first
        yield from wrap(f"{authors} ({paper.year}), {paper.reference}. {paper.read}", 120)
    else:
        yield from wrap(paper.read, 120)
    yield ""
    if paper.claims:
        places = dict.fromkeys(claim.where for claim in paper.claims)
        where, rule = ("where | ", "---|") if len(places) > 1 else ("", "")
        if not where:
            yield from (f"Where: {next(iter(places))}.", "")
        yield f"| claim | {where}paper | zsim | ratio |"
        yield f"|---|{rule}---:|---:|---:|"
        for claim in paper.claims:
            place = f"{claim.where} | " if where else ""
            yield f"| {claim.text} | {place}{_cells(claim, values[paper.title, claim.text])} |"
        yield ""
    notes = list(dict.fromkeys(claim.note for claim in paper.claims if claim.note))
    for note in notes:
        yield from wrap(note, 120, initial_indent="- ", subsequent_indent="  ")
    if notes:
        yield ""
    if paper.slips:
        yield "| said | the sum |"
        yield "|---|---|"
        yield from (_slip(paper, slip) for slip in paper.slips)
        yield ""


def _cells(claim: Claim, value: float | None) -> str:
    """The paper's value, zsim's, and their ratio."""
    unit = f" {claim.unit}" if claim.unit else ""
    if claim.quantity == "fits":
        paper, ours = ("fits" if number else "does not fit" for number in (claim.value, value))
        return f"{paper} | {ours} | {'' if claim.value == value else 'no'}"
    number, ratio = ("", "not compared") if value is None else (_number(value) + unit, _ratio(value, claim))
    return f"{_number(claim.value)}{unit} | {number} | {ratio}"


def _ratio(value: float, claim: Claim) -> str:
    return f"{value / claim.value:.2f}"


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 100 else f"{value:.1f}".removesuffix(".0")


def _slip(paper: Paper, slip: Slip) -> str:
    claim = Claim(text="", where="", value=0, quantity=slip.quantity, job=slip.job)
    value = QUANTITIES[slip.quantity](claim, experiment_of(paper, slip.job))
    return f"| {slip.text} | {slip.right.replace('{}', _number(value))} |"


if __name__ == "__main__":
    main()
