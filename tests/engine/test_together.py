"""Jobs that share a fabric: contention where links are shared, by the fair share, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.engine.simulate import Outcome, simulate_job
from zsim.errors import InputError, NotSimulatedError
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

SPINE = {
    "extends": "dgx-h100",
    "network": {
        "source": "made up for a test", "evidence": "assumed", "kind": "fat-tree", "nodes_per_leaf": 2,
        "oversubscription": 8.0,
    },
}  # fmt: skip
DDP = {"kind": "ddp", "bucket_cap_mb": 100000}


def experiment(jobs: dict[str, Any], **data: Any) -> Experiment:
    whole: dict[str, Any] = {
        "model": "gpt2-xl",
        "cluster": SPINE,
        "placement": {"fabric_nodes": 4, "nodes": [0, 2]},
        "training": {"sequence_length": 1024, "micro_batch_size": 4, "compile": True},
        "strategy": DDP,
        "jobs": jobs,
    }
    return Experiment(**{**whole, **data})


def simulate(jobs: dict[str, Any], *, unfold: bool = False, **data: Any) -> Outcome:
    return simulate_job(resolve(experiment(jobs, **data)), unfold=unfold)


def reduced(outcome: Outcome) -> float:
    """Seconds of the gradients' all-reduce."""
    [span] = [
        end - start for _, info, start, end in outcome.trace.select_rank(0).rows() if info.bytes > 10**9
    ]
    return span


def test_two_jobs_on_a_spine_slow_each_other_by_the_fair_share() -> None:
    """Two leaves of two nodes with 2 uplinks of 50 GB/s each; one job on a node of either leaf, the other on
    the other two. Both reduce 6.23 GB of gradients at the same time, over trees that send them across the
    spine once each way: at 100 GB/s alone, at 50 together. Nothing else is longer."""
    alone = simulate({"other": {"placement": {"nodes": [1]}, "nodes": 1}})
    both = simulate({"other": {"placement": {"nodes": [1, 3]}}})
    [own, other] = both.concurrent_jobs
    assert both.allocation is None
    assert any("without torch's allocator" in note for note in both.notes)
    assert own.isolated_seconds == pytest.approx(alone.trace.step_seconds)
    assert own.concurrent_seconds == pytest.approx(other.concurrent_seconds)
    gradients = 4 * own.job.model.numel
    assert gradients == pytest.approx(6.23e9, rel=1e-3)
    assert own.concurrent_seconds - own.isolated_seconds == pytest.approx(
        gradients / 50e9 - gradients / 100e9
    )


def test_a_shared_link_is_as_full_as_both_make_it() -> None:
    """Two equal jobs: this one's bytes are its own, the fullest uplink carries both jobs'."""
    alone = simulate({"other": {"placement": {"nodes": [1]}, "nodes": 1}}).traffic["leaf_up"]
    both = simulate({"other": {"placement": {"nodes": [1, 3]}}}).traffic["leaf_up"]
    assert both.total_bytes == pytest.approx(alone.total_bytes)
    assert both.fullest_bytes == pytest.approx(2 * alone.fullest_bytes)


def test_three_jobs_have_a_third_each() -> None:
    cluster = {**SPINE, "network": {**SPINE["network"], "nodes_per_leaf": 4, "oversubscription": 16.0}}  # type: ignore[dict-item]
    places = {"fabric_nodes": 8, "nodes": [0, 4]}
    one, three = (
        simulate(
            {f"job{n}": {"placement": {"nodes": [n, n + 4]}} for n in range(1, count)} or {"b": {"nodes": 1}},
            cluster=cluster,
            placement=places,
        )
        for count in (1, 3)
    )
    assert len(three.concurrent_jobs) == 3
    assert reduced(three) == pytest.approx(3 * reduced(one), rel=2e-2)  # but for the rounds' latency


def test_jobs_on_leaves_of_their_own_do_not_notice_each_other() -> None:
    """To the last digit but the clock's: the second round begins later."""
    outcome = simulate(
        {"other": {"placement": {"nodes": [2, 3]}}}, placement={"fabric_nodes": 4, "nodes": [0, 1]}
    )
    for job in outcome.concurrent_jobs:
        assert job.concurrent_seconds == pytest.approx(job.isolated_seconds, rel=1e-9)
    assert outcome.traffic["leaf_up"].fullest_bytes == 0


def test_rails_keep_two_jobs_of_one_unit_apart() -> None:
    """16 nodes under one set of rail leaves, every other node another job's: no ring leaves its rail."""
    outcome = simulate(
        {"other": {"placement": {"nodes": "1,3,5,7"}}},
        cluster="dgx-superpod-h100",
        placement={"fabric_nodes": 32, "nodes": "0,2,4,6"},
    )
    assert [job.concurrent_seconds for job in outcome.concurrent_jobs] == pytest.approx(
        [job.isolated_seconds for job in outcome.concurrent_jobs], rel=1e-9
    )
    assert outcome.traffic["leaf_up"].total_bytes == 0


