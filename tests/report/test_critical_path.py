"""The critical path: hand-made steps whose chain can be told by looking, and laws of simulated ones."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from zsim.cost.collectives.rounds import CallLimit
from zsim.cost.kernels.kernel import Kernel
from zsim.engine.simulate import simulate_job
from zsim.explain.report_of import report_of
from zsim.plan.ops import Collective, Copy, DriveIo, Group, HostWork, Kernels, Op, Plan, Program, Work
from zsim.report.critical.causes import OpCauses, critical_seconds
from zsim.report.critical.path import HOST, OTHERS, Link, critical_path
from zsim.specs.cluster.files import load_gpu
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.trace.trace import SpanInfo, SpanInfos, Trace

KERNEL = Kernels((Kernel("copy", 0.0, 1e9),))
GATHER = Collective("all_gather", 1000, "bf16", "world")


def op(stream: str, *after: int, work: Work | None = KERNEL, name: str = "") -> Op:
    return Op(name or stream, stream, work, after)


def step(
    ops: list[Op],
    times: list[list[tuple[float, float, float]]],
    end: float,
    blocks: tuple[tuple[int, float, float, int], ...] = (),
) -> tuple[Plan, Trace]:
    """A plan and its trace: per rank and op with work (issue, start, end); `blocks` name places in that."""
    ranks = len(times)
    flat = [moment for rank in times for moment in rank]
    count = len(times[0])
    plan = Plan.uniform("by hand", ranks, Program("", tuple(ops)), {"world": Group.regular("world", ranks)})
    issued, started, ended = (np.array([moment[i] for moment in flat]) for i in range(3))
    trace = Trace(
        "simulated",
        SpanInfos(SpanInfo(o.name, "compute", o.stream) for o in ops if o.work is not None),
        np.repeat(np.arange(ranks), count),
        np.tile(np.arange(count), ranks),
        issued,
        started,
        ended,
        world_size=ranks,
        step_seconds=end,
        host_blocks=blocks,
    )
    return plan, trace


def chain(plan: Plan, trace: Trace) -> list[tuple[int, int, float, float]]:
    return [(link.rank, link.op, link.start_seconds, link.end_seconds) for link in critical_path(plan, trace)]


def test_the_chain_follows_what_was_waited_for_and_not_what_was_busy() -> None:
    """A gather of 5 s beside a kernel of 2 s; the second kernel needs both: gather, kernel."""
    ops = [op("compute"), op("gather", work=GATHER), op("compute", 1)]
    assert chain(*step(ops, [[(0, 0, 2), (0, 0, 5), (0, 5, 7)]], 7)) == [(0, 1, 0, 5), (0, 2, 5, 7)]


def test_ops_on_one_stream_wait_for_each_other() -> None:
    ops = [op("compute"), op("compute"), op("other")]
    assert chain(*step(ops, [[(0, 0, 2), (0, 2, 6), (0, 0, 1)]], 6)) == [(0, 0, 0, 2), (0, 1, 2, 6)]


def test_what_the_host_issues_late_waits_for_the_host() -> None:
    """The host reaches the second kernel at 3 s, the first was over at 1 s: the host's 3 s, the kernel."""
    ops = [op("compute"), op("compute")]
    assert chain(*step(ops, [[(0, 0, 1), (3, 3, 4)]], 4)) == [(0, HOST, 0, 3), (0, 1, 3, 4)]


def test_a_host_that_was_blocked_hands_on_to_what_it_waited_for() -> None:
    """The host waits for the copy (1 to 4 s), issues for 1 s, then the kernel runs 5 to 6 s."""
    ops = [op("copies", work=Copy("d2h", 1)), op("compute")]
    made = step(ops, [[(1, 1, 4), (5, 5, 6)]], 6, blocks=((0, 1, 4, 0),))
    assert chain(*made) == [(0, HOST, 0, 1), (0, 0, 1, 4), (0, HOST, 4, 5), (0, 1, 5, 6)]


def test_an_op_shorter_than_an_instant_of_a_long_step_is_not_what_it_waited_for() -> None:
    """A step of 1,000 s, whose instant is 1 us: the host issues for 500 s, blocks on a copy of 0.1 us, and
    issues a kernel. The block ends in the copy's own instant, and comes after it all the same."""
    done = 500 + 1e-7
    ops = [op("copies", work=Copy("d2h", 1)), op("compute")]
    made = step(ops, [[(500, 500, done), (done, done, 1000)]], 1000, blocks=((0, 500, done, 0),))
    assert chain(*made) == [(0, HOST, 0, 500), (0, 0, 500, done), (0, 1, done, 1000)]


