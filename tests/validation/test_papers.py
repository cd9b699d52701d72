"""What papers claim, as docs/papers.md has it: a change that moves a claim moves the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from validation.papers.page import TARGET, Values, all_values, page
from validation.papers.paper import Claim, experiment_of, read_papers
from validation.papers.quantities import QUANTITIES

PAPERS = {paper.title: paper for paper in read_papers()}
_ROW_QUANTITIES = {"seconds", "rate"}


@pytest.fixture(scope="module")
def values() -> Values:
    return all_values(list(PAPERS.values()))


def test_the_page_is_the_one_that_the_claims_make(request: pytest.FixtureRequest, values: Values) -> None:
    """`python -m validation.papers.page` writes it."""
    text = page(values)
    if request.config.getoption("--update"):
        TARGET.write_text(text, encoding="utf-8")
    assert Path(TARGET).read_text(encoding="utf-8") == text


@pytest.mark.parametrize("title", PAPERS)
def test_every_claim_says_where_it_is_and_what_is_computed(title: str) -> None:
    paper = PAPERS[title]
    assert paper.read
    assert paper.claims or paper.slips
    for claim in paper.claims:
        assert claim.where, claim.text
        assert claim.quantity in {"", *QUANTITIES, *_ROW_QUANTITIES}, claim.text


def test_zeros_table_comes_out_to_its_digits(values: Values) -> None:
    """Engines simulated, not the formula: DeepSpeed's three stages hold what table 1 says."""
    paper = PAPERS["ZeRO"]
    states = [claim for claim in paper.claims if claim.quantity == "model_states"]
    assert len(states) == 10
    for claim in states:
        assert values[paper.title, claim.text] == pytest.approx(claim.value, rel=0.03), claim.text


def test_what_fits_and_what_does_not_is_as_the_papers_say_but_for_super_offload(values: Values) -> None:
    """With its example's tenth of the states on the GPU zsim needs 97.2 of 96.6 GB."""
    differing = [
        (paper.title, claim.text)
        for paper in PAPERS.values()
        for claim in paper.claims
        if claim.quantity == "fits" and values[paper.title, claim.text] != claim.value
    ]
    assert differing == [("SuperOffload", "Qwen3-14B is fine-tuned whole on one superchip")]


def test_activations_of_a_layer_are_the_equations(values: Values) -> None:
    paper = PAPERS["Reducing activation recomputation"]
    layers = [claim for claim in paper.claims if claim.quantity == "layer_activations"]
    assert len(layers) == 5
    for claim in layers:
        assert values[paper.title, claim.text] == pytest.approx(claim.value, rel=1e-9), claim.text


def test_a_job_takes_the_tables_of_its_base_key_by_key() -> None:
    paper = PAPERS["ZeRO"]
    job = {"base": "partitioned", "strategy": {"config": {"zero_optimization": {"stage": 2}}}}
    tables = experiment_of(paper, job)
    assert tables["strategy"]["config"]["zero_optimization"] == {"stage": 2}
    assert tables["strategy"]["config"]["activation_checkpointing"] == {"partition_activations": True}
    assert paper.jobs["partitioned"]["strategy"]["config"]["zero_optimization"] == {"stage": 1}


def test_a_claim_has_a_job_or_a_row() -> None:
    with pytest.raises(ValueError, match="expected either a job or a row"):
        Claim(text="x", where="table 1", value=1, quantity="peak")
