"""The executor on hand-made plans: streams, events, the host, shared GPUs, collectives.

Kernels are copies of so many bytes, so that `seconds_of` prices them as the engine does; a host op costs
nothing and a kernel the cluster's `seconds_per_launch`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zsim.cost.kernels.kernel import Kernel
from zsim.cost.rates.gpu import KernelPricer
from zsim.engine.simulate import Outcome, simulate_job
from zsim.errors import StuckError
from zsim.fluid.pool import FluidPool
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.ops import Group, Memory, Message, Op, Plan, PointToPoint, Program
from zsim.specs.experiment.faults import FaultsTable
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

LONG = Kernel("copy", 0.0, 3e9)  # about a millisecond on an H100
SHORT = Kernel("copy", 0.0, 1e9)


def job_of(
    gpus: int = 8, slowdown: float = 1.0, communication: float = 1.0, cluster: str = "dgx-h100"
) -> Job:
    job = resolve(Experiment(model="llama-2-7b", cluster=cluster, gpus=gpus))
    gpu = job.cluster.gpu
    update = {"compute_slowdown": slowdown, "communication_slowdown": communication}
    interference = gpu.interference.model_copy(update=update)
    changed = job.cluster.model_copy(update={"gpu": gpu.model_copy(update={"interference": interference})})
    return replace(job, cluster=changed)


JOB = job_of()
LAUNCH = JOB.cluster.host.seconds_per_launch
EXACT: dict[str, Any] = {"rel": 1e-9, "abs": 1e-15}


def seconds_of(*kernels: Kernel) -> float:
    pricer = KernelPricer(JOB.cluster.gpu)
    return sum(pricer.seconds(kernel) for kernel in kernels)


def builder() -> PlanBuilder:
    return PlanBuilder([Group.regular("world", 8)])


def run(plan: PlanBuilder | Plan, job: Job = JOB, *, unfold: bool = False) -> Outcome:
    if isinstance(plan, PlanBuilder):
        plan = plan.finish("test", job.world_size, [Memory("parameters", 1)])
    return simulate_job(job, plan=plan, unfold=unfold)


def spans(outcome: Outcome, rank: int = 0) -> dict[str, tuple[float, float]]:
    """Start and end by name."""
    trace = outcome.trace
    return {
        trace.infos[info].name: (start, end)
        for owner, info, start, end in zip(
            trace.ranks, trace.info_indices, trace.start_seconds, trace.end_seconds, strict=True
        )
        if owner == rank
    }


def test_a_kernel_starts_when_it_is_issued_and_takes_its_price() -> None:
    b = builder()
    b.kernels("k", [LONG])
    start, end = spans(run(b))["k"]
    assert start == pytest.approx(LAUNCH, **EXACT)
    assert end - start == pytest.approx(seconds_of(LONG), **EXACT)


def test_a_stream_runs_its_ops_in_order_and_back_to_back() -> None:
    """Issuing is shorter than running, so the second waits for the first and not for the host."""
    b = builder()
    b.kernels("first", [LONG])
    b.kernels("second", [SHORT])
    times = spans(run(b))
    assert times["second"][0] == times["first"][1]


def test_tiny_kernels_are_bound_by_the_host() -> None:
    """100 launches of nothing much: the last starts when the host has issued them all."""
    b = builder()
    for number in range(100):
        b.kernels(str(number), [Kernel("copy", 0.0, 1.0)])
    tiny = seconds_of(Kernel("copy", 0.0, 1.0))
    times = spans(run(b))
    assert times["99"][0] == pytest.approx(100 * max(LAUNCH, tiny), rel=0.05)
    assert times["99"][0] >= 100 * LAUNCH * (1 - 1e-9)


def test_an_event_holds_an_op_on_another_stream() -> None:
    b = builder()
    first = b.kernels("first", [LONG])
    b.stream_wait("side", first)
    b.kernels("second", [SHORT], stream="side")
    times = spans(run(b))
    assert times["second"][0] == times["first"][1]


def test_an_op_waits_for_hundreds_of_others() -> None:
    """300 do not fit into the byte that most programs' counts fit into."""
    b = builder()
    others = [b.kernels(str(n), [SHORT], stream=f"stream {n}") for n in range(300)]
    for other in others:
        b.stream_wait("side", other)
    b.kernels("last", [SHORT], stream="side")
    times = spans(run(b))
    assert times["last"][0] == max(times[str(n)][1] for n in range(300))


