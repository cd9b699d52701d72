"""ZeRO-3 of the spring of 2021: the plan that its threads describe, and the published curve it explains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import zsim
from validation.scaling.early_zero3 import PUBLISHED_SECONDS, early_plan, seconds_of
from zsim.plan.ops import Collective, Kernels, Plan

PAGE = Path(__file__).parents[2] / "validation" / "scaling" / "README.md"


def small() -> Plan:
    return zsim.make_plan(
        zsim.Experiment(
            model={
                "model_type": "gpt2",
                "n_embd": 512,
                "n_layer": 2,
                "n_head": 8,
                "n_positions": 512,
                "vocab_size": 4096,
            },
            cluster="dgx-a100-80gb",
            nodes=2,
            training={"sequence_length": 512},
            strategy={"kind": "deepspeed", "stage": 3},
        )
    )


def test_every_gather_waits_for_all_before_it_and_is_copied_out_rank_by_rank() -> None:
    """16 ranks: 16 copies and one more after each gather; nothing else is added."""
    plan = small()
    early = early_plan(plan)
    gathers = [op for op in plan.ops if isinstance(op.work, Collective) and op.work.kind == "all_gather"]
    assert len(early.ops) == len(plan.ops) + 2 * len(gathers)
    for number, op in enumerate(early.ops):
        if isinstance(op.work, Collective) and op.work.kind == "all_gather":
            assert [early.ops[number + more].launches for more in (1, 2)] == [16, 1]
            streams = {earlier.stream for earlier in early.ops[:number] if earlier.work is not None}
            assert {early.ops[wait].stream for wait in op.host_waits} == streams


def test_what_was_waited_for_and_held_is_the_same_by_its_new_number() -> None:
    plan = small()
    early = early_plan(plan)
    added = re.compile(r"cop(y|ies) of all_gather")
    kept = [number for number, op in enumerate(early.ops) if not added.match(op.name)]
    assert [early.ops[number].name for number in kept] == [op.name for op in plan.ops]
    for place, op in enumerate(plan.ops):
        waited = [early.ops[number].name for number in early.ops[kept[place]].after]
        assert [re.sub(r"^copy of ", "", name) for name in waited] == [plan.ops[n].name for n in op.after]
    assert [change.bytes for change in early.memory] == [change.bytes for change in plan.memory]
    assert all(change.op <= len(early.ops) for change in early.memory)
    assert all(isinstance(op.work, Kernels) for op in early.ops if added.match(op.name))


@pytest.fixture(scope="module")
def seconds() -> dict[int, dict[str, float]]:
    return {gpus: seconds_of(gpus, size) for gpus, size in ((768, 2), (1536, 1))}


def test_the_published_step_takes_as_long_on_twice_the_gpus_and_so_does_the_early_one(
    seconds: dict[int, dict[str, float]],
) -> None:
    """Published: 66.7 s on both. Today's schedule would gain a third; the early one gains nothing."""
    early = [seconds[gpus]["early"] for gpus in (768, 1536)]
    assert PUBLISHED_SECONDS[768] == PUBLISHED_SECONDS[1536]
    assert early[1] == pytest.approx(early[0], rel=0.06)
    assert seconds[1536]["today"] < 0.75 * seconds[768]["today"]


def test_the_page_has_these_times(seconds: dict[int, dict[str, float]]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for gpus, found in seconds.items():
        row = re.search(rf"^\| {gpus} \| 66\.7 \| (.+) \| (.+) \| (.+) \|$", text, re.MULTILINE)
        assert row is not None
        shown = [float(cell) for cell in row.groups()]
        assert shown == pytest.approx([found[name] for name in ("today", "nothing ahead", "early")], abs=0.3)