def test_a_step_may_end_with_its_host() -> None:
    ops = [op("compute")]
    assert chain(*step(ops, [[(1, 1, 2)]], 3, blocks=((0, 1, 2, 0),))) == [
        (0, HOST, 0, 1), (0, 0, 1, 2), (0, HOST, 2, 3),
    ]  # fmt: skip


def test_an_op_without_work_hands_on_what_it_waits_for() -> None:
    """Kernel 2 comes after hook 1, which comes after gather 0."""
    ops = [op("gather", work=GATHER), op("compute", 0, work=None), op("compute", 1)]
    assert chain(*step(ops, [[(0, 0, 3), (0, 3, 4)]], 4)) == [(0, 0, 0, 3), (0, 2, 3, 4)]


def test_a_collective_waits_for_its_last_rank() -> None:
    """Rank 1 computes 4 s instead of 1; the gather is there on rank 0 from 1 s on, but moves 4 to 6 s."""
    ops = [op("compute"), op("gather", 0, work=GATHER), op("compute", 1)]
    times = [
        [(0.0, 0.0, 1.0), (0.0, 1.0, 6.0), (0.0, 6.0, 8.0)],
        [(0.0, 0.0, 4.0), (0.0, 4.0, 6.0), (0.0, 6.0, 7.0)],
    ]
    assert chain(*step(ops, times, 8)) == [(1, 0, 0, 4), (1, 1, 4, 6), (0, 2, 6, 8)]


def test_a_wait_that_nothing_explains_keeps_the_chain_whole() -> None:
    ops = [op("compute"), op("compute")]
    assert chain(*step(ops, [[(0, 0, 1), (0, 3, 4)]], 4)) == [(0, 0, 0, 1), (0, OTHERS, 1, 3), (0, 1, 3, 4)]


def test_an_op_that_began_before_the_step_is_its_beginning() -> None:
    """A steady step: the host issued the kernel in the step before."""
    assert chain(*step([op("compute")], [[(0, 0, 1)]], 1)) == [(0, 0, 0, 1)]


# -- causes ----------------------------------------------------------------------------------------------

GPU = load_gpu("h100-sxm-80gb")
PRODUCT = Kernels((Kernel("gemm", 1e12, 1e6, shape=(8192, 8192, 8192)),))
WORLD = {"world": Group.regular("world", 8)}
WORKS = (PRODUCT, KERNEL, GATHER, Copy("h2d", 1), HostWork("optimizer", 1), DriveIo("read", 1))
PLAN = Plan.uniform("by hand", 8, Program("", tuple(Op("", "s", work) for work in WORKS)), WORLD)
CAUSES = OpCauses(
    PLAN, GPU, {GATHER: CallLimit(1.0, 3.0, "network")}, {"h2d": "dram", "nvme_read": "drive_read"}
)


def seconds(number: int, length: float) -> dict[str, float]:
    return critical_seconds([Link(0, number, 0.0, length)], CAUSES)


def test_kernels_are_put_down_to_the_roof_they_are_under() -> None:
    """The copy's launch gap is 2 us."""
    copy = seconds(1, 1.0)
    assert copy["launch"] == 2e-6
    assert set(copy) == {"hbm", "launch", "interference"}
    assert sum(copy.values()) == pytest.approx(1.0)
    assert "hbm" not in seconds(0, 1.0)


def test_a_collective_is_latency_and_the_tier_that_bounds_it() -> None:
    """Alone: 1 s of latency, 2 s on the cards; what sharing adds is on the cards too."""
    assert seconds(2, 3.0) == {"latency": 1.0, "network": 2.0}
    assert seconds(2, 5.0) == {"latency": 1.0, "network": 4.0}
    assert seconds(2, 1.5) == {"latency": 0.5, "network": 1.0}


def test_what_kernels_can_add_to_a_collective_is_interference_and_the_rest_sharing() -> None:
    """Of 3 s alone, kernels can make 3.5: 0.3 s more are theirs, of 2 s more half a second."""
    plan = Plan.uniform("by hand", 8, Program("", (Op("", "s", GATHER),)), WORLD)
    causes = OpCauses(plan, GPU, {GATHER: CallLimit(1.0, 3.0, "nvlink", 0.5)}, {})
    little = critical_seconds([Link(0, 0, 0.0, 3.3)], causes)
    assert little == pytest.approx({"interference": 0.3, "latency": 1.0, "nvlink": 2.0})
    much = critical_seconds([Link(0, 0, 0.0, 5.0)], causes)
    assert much == pytest.approx({"interference": 0.5, "latency": 1.0, "nvlink": 3.5})


