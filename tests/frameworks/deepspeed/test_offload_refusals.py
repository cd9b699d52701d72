"""What DeepSpeed's swappers assert, zsim says in one sentence; what is gone from memory is on a drive."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zsim import Experiment
from zsim.api import simulate
from zsim.errors import InputError
from zsim.plan.make import make_plan
from zsim.plan.memory.capacity import fits, pinned_bytes, pinned_limit_violation
from zsim.plan.ops import Copy, DriveIo, HostWork, Plan
from zsim.report.views.text.sentences import missing_memory
from zsim.specs.experiment.resolve import resolve

NVME = {"device": "nvme", "nvme_path": "/nvme"}


def experiment_of(zero: dict[str, Any], cluster: str = "dgx-h100", **options: Any) -> Experiment:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **zero}}
    training = {"sequence_length": 512, "micro_batch_size": 1, **options}
    return Experiment(
        model="gpt2", cluster=cluster, gpus=4, training=training,
        strategy={"kind": "deepspeed", "config": config},
    )  # fmt: skip


def plan_of(zero: dict[str, Any], **options: Any) -> Plan:
    return make_plan(resolve(experiment_of(zero, **options)))


def refusal_of(zero: dict[str, Any]) -> str:
    with pytest.raises(InputError) as found:
        plan_of(zero)
    return str(found.value)


def test_a_shard_larger_than_the_buffer_is_an_error() -> None:
    """GPT-2's word embedding: 50,257 x 768 elements over 4 ranks are 9,649,344."""
    text = refusal_of({"offload_param": {**NVME, "max_in_cpu": 0, "buffer_size": 1_000_000}})
    assert "offload_param.buffer_size: found 1000000 elements" in text
    assert "the shard of 'transformer.wte.weight' has 9649344" in text


def test_too_few_buffers_for_parameters_are_an_error() -> None:
    """With the default reuse distance a small model's weights all stay gathered, and their buffers taken."""
    text = refusal_of({"offload_param": {**NVME, "max_in_cpu": 0}})
    assert re.search(r"offload_param\.buffer_count: found 5, but '.*' needs 1 while 5 are taken", text)


@pytest.mark.parametrize(
    ("pipeline", "enough"),
    [({}, 4), ({"pipeline_read": True}, 8), ({"pipeline_write": True}, 8),
     ({"pipeline_read": True, "pipeline_write": True}, 12)],
)  # fmt: skip
def test_a_pipeline_needs_buffers_for_each_sub_group_in_it(pipeline: dict[str, bool], enough: int) -> None:
    """Weight, two moments and gradient: 4 per sub-group; reading ahead, writing behind take 4 more each."""
    for count in range(enough - 4, enough):
        offload = {**NVME, **pipeline, "buffer_count": count}
        text = refusal_of({"offload_optimizer": offload, "sub_group_size": 10**6})
        assert f"buffer_count: found {count}, but sub-group" in text
        assert text.endswith(f"expected at least {enough}")
    assert plan_of(
        {"offload_optimizer": {**NVME, **pipeline, "buffer_count": enough}, "sub_group_size": 10**6}
    )


def test_a_cluster_without_drives_is_an_error() -> None:
    with pytest.raises(InputError, match=r"cluster 'cpu-gloo' has no NVMe drives"):
        simulate(experiment_of({"offload_optimizer": NVME}, cluster="cpu-gloo"))


def order_of(plan: Plan, *starts: str) -> list[str]:
    return [op.name for op in plan.ops if op.name.startswith(starts)]


def test_without_pipeline_each_sub_group_is_read_stepped_and_written_in_turn() -> None:
    plan = plan_of({"offload_optimizer": NVME, "sub_group_size": 20 * 10**6})
    assert order_of(plan, "read states", "optimizer step", "write states")[:6] == [
        "read states of sub-group 0", "optimizer step of sub-group 0", "write states of sub-group 0",
        "read states of sub-group 1", "optimizer step of sub-group 1", "write states of sub-group 1",
    ]  # fmt: skip


def test_pipeline_read_starts_the_next_read_before_the_step() -> None:
    offload = {**NVME, "pipeline_read": True, "buffer_count": 8}
    plan = plan_of({"offload_optimizer": offload, "sub_group_size": 20 * 10**6})
    assert order_of(plan, "read states", "optimizer step", "write states")[:6] == [
        "read states of sub-group 0", "read states of sub-group 1", "optimizer step of sub-group 0",
        "write states of sub-group 0", "optimizer step of sub-group 1", "write states of sub-group 1",
    ]  # fmt: skip


def test_small_tensors_stay_in_host_memory() -> None:
    """Norms and biases are below 1 MiB: no read is smaller, and their shards come from host memory."""
    zero = {
        "offload_param": {**NVME, "max_in_cpu": 0, "buffer_count": 60}, "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0,
    }  # fmt: skip
    plan = plan_of(zero)
    reads = [op.work.bytes for op in plan.ops if isinstance(op.work, DriveIo)]
    assert reads
    assert min(reads) >= 2**20
    copies = [op.work.bytes for op in plan.ops if isinstance(op.work, Copy) and op.work.direction == "h2d"]
    assert min(copies) < 2**20


