"""NVLink domains of several nodes: how a report says that a job does not fill them."""

from __future__ import annotations

import pytest

from zsim.explain.notes import domains_note
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment


def note(count: int, cluster: str = "gb200-nvl72", **placement: object) -> str | None:
    experiment = Experiment(model="llama-3-8b", cluster=cluster, nodes=count, placement=placement)
    return domains_note(resolve(experiment))


@pytest.mark.parametrize("nodes", [18, 36])
def test_a_job_that_fills_its_domains_says_nothing(nodes: int) -> None:
    assert note(nodes) is None


def test_a_job_on_part_of_a_domain_says_how_many_gpus_are_left() -> None:
    """Four of 18 trays of four GPUs: 14 x 4 are left."""
    assert note(4) == (
        "the job has 4 of the 18 nodes of an NVLink domain: 56 of its GPUs are left to others, or empty"
    )


def test_a_job_over_a_domain_and_a_bit_is_uneven() -> None:
    """19 nodes have no equal segments: 18 are in the first domain and one in the second, whose other 17 x 4
    GPUs are left."""
    sentence = note(19)
    assert sentence is not None
    assert "1 to 18 of the 18 nodes of its 2 NVLink domains, unevenly" in sentence
    assert "68 of their GPUs" in sentence


def test_a_job_of_several_domains_has_equal_segments() -> None:
    """20 nodes are twice ten, 256 sixteen times 16."""
    assert "10 of the 18 nodes of each of its 2 NVLink domains" in str(note(20))
    assert "16 of the 18 nodes of each of its 16 NVLink domains" in str(note(256))


def test_equal_parts_of_domains_are_not_uneven() -> None:
    """Nine nodes of each of two domains."""
    found = note(18, nodes=[*range(9), *range(18, 27)], fabric_nodes=36)
    assert found is not None
    assert "9 of the 18 nodes of each of its 2 NVLink domains;" in found
    assert "72 of their GPUs" in found


def test_nodes_of_one_domain_each_have_none_to_fill() -> None:
    assert note(3, "dgx-h100") is None
