"""torch's own context parallelism makes the calls that its plans have: run_torch_context.py."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.plan.ops import Collective, Kernels
from zsim.plan.workload.issued_work import shared_backward, shared_forward
from zsim.plan.workload.work_part import WorkPart
from zsim.specs.model.spec import Attention, ContextMethod, ContextSharding

SEQUENCES, HEADS, TOKENS, HEAD_DIM = 2, 4, 64, 8  # as there
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]


@cache
def answer() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.plan.run_torch_context"],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def planned(method: ContextMethod, ranks: int, window: int | None = None) -> dict[str, list[list[str | int]]]:
    share = ContextSharding(ranks, method, "torch", has_masks=window is not None)
    work = Attention(HEADS, HEADS, HEAD_DIM, HEAD_DIM, rotary=False, window=window, context=share)
    shape, options = BatchShape(SEQUENCES, TOKENS, ranks), WorkOptions()
    return {
        "forward": events(shared_forward(work, shape, options)),
        "backward": events(shared_backward(work, shape, options)),
    }


def events(parts: tuple[WorkPart, ...]) -> list[list[str | int]]:
    found: list[list[str | int]] = []
    for part in parts:
        if part.work is None:
            found.append(["wait"])
        elif isinstance(part.work, Collective):
            found.append([part.work.kind, part.work.bytes])
        elif isinstance(part.work, Kernels):
            found += [
                [kernel.kind.removeprefix("attention_"), *kernel.shape[1:3]]
                for kernel in part.work.kernels
                if kernel.kind.startswith("attention")
            ]
    return found


@pytest.mark.parametrize("method", ["all-gather", "p2p"])
def test_the_middle_rank_makes_torch_s_calls_in_torch_s_order(method: ContextMethod) -> None:
    compared = 0
    for ranks, rank, found in answer()[method]:
        if rank == ranks // 2:
            assert planned(method, ranks) == found
            compared += 1
    assert compared == 3


@pytest.mark.parametrize("method", ["all-gather", "p2p"])
def test_other_ranks_make_the_same_calls_around_as_much_work(method: ContextMethod) -> None:
    """Ranks 0 and 3 of 4: the same collectives and waits, kernels of other shapes with as many pairs."""
    for ranks, _, found in answer()[method]:
        for direction, own in planned(method, ranks).items():
            theirs = found[direction]
            assert [shape_free(event) for event in theirs] == [shape_free(event) for event in own]
            assert pairs(theirs) == pairs(own)


def test_flex_attention_makes_torch_s_calls_in_torch_s_order() -> None:
    """All ranks alike; a call is waited for before the next, which the plan's calls in line are."""
    for ranks, _, found in answer()["flex"]:
        own = planned("all-gather", ranks, window=16)
        for direction in ("forward", "backward"):
            calls = [event for event in found[direction] if event != ["wait"]]
            assert [event[:2] for event in own[direction]] == calls
            assert found[direction].count(["wait"]) == 2


def shape_free(event: list[str | int]) -> list[str | int]:
    return event[:1] if len(event) == 3 else event


def pairs(found: list[list[Any]]) -> int:
    return sum(event[1] * event[2] for event in found if len(event) == 3)