def test_gpudirect_storage_reads_shards_without_host_memory() -> None:
    """Buffers for reading are on the GPU then, and no shard that was on NVMe is copied from the host."""
    zero = {
        "offload_param": {**NVME, "max_in_cpu": 0, "buffer_count": 60}, "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0,
    }  # fmt: skip
    experiment = experiment_of(zero)
    for is_direct in (False, True):
        table = experiment.strategy.model_copy(
            update={"config": {**experiment.strategy.config, "aio": {"use_gds": is_direct}}}  # type: ignore[attr-defined]
        )
        plan = make_plan(resolve(experiment.model_copy(update={"strategy": table})))
        reads = [op.work for op in plan.ops if isinstance(op.work, DriveIo) and op.work.direction == "read"]
        assert {work.is_direct for work in reads} == {is_direct}
        copies = [
            op.work.bytes for op in plan.ops if isinstance(op.work, Copy) and op.work.direction == "h2d"
        ]
        assert (max(copies) < 2**20) == is_direct
        swap = 60 * 100_000_000 * 2
        device = "gpu" if is_direct else "host"
        assert sum(m.bytes for m in plan.resident if m.device == device and m.category == "buffers") >= swap


def test_max_in_cpu_keeps_whole_sub_groups_in_host_memory() -> None:
    """All of GPT-2's 31.1M elements per rank fit into 1e9: nothing is read for gathers."""
    plan = plan_of({"offload_param": {**NVME, "max_in_cpu": 10**9}})
    assert not any(isinstance(op.work, DriveIo) and op.work.direction == "read" for op in plan.ops)


def test_shard_copies_block_the_host_and_copies_of_one_rank_do_not() -> None:
    """See [Note: blocking shard copies]; on one rank the copy is the parameter and is not waited for."""
    for gpus, blocks in ((4, True), (1, False)):
        experiment = experiment_of({"offload_param": {"device": "cpu"}}).model_copy(update={"gpus": gpus})
        plan = make_plan(resolve(experiment))
        shards = {
            n for n, op in enumerate(plan.ops) if op.name.startswith("shard of") and op.phase == "forward"
        }
        waited = {wait for op in plan.ops for wait in op.host_waits}
        assert shards
        assert (shards <= waited) == blocks
        assert bool(shards & waited) == blocks


def test_copies_that_are_not_pinned_block_the_host() -> None:
    for pinned in (True, False):
        plan = plan_of({"offload_optimizer": {"device": "cpu", "pin_memory": pinned}})
        copies = [n for n, op in enumerate(plan.ops) if op.name == "fp32 gradients to host"]
        waited = {wait for op in plan.ops for wait in op.host_waits}
        assert all(isinstance(op.work, Copy) and op.work.is_pinned == pinned
                   for op in plan.ops if op.name == "fp32 gradients to host")  # fmt: skip
        # the last one is the last of its stream, which the end of backward waits for in any case
        assert all((n in waited) == (not pinned) for n in copies[:-1])


def test_the_cpus_own_work_stops_the_host() -> None:
    plan = plan_of({"offload_optimizer": {"device": "cpu"}})
    works = {n for n, op in enumerate(plan.ops) if isinstance(op.work, HostWork)}
    assert works <= {wait for op in plan.ops for wait in op.host_waits}
    assert works


def test_more_page_locked_memory_than_the_host_allows_does_not_fit() -> None:
    """GPT-2's 124,439,808 elements (a multiple of 4), pinned on a node of 4: sums of gradients in bf16 and
    gradients in fp32, 6 bytes each, 746,638,848; masters and moments are not pinned."""
    zero = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    needed = 6 * 124_439_808
    for limit, is_enough in ((needed, True), (needed - 1, False)):
        experiment = experiment_of(zero)
        job = resolve(experiment)
        host = job.cluster.host.model_copy(update={"pinned_limit": limit})
        job = replace(job, cluster=job.cluster.model_copy(update={"host": host}))
        plan = make_plan(job)
        assert pinned_bytes(job, plan) == needed
        assert (pinned_limit_violation(job, plan) is None) is is_enough
        assert fits(job, plan) is is_enough


def test_the_report_names_the_page_locked_memory_that_is_missing(tmp_path: Path) -> None:
    host = '[host]\nsource = "ulimit -l"\nevidence = "measured"\npinned_limit = "500 MB"\n'
    file = tmp_path / "mine.toml"
    file.write_text(f'schema = 1\nextends = "dgx-h100"\nname = "mine"\n{host}')
    zero = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    report = simulate(experiment_of(zero, cluster=str(file))).report
    assert not report.fits
    finding = report.out_of_memory
    assert finding is not None
    assert (finding.pool, finding.missing_bytes) == ("pinned", 6 * 124_439_808 - 500_000_000)
    assert "page-locked memory of a node" in missing_memory(finding)
    assert report.to_dict()["offload"]["pinned_bytes"] == 6 * 124_439_808


def test_memory_that_is_not_pinned_has_no_limit() -> None:
    job = resolve(experiment_of({"offload_optimizer": {"device": "cpu", "pin_memory": False}}))
    assert pinned_bytes(job, make_plan(job)) == 0