@pytest.mark.parametrize(
    "strategy", [{"kind": "fsdp2"}, {"kind": "fsdp2", "replicate": 2}], ids=["fsdp2", "hsdp"]
)
def test_folded_equals_unfolded_beside_another_job(strategy: dict[str, Any]) -> None:
    """Two different jobs, a straggler in one of them and a bad card in the other."""
    data: dict[str, Any] = {
        "model": "gpt2",
        "strategy": strategy,
        "faults": {"slow_gpus": {"3": 1.2}, "links": {"node3.nic2": {"bandwidth_fraction": 0.5}}},
    }
    jobs = {"other": {"placement": {"nodes": [1, 3]}, "training": {"micro_batch_size": 1}}}
    folded, unfolded = (simulate(jobs, unfold=unfold, **data) for unfold in (False, True))
    assert folded.stats.rank_classes < unfolded.stats.rank_classes
    for one, other in zip(folded.concurrent_jobs, unfolded.concurrent_jobs, strict=True):
        assert one.isolated_seconds == pytest.approx(other.isolated_seconds, rel=1e-9)
        assert one.concurrent_seconds == pytest.approx(other.concurrent_seconds, rel=1e-9)
        assert one.steps == other.steps >= 3


def test_a_fast_job_goes_on_until_the_slow_one_has_done_its_steps() -> None:
    outcome = simulate(
        {"quick": {"placement": {"nodes": [1, 3]}, "model": "gpt2", "training": {"micro_batch_size": 1}}}
    )
    slow, quick = outcome.concurrent_jobs
    assert slow.steps == 3
    assert quick.steps > 10
    assert quick.job.training.sequence_length == 1024


def test_a_slow_node_slows_the_job_that_is_on_it() -> None:
    """Faults are the fabric's: node 3 is the other job's, rank 3 this one's."""
    jobs = {"other": {"placement": {"nodes": [1, 3]}}}
    slow = simulate(jobs, faults={"slow_gpus": {"node3": 1.5}}).concurrent_jobs
    fair = simulate(jobs).concurrent_jobs
    assert slow[0].isolated_seconds == pytest.approx(fair[0].isolated_seconds, rel=1e-9)
    assert slow[1].isolated_seconds > 1.3 * fair[1].isolated_seconds


def test_jobs_without_nodes_take_the_free_ones_in_order() -> None:
    job = resolve(experiment({"b": {}, "c": {"nodes": 1}}, nodes=2, placement={}))
    assert job.placement.nodes == (0, 1)
    assert [other.placement.nodes for other in job.colocated_jobs.values()] == [(2, 3), (4,)]
    assert {other.placement.fabric_nodes for other in job.colocated_jobs.values()} == {5}


@pytest.mark.parametrize(
    ("jobs", "data", "message"),
    [
        ({"b": {"placement": {"nodes": [2, 3]}}}, {}, "jobs.b: placement.nodes: node 2 is taken by the job"),
        ({"b": {"nodes": 3}}, {}, "found 4, too few for a job of 3 nodes besides the job itself"),
        ({"b": {"cluster": "dgx-2"}}, {}, "jobs.b: 'cluster' belongs to the fabric"),
        ({"b": {"trainig": {}}}, {}, "jobs.b: unknown key 'trainig'; did you mean 'training'"),
        ({"b": {"strategy": {"stage": 9}}}, {}, "jobs.b: strategy.stage: found 9"),
        ({"b": {"training": 3}}, {}, "jobs.b.training: found 3, expected a table"),
        ({"b": 3}, {}, "jobs.b: found 3, expected a table"),
        ({"b": {"placement": {"fabric_nodes": 9}}}, {}, "fabric_nodes: is the fabric's"),
        ({"b": {}}, {"faults": {"slow_gpus": {"node9": 2}}}, "the fabric has node0 to node3"),
    ],
)
def test_what_cannot_be_shared_is_named(jobs: dict[str, Any], data: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(experiment(jobs, **data))


def test_jitter_of_several_jobs_is_refused() -> None:
    with pytest.raises(NotSimulatedError, match="jitter of jobs that share a fabric"):
        simulate({"b": {}}, jitter={"seed": 1})


def test_the_report_lists_the_jobs_alone_and_together() -> None:
    data = experiment({"other": {"placement": {"nodes": [1, 3]}}}).model_dump(exclude_defaults=True)
    changed = build_experiment(data, {"jobs.other.training.micro_batch_size": 2}, origin="test")
    report = zsim.simulate(changed).report.to_dict()
    assert [row["name"] for row in report["jobs"]] == ["this job", "other"]
    own = report["jobs"][0]
    assert report["step_seconds"] == own["step_seconds_together"] > own["step_seconds_alone"]
    assert own["slowdown"] == pytest.approx(own["step_seconds_together"] / own["step_seconds_alone"])
    assert report["experiment"]["jobs"]["other"]["training"]["micro_batch_size"] == 2
    assert sum(report["breakdown_seconds"].values()) == pytest.approx(report["step_seconds"])
