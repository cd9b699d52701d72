"""The reference engine's plan on a real model: volumes of the paper's section 7, states of its figure 1, and
what host memory and files add (that these are the engine's: tests/validation/test_plan_against_engine.py).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import zsim
from zsim.errors import InputError
from zsim.plan.memory.tensors import bytes_before_update
from zsim.plan.ops import Collective, Copy, DriveIo, HostWork, Plan

RANKS = 8


def make_plan(cluster: str = "dgx-h100", **strategy: Any) -> Plan:
    return zsim.make_plan(
        zsim.Experiment(
            model="gpt2",
            cluster=cluster,
            gpus=RANKS,
            training={"sequence_length": 128, "precision": "bf16"},
            strategy={"kind": "reference", "reduce_dtype": "bf16", **strategy},
        )
    )


def moved(plan: Plan, kind: type) -> Counter[str]:
    """Bytes by kind of collective, direction of copies, or direction of reading and writing."""
    counted: Counter[str] = Counter()
    for op in plan.ops:
        if isinstance(op.work, kind):
            assert isinstance(op.work, Collective | Copy | DriveIo)
            name = op.work.kind if isinstance(op.work, Collective) else op.work.direction
            counted[name] += op.work.bytes
    return counted


def padded_bytes(plan: Plan) -> int:
    """Of all gradients in bf16: what is reduced."""
    sent = moved(plan, Collective)
    return sent["reduce_scatter"] or sent["all_reduce"]


@pytest.mark.parametrize(
    ("stage", "gathers", "scatters", "reduces"), [(0, 0, 0, 1), (1, 1, 1, 0), (2, 1, 1, 0), (3, 2, 1, 0)]
)
def test_volume_is_that_of_section_7(stage: int, gathers: int, scatters: int, reduces: int) -> None:
    """An all-reduce is twice a reduce-scatter: 2, 2, 2 and 3 times the parameters."""
    plan = make_plan(stage=stage, keep_gathered=False)
    sent, psi = moved(plan, Collective), padded_bytes(plan)
    assert (sent["all_gather"], sent["reduce_scatter"], sent["all_reduce"]) == (
        gathers * psi, scatters * psi, reduces * psi
    )  # fmt: skip
    assert 124_439_808 * 2 <= psi < 1.001 * 124_439_808 * 2


@pytest.mark.parametrize(
    ("stage", "parts"),
    [(0, (2, 2, 12)), (1, (2, 2, 1.5)), (2, (2, 0.25, 1.5)), (3, (0.25, 0.25, 1.5))],
)
def test_states_are_those_of_figure_1(stage: int, parts: tuple[float, float, float]) -> None:
    """bf16 on 8 ranks: 2 + 2 + 12 bytes per parameter, an eighth of each from its stage on."""
    plan = make_plan(stage=stage)
    held, numel = bytes_before_update(plan), padded_bytes(plan) / 2
    names = ("parameters", "gradients", "optimizer_states")
    assert tuple(held[name] / numel for name in names) == parts


@pytest.mark.parametrize(
    ("reduce_dtype", "expected"), [({}, 16), ({"reduce_dtype": "bf16"}, 16), ({"reduce_dtype": "fp32"}, 18)]
)
def test_model_states_take_the_papers_16_bytes_unless_gradients_are_asked_for_in_fp32(
    reduce_dtype: dict[str, str], expected: int
) -> None:
    """1910.02054, section 3.1: 2 + 2 + 12; gradients in fp32 take 4."""
    experiment = zsim.Experiment(
        model="gpt2",
        cluster="dgx-h100",
        gpus=RANKS,
        training={"sequence_length": 128, "precision": "bf16"},
        strategy={"kind": "reference", "stage": 0, **reduce_dtype},
    )
    held = bytes_before_update(zsim.make_plan(experiment))
    names = ("parameters", "gradients", "optimizer_states")
    assert sum(held[name] for name in names) == pytest.approx(expected * 124_439_808, rel=1e-3)


def test_states_in_host_memory_come_and_go_once() -> None:
    """Stage 2: gradient shards down, updated shards up; the update is the CPU's."""
    plan = make_plan(stage=2, optimizer_place="host")
    shard = padded_bytes(plan) // RANKS
    assert moved(plan, Copy) == {"d2h": shard, "h2d": shard}
    updates = [op.work for op in plan.ops if isinstance(op.work, HostWork) and op.work.kind == "optimizer"]
    assert sum(work.numel for work in updates) == shard // 2
    assert bytes_before_update(plan, "host")["optimizer_states"] == 12 * shard // 2


def test_files_are_read_and_written_as_zero_infinity_does() -> None:
    """Per element: 12 bytes of states and 2 of gradient read, 12 written; the gradient was written before;
    2 of the parameter read for each of two gathers and written once. The two kept units gather once."""
    plan = make_plan(stage=3, optimizer_place="nvme", parameter_place="nvme", keep_gathered=False)
    shard = padded_bytes(plan) // RANKS // 2
    assert moved(plan, DriveIo) == {"read": shard * (12 + 2 + 2 * 2), "write": shard * (12 + 2 + 2)}


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_memory_comes_back_to_its_start(place: str) -> None:
    for stage, parameters in ((1, "device"), (2, "device"), (3, "device"), (3, place)):
        plan = make_plan(stage=stage, optimizer_place=place, parameter_place=parameters)
        left: Counter[tuple[str, str]] = Counter()
        for change in plan.memory:
            left[change.device, change.category] += change.bytes
            assert left[change.device, change.category] >= 0
        assert not any(left.values()), (stage, left)


def test_more_ahead_overlaps_more() -> None:
    """Between nodes, where a gather takes longer than a block."""
    seconds = [
        zsim.simulate(
            zsim.Experiment(
                model="gpt2-xl",
                cluster="dgx-a100-80gb",
                nodes=4,
                training={"sequence_length": 1024, "precision": "bf16"},
                strategy={"kind": "reference", "prefetch": prefetch},
            )
        ).report.step_seconds
        for prefetch in (0, 1)
    ]
    assert seconds[1] < 0.95 * seconds[0]


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"stage": 2, "parameter_place": "host"}, "strategy.parameter_place: found 'host' with stage 2"),
        ({"stage": 0, "optimizer_place": "nvme"}, "strategy.optimizer_place: found 'nvme' with stage 0"),
    ],
)
def test_places_that_have_nothing_are_refused(strategy: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        make_plan(**strategy)
