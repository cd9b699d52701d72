"""The plan of one rank of a pipeline, as text and as data: 4 stages of 2 replicas, 3 micro-batches."""

from __future__ import annotations

import pytest
from rich.console import Console

from tests.pipelines import one_f_one_b, pipeline_plan
from zsim.cost.kernels.kernel import Kernel
from zsim.errors import InputError
from zsim.plan.ops import Plan
from zsim.report.views.text.plan import plan_to_dict, print_plan


def plan() -> Plan:
    return pipeline_plan(one_f_one_b, 4, 3, (Kernel("copy", 0.0, 3e9),) * 2, replicas=2)


def printed(rank: int | None, limit: int = 0) -> str:
    console = Console(record=True, width=80, highlight=False)
    print_plan(plan(), limit=limit, rank=rank, console=console)
    return console.export_text()


def test_a_rank_has_its_own_program_and_its_communicators() -> None:
    """Rank 5 is the second replica of stage 2, between ranks 3 and 7."""
    found = plan_to_dict(plan(), 5)
    assert (found["rank"], found["name"]) == (5, "pipeline rank 2")
    assert found["communicators"] == {
        "pipeline": [1, 3, 5, 7], "data": [4, 5], "pipeline 1-2": [3, 5], "pipeline 2-3": [5, 7],
    }  # fmt: skip
    whole = plan_to_dict(plan())["programs"][2]
    assert found["ops"] == whole["ops"]
    assert found["actions"] == whole["actions"]
    assert [row["action"] for row in found["actions"]] == ["2F0", "2F1", "2B0", "2F2", "2B1", "2B2"]
    assert [found["ops"][row["op"]]["name"] for row in found["actions"]] == [
        "F0",
        "F1",
        "B0",
        "F2",
        "B1",
        "B2",
    ]


def test_a_rank_s_program_is_printed_alone() -> None:
    text = printed(5)
    assert "rank 5 is in pipeline 1, 3, 5, 7; data 4-5; " in text
    assert "pipeline rank 2 (2 ranks)" in text
    assert "2F0 2F1 2B0 2F2 2B1 2B2\n" in text
    assert "pipeline rank 1" not in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "2F0 2F1 and 4 more" in printed(5, limit=2)


def test_all_programs_are_printed_without_a_rank() -> None:
    text = printed(None)
    assert [f"pipeline rank {number} (2 ranks)" in text for number in range(4)] == [True] * 4


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_that_there_is_not_is_refused(rank: int) -> None:
    with pytest.raises(InputError, match=f"--rank: found {rank}, expected 0 to 7"):
        plan_to_dict(plan(), rank)
    with pytest.raises(InputError, match=f"--rank: found {rank}, expected 0 to 7"):
        printed(rank)


def test_a_rank_may_be_in_no_group() -> None:
    alone = plan().programs[0]
    uniform = Plan.uniform("by hand", 2, alone, {})
    assert plan_to_dict(uniform, 1)["communicators"] == {}
