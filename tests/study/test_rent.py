"""Which cluster to rent: a coarse search on each, sorted by money."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import zsim
from zsim.engine.simulator import Simulator
from zsim.errors import InputError
from zsim.specs.experiment.load import change_experiment
from zsim.study.rent.rent import RentResult, search_clusters
from zsim.study.rent.search import usual_batch
from zsim.study.tune.evaluate import Evaluator

SMALL = {"model": "llama-3.2-1b", "sequence_length": 1024, "jobs": 1}


@pytest.fixture(scope="module")
def rents() -> RentResult:
    """A fine-tuning of 2M tokens on an A100 in parts of a server, and on eight H100 as AWS rents them."""
    return zsim.rent(tokens="2M", clusters=["dgx-a100-80gb", "aws-p5"], **SMALL)  # type: ignore[arg-type]


def test_money_is_the_price_of_the_gpu_hours(rents: RentResult) -> None:
    """2M tokens are 2e6 / (64 x 1,024) = 30.5 steps."""
    for offer in rents.offers:
        hours = 2e6 / (64 * 1024) * offer.step_seconds / 3600
        assert offer.hours == pytest.approx(hours)
        assert offer.price is not None
        assert offer.money == pytest.approx(hours * offer.gpus * offer.price.gpu_hour_price)


def test_the_cheapest_comes_first(rents: RentResult) -> None:
    money = [offer.money or math.inf for offer in rents.offers]
    assert len(money) == 2
    assert money == sorted(money)


def test_an_instance_is_rented_whole(rents: RentResult) -> None:
    """p5.48xlarge has eight GPUs."""
    gpus = {offer.cluster: offer.gpus for offer in rents.offers}
    assert gpus["aws-p5"] % 8 == 0
    assert gpus["dgx-a100-80gb"] < 8


def test_single_machines_are_not_rented_together() -> None:
    """RunPod lists GeForce cards by the machine of eight, which a year of the run does not fit into."""
    question = {"model": "llama-3.2-1b", "tokens": "1T", "clusters": ["rtx-4090-x8"], "jobs": 1}
    rents = zsim.rent(**question)  # type: ignore[arg-type]
    assert rents.offers == []
    assert [search.offer.gpus for search in rents.late if search.offer] == [8]


def test_the_range_of_money_is_that_of_the_step(rents: RentResult) -> None:
    offer = rents.offers[0].to_dict()
    low, high = offer["money_range"]
    assert low < offer["money"] < high
    step_low, step_high = offer["step_seconds_range"]
    assert high / low == pytest.approx(step_high / step_low)


def test_the_offer_is_what_a_run_of_its_keys_takes(rents: RentResult) -> None:
    """The configuration as `zsim run` has it, in full."""
    offer = rents.offers[0]
    kind = "ddp" if offer.label.startswith("DDP") else "fsdp2"
    experiment = zsim.Experiment(
        model="llama-3.2-1b", cluster=offer.cluster, gpus=offer.gpus,
        training={"sequence_length": 1024}, strategy={"kind": kind},
    )  # fmt: skip
    report = zsim.simulate(change_experiment(experiment, dict(offer.overrides))).report
    assert report.step_seconds == pytest.approx(offer.step_seconds, rel=0.02)
    assert report.verdict.word == offer.verdict.word


def test_a_limit_of_hours_takes_more_gpus(rents: RentResult) -> None:
    """A tenth of the time that the cheapest number of GPUs takes."""
    offer = next(offer for offer in rents.offers if offer.cluster == "dgx-a100-80gb")
    faster = zsim.rent(
        tokens="2M",
        clusters=["dgx-a100-80gb"],
        max_hours=offer.hours / 4,
        **SMALL,  # type: ignore[arg-type]
    )
    assert faster.offers[0].gpus > offer.gpus
    assert faster.offers[0].hours <= offer.hours / 4


def test_what_is_too_slow_or_too_dear_is_said_and_not_offered() -> None:
    slow = zsim.rent(
        tokens="2M",
        clusters=["dgx-a100-80gb"],
        max_hours=1e-4,
        max_gpus=2,
        **SMALL,  # type: ignore[arg-type]
    )
    assert slow.offers == []
    assert [search.cluster for search in slow.late] == ["dgx-a100-80gb"]
    assert "too slow: dgx-a100-80gb" in str(slow)
    dear = zsim.rent(
        tokens="2M",
        clusters=["dgx-a100-80gb"],
        max_money=1e-6,
        **SMALL,  # type: ignore[arg-type]
    )
    assert dear.offers == []
    assert "too dear: dgx-a100-80gb" in str(dear)


def test_what_does_not_fit_is_said() -> None:
    """A model of 70B parameters in full on one GPU of 80 GB, and its states do not fit on the host either."""
    refused = zsim.rent(model="llama-3-70b", tokens="2M", clusters=["rtx-4090-x8"], max_gpus=1, jobs=1)
    assert refused.offers == []
    assert "does not fit" in str(refused)
    assert "rtx-4090-x8" in str(refused)


def test_quantised_adapters_need_less() -> None:
    adapted = zsim.rent(
        model="llama-3.1-8b", tokens="2M", method="qlora", clusters=["rtx-4090-x8"], max_gpus=1,
        sequence_length=1024, jobs=1,
    )  # fmt: skip
    assert adapted.offers[0].gpus == 1
    assert "QLoRA" in str(adapted)


def test_a_cluster_without_a_price_is_sorted_by_gpu_hours() -> None:
    rents = zsim.rent(tokens="2M", clusters=["hgx-h20"], **SMALL)  # type: ignore[arg-type]
    assert rents.offers[0].money is None
    assert rents.offers[0].gpu_hours > 0


def test_a_cluster_that_costs_much_more_by_a_lower_bound_is_not_simulated(rents: RentResult) -> None:
    """Eight H100 cost twice what one A100 does, and no less than what they are skipped for."""
    names = ["aws-p5", "dgx-a100-80gb"]
    evaluator = Evaluator(simulator=Simulator())
    searches = search_clusters(rents.question, rents.prices, names, evaluator, 1.25)
    cheapest, skipped = searches["dgx-a100-80gb"].offer, searches["aws-p5"]
    assert cheapest is not None
    assert skipped.offer is None
    assert skipped.least_outlay is not None
    full = next(offer for offer in rents.offers if offer.cluster == "aws-p5")
    assert 1.25 * cheapest.outlay < skipped.least_outlay <= full.outlay
    found = replace(rents, searches=list(searches.values()))
    assert "dearer by a lower bound, in USD: aws-p5 (from 0." in " ".join(found.lines())


def test_a_gpu_is_rented_by_its_name() -> None:
    rents = zsim.rent(tokens="2M", clusters=["H200"], max_gpus=1, **SMALL)  # type: ignore[arg-type]
    assert [offer.cluster for offer in rents.offers] == ["hgx-h200"]


def test_the_usual_batch_is_that_of_llama_2() -> None:
    """Fine-tuning has 64 sequences, pretraining 4M tokens, which are 1,024 sequences of 4,096."""
    assert usual_batch(20e6, 4096) == 64
    assert usual_batch(1e12, 4096) == 1024
    assert usual_batch(1e12, 3000) == 1024


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "which model"),
        ({"model": "llama-3.2-1b"}, "how long is the run"),
        ({"model": "llama-3.2-1b", "tokens": 0}, "tokens"),
        ({"model": "llama-3.2-1b", "tokens": "2M", "max_money": 0}, "--max-money 0: expected more than 0"),
        ({"model": "llama-3.2-1b", "tokens": "2M", "max_hours": 0}, "--max-hours 0: expected more than 0"),
        ({"model": "llama-3.2-1b", "tokens": "2M", "method": "dora"}, "expected one of full, lora, qlora"),
        ({"model": "llama-3.2-1b", "tokens": "2M", "clusters": ["h1000"]}, "unknown cluster"),
        ({"model": "llama-3.2-1b", "tokens": "2M", "samples": 9}, "both tokens and samples"),
    ],
)
def test_a_wrong_question_is_refused_in_a_sentence(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        zsim.rent(jobs=1, **options)  # type: ignore[arg-type]