def test_the_host_blocks_until_the_event_and_issues_then() -> None:
    """What follows starts a launch after the end of what the host waited for."""
    b = builder()
    first = b.kernels("first", [LONG])
    b.host_wait(first)
    b.kernels("second", [SHORT])
    outcome = run(b)
    times = spans(outcome)
    assert times["second"][0] == pytest.approx(times["first"][1] + LAUNCH, **EXACT)
    ((rank, start, end, _op),) = outcome.trace.host_blocks
    assert rank == 0
    assert start == pytest.approx(LAUNCH, **EXACT)
    assert end == pytest.approx(times["first"][1], **EXACT)


def test_a_host_that_comes_late_does_not_block() -> None:
    """A framework event of 3 ms on the reference CPU ("step") lasts longer than the kernel it waits for."""
    b = builder()
    first = b.kernels("first", [SHORT])
    b.host("hook", overhead="step")
    b.host_wait(first)
    b.kernels("second", [SHORT])
    assert run(b).trace.host_blocks == ()


def test_two_kernels_at_once_share_the_gpu() -> None:
    """Both run at half speed; with equal work they end together, after twice the time (and the host's lag
    between the two launches)."""
    b = builder()
    b.kernels("one", [LONG])
    b.kernels("other", [LONG], stream="side")
    times = spans(run(b))
    assert times["other"][1] == pytest.approx(LAUNCH + 2 * seconds_of(LONG), **EXACT)
    assert times["one"][1] == pytest.approx(2 * LAUNCH + 2 * (seconds_of(LONG) - LAUNCH), **EXACT)


def test_the_longer_of_two_has_the_gpu_to_itself_again() -> None:
    """Work is conserved: both are done when their sum is."""
    b = builder()
    b.kernels("long", [LONG])
    b.kernels("short", [SHORT], stream="side")
    times = spans(run(b))
    assert times["short"][1] == pytest.approx(2 * LAUNCH + 2 * seconds_of(SHORT), **EXACT)
    assert times["long"][1] == pytest.approx(LAUNCH + seconds_of(LONG) + seconds_of(SHORT), **EXACT)


def collective(b: PlanBuilder, name: str = "gather", full_bytes: int = 10**8) -> int:
    return b.collective("all_gather", full_bytes, "bf16", "world", stream="comm", name=name)


def alone(full_bytes: int = 10**8) -> float:
    b = builder()
    collective(b, full_bytes=full_bytes)
    start, end = spans(run(b))["gather"]
    return end - start


def test_kernels_run_slower_while_a_collective_is_under_way() -> None:
    """By the GPU's factor, here 1.5: of a kernel that starts with a gathering of c seconds, c / 1.5 is done
    when it ends, and the rest takes as long as ever. The gathering itself is not slowed."""
    b = builder()
    collective(b)
    b.kernels("kernel", [LONG])
    times = spans(run(b, job_of(slowdown=1.5)))
    assert times["gather"][1] - times["gather"][0] == pytest.approx(alone(), **EXACT)
    overlap = times["gather"][1] - times["kernel"][0]
    expected = times["gather"][1] + seconds_of(LONG) - overlap / 1.5
    assert times["kernel"][1] == pytest.approx(expected, **EXACT)


def test_kernels_and_what_copy_engines_send_do_not_disturb_each_other() -> None:
    """A message by copy engines beside a kernel: both take as long as alone, where NCCL's slows the kernel
    and is slowed."""
    taken = {}
    for by_copy_engine in (False, True):
        b = builder()
        messages = (Message("send", 10**9, 1), Message("recv", 10**9, -1))
        work = PointToPoint(messages, "bf16", "world", by_copy_engine=by_copy_engine)
        b.communicate("ring", "comm", work)
        b.kernels("kernel", [LONG])
        times = spans(run(b, job_of(slowdown=1.5, communication=1.5)))
        taken[by_copy_engine] = {name: end - start for name, (start, end) in times.items()}
    assert taken[True]["kernel"] == pytest.approx(seconds_of(LONG), **EXACT)
    assert taken[False]["kernel"] > 1.2 * seconds_of(LONG)
    assert taken[False]["ring"] > 1.2 * taken[True]["ring"]


def test_a_collective_that_comes_later_slows_the_kernel_from_then_on() -> None:
    """The gathering waits for a short kernel beside the long one (each at half speed until then), and slows
    what is left of the long one while it lasts."""
    b = builder()
    b.kernels("long", [LONG])
    short = b.kernels("short", [Kernel("copy", 0.0, 1e8)], stream="side")
    b.stream_wait("comm", short)
    collective(b)
    times = spans(run(b, job_of(slowdown=1.5)))
    gather = times["gather"]
    assert gather[0] >= times["short"][1]
    before = gather[0] - times["long"][0] - (times["short"][1] - times["short"][0]) / 2
    during = gather[1] - gather[0]
    left = seconds_of(LONG) - before - during / 1.5
    assert left > 0
    assert times["long"][1] == pytest.approx(gather[1] + left, **EXACT)