def test_offloaded_work_is_put_down_to_what_bounds_it() -> None:
    assert seconds(3, 2.0) == {"host memory": 2.0}
    assert seconds(4, 2.0) == {"cpu": 2.0}
    assert seconds(5, 2.0) == {"drives": 2.0}
    assert seconds(HOST, 2.0) == {"host": 2.0}
    assert seconds(OTHERS, 2.0) == {"others": 2.0}


def test_causes_come_in_one_order_with_spines_after_the_cards() -> None:
    plan = Plan.uniform("by hand", 8, Program("", (Op("", "s", GATHER),)), WORLD)
    spine = OpCauses(plan, GPU, {GATHER: CallLimit(1.0, 3.0, "leaf-spine")}, {})
    links = [Link(0, HOST, 0, 1), Link(0, 0, 1, 4)]
    assert list(critical_seconds(links, spine)) == ["latency", "leaf-spine", "host"]


# -- simulated steps -------------------------------------------------------------------------------------

OFFLOAD = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "strategy",
    [
        {"kind": "ddp"}, {"kind": "fsdp1"}, {"kind": "fsdp2"}, {"kind": "fsdp2", "replicate": 2},
        {"stage": 1}, {"stage": 2}, {"stage": 3}, {"kind": "deepspeed", "config": OFFLOAD},
    ],
    ids=str,
)  # fmt: skip
def test_the_chain_of_a_simulated_step_covers_it_without_gaps(strategy: dict[str, Any]) -> None:
    experiment = Experiment(
        model="gpt2", cluster="dgx-h100", nodes=2, training={"sequence_length": 512}, strategy=strategy
    )
    outcome = simulate_job(resolve(experiment))
    links = critical_path(outcome.plan, outcome.trace)
    assert links[0].start_seconds == 0
    assert links[-1].end_seconds == pytest.approx(outcome.trace.step_seconds)
    for one, other in pairwise(links):
        assert one.end_seconds == pytest.approx(other.start_seconds, abs=1e-12)
    chained = report_of(outcome, 1.0).critical_path_seconds
    assert chained is not None
    assert sum(chained.values()) == pytest.approx(outcome.trace.step_seconds)
    assert "others" not in chained


def test_the_chain_covers_no_more_than_the_step_of_ranks_that_do_not_begin_together() -> None:
    """Rank 0 begins its next step while rank 1 is at the last: that is not part of the step."""
    experiment = Experiment(
        model="llama-3.2-1b",
        cluster="dgx-h100",
        nodes=1,
        training={"sequence_length": 512},
        strategy={"kind": "fsdp2"},
        faults={"slow_gpus": {"1": 3.0}},
    )
    outcome = simulate_job(resolve(experiment))
    (late,) = set(outcome.trace.begins.values())
    assert late > 0.03 * outcome.trace.step_seconds
    chained = report_of(outcome, 1.0).critical_path_seconds
    assert chained is not None
    assert sum(chained.values()) == pytest.approx(outcome.trace.step_seconds)
    assert "host" not in chained


def test_folded_and_unfolded_steps_have_the_same_causes() -> None:
    job = resolve(Experiment(model="gpt2", cluster="dgx-h100", nodes=2, strategy={"stage": 3}))
    folded, unfolded = (
        report_of(simulate_job(job, unfold=unfold), 1.0).critical_path_seconds for unfold in (False, True)
    )
    assert folded == pytest.approx(unfolded)


@pytest.mark.parametrize(
    ("faults", "rank", "cause"),
    [
        ({"slow_gpus": {"13": 1.5}}, 13, "interference"),
        ({"links": {"node1.nic0": {"bandwidth_fraction": 0.1}}}, 0, "network"),
    ],
)
def test_the_chain_goes_through_what_is_slow(faults: dict[str, Any], rank: int, cause: str) -> None:
    """On 16 GPUs: a slow GPU is what the others wait for, a slow card what every collective does."""
    training = {"sequence_length": 1024}
    job = resolve(
        Experiment(model="llama-2-7b", cluster="dgx-h100", nodes=2, training=training, faults=faults)
    )
    sound = resolve(Experiment(model="llama-2-7b", cluster="dgx-h100", nodes=2, training=training))
    outcome = simulate_job(job)
    chained, before = (report_of(o, 1.0).critical_path_seconds or {} for o in (outcome, simulate_job(sound)))
    assert {link.rank for link in critical_path(outcome.plan, outcome.trace, outcome.communicators)} == {rank}
    gained = {name: chained.get(name, 0) - before.get(name, 0) for name in {*chained, *before}}
    assert max(gained, key=lambda name: gained[name]) == cause