def test_a_kernel_that_ends_during_a_collective_is_slowed_to_its_end() -> None:
    """It starts first, and the gathering outlasts it."""
    b = builder()
    b.kernels("kernel", [LONG])
    collective(b, full_bytes=10**10)
    times = spans(run(b, job_of(slowdown=1.5)))
    before = times["gather"][0] - times["kernel"][0]
    assert times["kernel"][1] < times["gather"][1]
    expected = times["gather"][0] + 1.5 * (seconds_of(LONG) - before)
    assert times["kernel"][1] == pytest.approx(expected, **EXACT)


def test_with_a_factor_of_one_they_do_not_disturb_each_other() -> None:
    b = builder()
    collective(b)
    b.kernels("kernel", [LONG])
    start, end = spans(run(b))["kernel"]
    assert end - start == pytest.approx(seconds_of(LONG), **EXACT)


def latency_of(outcome: Outcome) -> float:
    (call,) = outcome.call_limits.values()
    return call.latency_seconds


def test_a_collective_takes_longer_while_kernels_run_on_its_gpus() -> None:
    """By the GPU's factor, here 1.5, but for the rounds in which its messages are on their way."""
    b = builder()
    collective(b)
    b.kernels("kernel", [LONG, LONG])
    outcome = run(b, job_of(communication=1.5))
    times = spans(outcome)
    assert times["kernel"][1] > times["gather"][1]
    latency = latency_of(outcome)
    expected = latency + 1.5 * (alone() - latency)
    assert times["gather"][1] - times["gather"][0] == pytest.approx(expected, **EXACT)
    assert times["kernel"][1] - times["kernel"][0] == pytest.approx(seconds_of(LONG, LONG), **EXACT)


def test_a_collective_is_slowed_from_the_first_kernel_to_the_last() -> None:
    """The gathering outlasts two kernels with the host's pause between them: c (1 - 1 / 1.5) is lost to each
    c that they run."""
    b = builder()
    collective(b, full_bytes=10**10)
    first = b.kernels("first", [SHORT])
    b.host_wait(first)
    b.kernels("second", [SHORT])
    times = spans(run(b, job_of(communication=1.5)))
    assert times["second"][0] > times["first"][1]
    latency = latency_of(run_alone(10**10))
    began = times["gather"][0] + latency
    beside = times["second"][1] - times["second"][0] + times["first"][1] - max(times["first"][0], began)
    expected = alone(10**10) + beside * (1 - 1 / 1.5)
    assert times["gather"][1] - times["gather"][0] == pytest.approx(expected, **EXACT)


def test_kernels_that_follow_each_other_at_once_are_one_disturbance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 back to back, the first turns the GPU busy and the last idle: two changes of rate."""
    changes: list[float] = []
    change = FluidPool.change

    def counted(pool: FluidPool, *args: Any) -> None:
        changes.append(pool.env.now)
        change(pool, *args)

    monkeypatch.setattr(FluidPool, "change", counted)
    b = builder()
    collective(b, full_bytes=10**10)
    for number in range(20):
        b.kernels(str(number), [Kernel("copy", 0.0, 3e8)])
    times = spans(run(b, job_of(communication=1.5)))
    began = times["gather"][0] + latency_of(run_alone(10**10))
    expected = [time for time in (times["0"][0], times["19"][1]) if time > began]
    assert changes == expected
    assert expected[-1] == times["19"][1]


def test_what_cards_send_is_not_slowed() -> None:
    """16 GPUs of two AWS p4d: four cards of 100 Gb/s per node bound it, NVLink at two thirds has room."""
    took = []
    for communication in (1.0, 1.5):
        b = PlanBuilder([Group.regular("world", 16)])
        b.collective("all_gather", 10**9, "bf16", "world", stream="comm", name="gather")
        b.kernels("kernel", [LONG] * 60)
        times = spans(run(b, job_of(16, communication=communication, cluster="aws-p4d")))
        assert times["kernel"][1] > times["gather"][1]
        took.append(times["gather"][1] - times["gather"][0])
    assert took[0] == took[1]


def test_one_busy_rank_slows_the_collective_of_all_folded_or_not() -> None:
    """Rank 3 is slow, so its kernel runs on while the others' GPUs are idle already and wait for the next."""
    faults = {"slow_gpus": {"3": 3.0}}
    job = job_of(communication=1.5)
    job = replace(job, faults=FaultsTable(**faults))
    steps = []
    for unfold in (False, True):
        b = builder()
        collective(b, full_bytes=10**9)
        b.kernels("kernel", [LONG, LONG])
        times = spans(run(b, job, unfold=unfold))
        steps.append(times["gather"])
    assert steps[0] == steps[1]
    latency = latency_of(run_alone(10**9))
    assert steps[0][1] - steps[0][0] == pytest.approx(latency + 1.5 * (alone(10**9) - latency), **EXACT)


def run_alone(full_bytes: int) -> Outcome:
    b = builder()
    collective(b, full_bytes=full_bytes)
    return run(b)


def test_two_communicators_on_the_same_links_share_them() -> None:
    """Each alone takes latency and bytes over bandwidth; at once they end later than alone and sooner than
    one after the other."""
    b = PlanBuilder([Group.regular("world", 8), Group.regular("again", 8)])
    b.collective("all_gather", 10**9, "bf16", "world", stream="comm", name="one")
    b.collective("all_gather", 10**9, "bf16", "again", stream="other", name="two")
    times = spans(run(b))
    single = alone(10**9)
    for name in ("one", "two"):
        took = times[name][1] - times[name][0]
        assert 1.9 * single < took < 2 * single


def test_one_communicator_runs_one_collective_at_a_time() -> None:
    """Whatever the streams: the second is done when both have had the links to themselves."""
    b = builder()
    b.collective("all_gather", 10**9, "bf16", "world", stream="comm", name="one")
    b.collective("all_gather", 10**9, "bf16", "world", stream="other", name="two")
    times = spans(run(b))
    assert times["one"][1] - times["one"][0] == pytest.approx(alone(10**9), **EXACT)
    assert times["two"][1] == pytest.approx(times["one"][1] + alone(10**9), **EXACT)


def test_collectives_on_one_stream_queue_up() -> None:
    b = builder()
    collective(b, "one")
    collective(b, "two")
    times = spans(run(b))
    assert times["two"][0] == times["one"][1]


def test_every_rank_has_its_own_spans_when_unfolded() -> None:
    b = builder()
    b.kernels("k", [LONG])
    collective(b)
    outcome = run(b, unfold=True)
    assert outcome.stats.rank_classes == 8
    assert [spans(outcome, rank) for rank in range(8)] == [spans(outcome)] * 8


def test_an_op_without_work_takes_no_time_but_the_hosts() -> None:
    b = builder()
    b.host("hook")
    assert run(b).trace.step_seconds == 0.0


def test_the_step_ends_with_the_last_op_or_the_host() -> None:
    b = builder()
    b.kernels("k", [SHORT])
    end = spans(run(b))["k"][1]
    assert run(b).trace.step_seconds == pytest.approx(end, **EXACT)
    b.host("hook", overhead="step")
    assert run(b).trace.step_seconds > end


def test_a_host_that_waits_forever_is_named_with_what_it_waits_for() -> None:
    """Op 1 cannot be issued before it has ended itself."""
    ops = (Op("first", "host"), Op("second", "host", host_waits=(1,)))
    plan = Plan.uniform("test", 8, Program("", ops), {})
    with pytest.raises(StuckError, match="rank 0: the host waits for 'second' before it can issue 'second'"):
        run(plan)


def test_a_plan_that_waits_for_a_later_op_is_a_mistake_of_ours() -> None:
    ops = (Op("first", "host", after=(1,)), Op("second", "host"))
    with pytest.raises(AssertionError, match="op 0 waits for op 1, which is issued later"):
        run(Plan.uniform("test", 8, Program("", ops), {}))


def test_the_same_plan_gives_the_same_bytes() -> None:
    """Two runs in one process, spans compared exactly."""
    b = builder()
    for number in range(20):
        b.kernels(f"k{number}", [LONG if number % 3 else SHORT], stream=f"s{number % 4}")
        if number % 5 == 0:
            b.wait_stream("comm", COMPUTE)
            collective(b, f"c{number}")
    plan = b.finish("test", 8, [Memory("parameters", 1)])
    one, other = run(plan).trace, run(plan).trace
    assert one.start_seconds.tobytes() == other.start_seconds.tobytes()
    assert one.end_seconds.tobytes() == other.end_seconds.tobytes()
