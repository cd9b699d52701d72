"""Recorded steps run again: as they were, and on other hardware."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simpy

import zsim
from tests.conftest import KinetoBuilder
from tests.expect import about, there
from zsim.errors import NotSimulatedError
from zsim.fabric.fabric import Fabric
from zsim.plan.builder import PlanBuilder
from zsim.plan.ops import Collective, Group
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.files import load_cluster
from zsim.specs.topology.topology import Topology
from zsim.study.replay.replay import Replay
from zsim.study.replay.what_if import is_matrix_product, recorded_gpu
from zsim.trace.chrome import write_chrome_traces
from zsim.trace.trace import SpanInfo, SpanInfos, Trace

GLOO = Path(__file__).resolve().parents[2] / "traces" / "gloo"
TRAINING = {"sequence_length": 2048, "compile": True}  # the GPU is the limit
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"kind": "ddp"},
    "zero2": {"kind": "deepspeed", "stage": 2},
    "zero3": {"kind": "deepspeed", "stage": 3},
    "fsdp1": {"kind": "fsdp1"},
    "fsdp2": {"kind": "fsdp2"},
    "hsdp": {"kind": "fsdp2", "replicate": 2},
}


def add_with_16_ranks(
    self: PlanBuilder,
    *arguments: Any,
    events: int = 1,
    overhead: str | None = None,
    add: Callable[..., Any] = PlanBuilder.add,
    **more: Any,
) -> Any:
    """PlanBuilder.add of a plan for 64 ranks whose loops over them have the turns of 16."""
    turns = events // 4 if overhead in ("deepspeed_part", "deepspeed_gathered_part") else events
    return add(self, *arguments, events=turns, overhead=overhead, **more)


def simulated(
    strategy: dict[str, Any],
    nodes: int = 2,
    cluster: str | dict[str, Any] = "dgx-h100",
    training: dict[str, Any] = TRAINING,
) -> Trace:
    experiment = zsim.Experiment(
        model="llama-3.2-1b", cluster=cluster, nodes=nodes, training=training, strategy=strategy
    )
    return zsim.simulate(experiment).trace


@pytest.fixture(scope="module", params=list(STRATEGIES))
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Trace, Trace]:
    """(name, a simulated step of 16 GPUs, the same as read from its Kineto file)."""
    step = simulated(STRATEGIES[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    write_chrome_traces(step, folder)
    return request.param, step, zsim.read_trace(folder)


def test_the_same_hardware_gives_the_step_back(recorded: tuple[str, Trace, Trace]) -> None:
    """Times in files are whole nanoseconds: a thousand ops may differ by a microsecond."""
    _, step, trace = recorded
    assert zsim.replay(trace).step_seconds == pytest.approx(step.step_seconds, abs=1e-6)


def test_the_same_fabric_gives_the_step_back(recorded: tuple[str, Trace, Trace]) -> None:
    """A step after another, whose host is as far ahead as it was in the recorded one."""
    _, step, trace = recorded
    replay = zsim.replay(trace, cluster="dgx-h100")
    assert replay.step_seconds == pytest.approx(step.step_seconds, abs=1e-6)
    assert replay.unexplained_seconds == 0.0


@pytest.mark.parametrize("name", ["fsdp2", "hsdp"])
def test_a_step_that_its_host_bounds_comes_back(name: str, tmp_path: Path) -> None:
    """Eager blocks of 1B keep the host busy for longer than the GPU: it is ahead by less than a step."""
    step = simulated(STRATEGIES[name], training={"sequence_length": 2048})
    assert step.step_seconds > 1.2 * simulated(STRATEGIES[name]).step_seconds
    write_chrome_traces(step, tmp_path)
    trace = zsim.read_trace(tmp_path)
    (ahead,) = trace.metadata["host_ahead_seconds"].values()
    assert 0.01 < ahead / step.step_seconds < 0.5
    replay = zsim.replay(trace, cluster="dgx-h100")
    assert replay.step_seconds == pytest.approx(step.step_seconds, abs=1e-6)
    for replayed in (replay.replayed, zsim.replay(trace).replayed):  # and are traces of such a step
        write_chrome_traces(replayed, tmp_path / "replayed")
        for again in (replayed, zsim.read_trace(tmp_path / "replayed")):
            found = zsim.replay(again, cluster="dgx-h100").step_seconds
            assert found == pytest.approx(step.step_seconds, abs=1e-6)
    strategy = STRATEGIES[name] | ({"replicate": 8} if name == "hsdp" else {})
    more = simulated(strategy, nodes=8, training={"sequence_length": 2048})
    replay = zsim.replay(trace, cluster="dgx-h100", nodes=8)
    assert replay.step_seconds == pytest.approx(more.step_seconds, rel=0.01)


def test_four_times_the_ranks_take_what_a_simulation_of_them_takes(
    recorded: tuple[str, Trace, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch of each GPU stays, groups grow. What the replay does not know of is small: launches of
    another number of copies, and what DDP's copies out of buckets wait for. What ZeRO-3's loops over more
    ranks cost the host is not in a recording, and not small here: without it the two agree, with it the
    replay is too fast."""
    name, _, trace = recorded
    strategy = STRATEGIES[name] | ({"replicate": 8} if name == "hsdp" else {})
    replay = zsim.replay(trace, cluster="dgx-h100", nodes=8)
    assert replay.world_size == 64
    if name == "zero3":
        assert replay.step_seconds < 0.9 * simulated(strategy, nodes=8).step_seconds
        monkeypatch.setattr(PlanBuilder, "add", add_with_16_ranks)
    expected = simulated(strategy, nodes=8).step_seconds
    assert replay.step_seconds == pytest.approx(expected, rel=0.02)


def test_a_slower_network_takes_what_a_simulation_of_it_takes(recorded: tuple[str, Trace, Trace]) -> None:
    """ZeRO-3's host waits for gathers; where they were over when it looked, the recording shows nothing.

    Its replay is therefore too fast, the more so the slower the network: 4 % at a quarter of the rate.
    """
    name, step, trace = recorded
    slow: dict[str, Any] = {
        "extends": "dgx-h100",
        "nic": {"bandwidth": "100 Gb/s", "source": "a test", "evidence": "assumed"},
    }
    expected = simulated(STRATEGIES[name], cluster=slow).step_seconds
    replay = zsim.replay(trace, cluster=slow)
    assert replay.step_seconds == pytest.approx(expected, rel=0.05 if name == "zero3" else 0.02)
    assert replay.step_seconds > 1.01 * step.step_seconds


def test_the_replayed_trace_is_a_trace_like_any_other(
    recorded: tuple[str, Trace, Trace], tmp_path: Path
) -> None:
    """Where kernels leave collectives as they are: of one recorded rank the shortest call of a kind and size
    is taken for the transfer of all."""
    origin = {"source": "a test", "evidence": "assumed"}
    interference = {"compute_slowdown": 1.2, "communication_slowdown": 1.0, **origin}
    quiet: dict[str, Any] = {"extends": "dgx-h100", "gpu": {"interference": interference}}
    step = simulated(STRATEGIES[recorded[0]], cluster=quiet)
    write_chrome_traces(step, tmp_path)
    trace = zsim.read_trace(tmp_path)
    replayed = zsim.replay(trace).replayed
    assert replayed.source == "simulated"
    assert len(replayed) == len(step)
    assert np.all(replayed.end_seconds >= replayed.start_seconds)
    assert not zsim.compare(replayed, trace.typical_step()).differences


@pytest.mark.parametrize("case", ["zero3-even-2ranks", "zero3-uneven-2ranks", "zero3-host-uneven-2ranks"])
def test_real_ranks_that_wait_for_each_other_come_back(case: str) -> None:
    """Both ranks' own computing, and what each waited in collectives for the other."""
    trace = zsim.read_trace(GLOO / case)
    assert_as_recorded(zsim.replay(trace))
    step = trace.typical_step()
    transfers = there(step.transfer_seconds)
    lasted = (step.end_seconds - step.start_seconds)[~np.isnan(transfers)].sum()
    assert np.nansum(transfers) < 0.9 * lasted  # the rest is waiting; more beside more load


RECORDINGS = [
    GLOO / "zero1-even-4ranks",
    GLOO / "zero2-even-4ranks",
    GLOO / "zero3-nvme-uneven-4ranks",
    GLOO / "zero3-even-2ranks" / "rank1.kineto.json.gz",
    GLOO / "fsdp2-reshard-even-2ranks" / "rank0.kineto.json.gz",
]


def assert_as_recorded(replay: Replay) -> None:
    """Each part of the step is what it was, to the nanosecond of the files."""
    assert replay.step_seconds == pytest.approx(replay.recorded_seconds, abs=1e-9)
    parts = replay.breakdowns()
    assert parts["replayed"] == pytest.approx(parts["recorded"], abs=1e-9)


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.relative_to(GLOO).as_posix())
def test_a_replay_without_changes_says_of_every_step_what_the_recording_says(recording: Path) -> None:
    """Ranks that wait in gloo, ranks whose peers have no file, calls whose time of issue is not recorded."""
    trace = zsim.read_trace(recording)
    for step in trace.steps:
        replay = zsim.replay(trace, step=step.number)
        assert_as_recorded(replay)
        assert all(row["replayed_seconds"] == pytest.approx(row["recorded_seconds"], abs=1e-9)
                   for row in replay.collectives())  # fmt: skip


def test_what_the_host_is_blocked_on_is_waited_for_again_with_the_calls_own_time(
    kineto: Callable[..., KinetoBuilder], metadata: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """By hand. The kernel is over at 105 us; `cudaStreamSynchronize` returns at 130. A copy from pageable
    memory blocks the host from 132 to 160, though the GPU copies for 3 us only. A gather whose peer has no
    file follows at 170 for 80 us; the host waits for it from 172 to 255."""
    file = kineto(rank=0)
    file.step(1, 0, 300)
    file.launch("gemm", 0, 5, 100)
    file.complete("cuda_runtime", "cudaStreamSynchronize", 10, 120)
    file.complete("cuda_runtime", "cudaMemcpyAsync", 132, 28, correlation=7)
    copy = {"device": 0, "stream": 7, "correlation": 7, "bytes": 640}
    file.complete("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 156, 3, tid=7, **copy)
    args = metadata("_allgather_base", 1_000_000, 2_000_000, [0, 1])
    file.launch(GATHER, 165, 170, 80, stream=20, **args)
    file.complete("cuda_runtime", "cudaStreamSynchronize", 172, 83)
    file.launch("gemm again", 260, 265, 30)
    replay = zsim.replay(zsim.read_trace(file.write(tmp_path / "rank0.json")))
    assert_as_recorded(replay)
    replayed = replay.breakdowns()["replayed"]
    assert replayed["offload_stall"] == pytest.approx(28e-6, abs=1e-9)
    assert replayed["exposed_communication"] == pytest.approx(83e-6, abs=1e-9)


H100 = Path(__file__).resolve().parents[2] / "traces" / "h100-80gb-hbm3"


def test_a_recording_of_a_busy_gpu_alone_gets_faster_on_a_faster_one() -> None:
    """No launches, 130.05 ms of which the GPU pauses for 2.7: others than products go 1.43 times as fast."""
    trace = zsim.read_trace(H100 / "hf_llama-3-8b@8_t4096_b2.kineto.json.gz")
    assert_as_recorded(zsim.replay(trace))
    same = zsim.replay(trace, cluster="dgx-h100")
    assert same.step_seconds == pytest.approx(same.recorded_seconds, rel=1e-4)
    faster = zsim.replay(trace, cluster="hgx-h200")
    recorded, replayed = (faster.breakdowns()[name] for name in ("recorded", "replayed"))
    saved = recorded["compute"] - replayed["compute"]
    assert saved > 0.1 * faster.recorded_seconds
    assert faster.recorded_seconds - faster.step_seconds == pytest.approx(saved, rel=0.02)
    assert replayed["host_bound"] == pytest.approx(recorded["host_bound"], rel=0.05)
    assert any("shows the GPU alone" in note and "130.00 ms" in note for note in faster.notes)


def test_a_recording_of_the_gpu_alone_whose_host_is_the_limit_stays_as_long() -> None:
    """A step of 64 tokens: 2,521 pauses among 2,702 kernels, and 21 ms of compute in 191."""
    replay = zsim.replay(zsim.read_trace(H100 / "hf_llama-3.2-1b_t64_b1.kineto.json.gz"), cluster="hgx-h200")
    assert replay.step_seconds == pytest.approx(replay.recorded_seconds, rel=0.03)


GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def two_ranks(
    kineto: Callable[..., KinetoBuilder],
    metadata: Callable[..., dict[str, Any]],
    tmp_path: Path,
    ranks: tuple[int, ...] = (0, 1),
) -> Trace:
    """Rank 0 computes 100 us, rank 1 160; both then gather for 12 us, and compute 50 us more.

    Rank 0's gather lasts 72 us, of which it waits 60. Both steps end at 225 us.
    """
    for rank in ranks:
        busy = (100, 160)[rank]
        file = kineto(rank=rank)
        file.step(1, 0, 20)
        file.launch("gemm", 0, 3, busy)
        args = metadata("_allgather_base", 1_000_000, 2_000_000, [0, 1])
        file.launch(GATHER, 5, 3 + busy, 172 - busy, stream=20, **args)
        file.launch("gemm again", 8, 175, 50)
        file.write(tmp_path / f"rank{rank}.json")
    return zsim.read_trace(tmp_path)


def test_a_rank_that_waited_in_the_recording_waits_in_the_replay(
    kineto: Callable[..., KinetoBuilder], metadata: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    replay = zsim.replay(two_ranks(kineto, metadata, tmp_path))
    assert replay.step_seconds == pytest.approx(225e-6, abs=1e-9)
    lasted = [end - start for _, info, start, end in replay.replayed.rows() if info.group]
    assert lasted == pytest.approx([72e-6, 12e-6])


def test_a_host_that_is_busy_after_the_last_launch_ends_the_step(
    kineto: Callable[..., KinetoBuilder], tmp_path: Path
) -> None:
    """The kernel is over at 25 us; the host's step ends at 300."""
    file = kineto(world_size=1)
    file.step(1, 0, 300)
    file.launch("gemm", 0, 5, 20)
    trace = zsim.read_trace(file.write(tmp_path / "rank0.json"))
    assert zsim.replay(trace).step_seconds == pytest.approx(300e-6, abs=1e-9)


def test_a_faster_transfer_ends_the_step_sooner(
    kineto: Callable[..., KinetoBuilder], metadata: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """4 MB gathered by two GPUs of a DGX H100: the fabric says how long; the other 211 us of rank 1 stay
    (a launch of 1 us, kernels of 160 and 50 us on the same GPU)."""
    trace = two_ranks(kineto, metadata, tmp_path)
    replay = zsim.replay(trace, cluster="dgx-h100", recorded_on="h100-sxm-80gb")
    (row,) = replay.collectives()
    gathered = [end - start for _, info, start, end in replay.replayed.select_rank(1).rows() if info.group]
    assert row["bytes"] == 4_000_000
    assert gathered[0] < 100e-6
    assert replay.step_seconds == pytest.approx(211e-6 + gathered[0], abs=1e-9)


def cluster_with(slowdown: float) -> Cluster:
    """A DGX H100 whose collectives kernels slow down, and nothing the other way."""
    cluster = load_cluster("dgx-h100")
    update = {"compute_slowdown": 1.0, "communication_slowdown": slowdown}
    interference = cluster.gpu.interference.model_copy(update=update)
    return cluster.model_copy(update={"gpu": cluster.gpu.model_copy(update={"interference": interference})})


def test_a_modelled_transfer_is_slowed_by_the_kernels_beside_it_and_a_recorded_one_is_not_again(
    kineto: Callable[..., KinetoBuilder],
    metadata: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ranks compute 5 ms beside a gathering of 40 MB: modelled, it takes 1.5 times as long but for its
    latency. As recorded it keeps its 4 ms, kernels or not."""
    for rank in (0, 1):
        file = kineto(rank=rank)
        file.step(1, 0, 20)
        file.launch("gemm", 0, 3, 5000)
        args = metadata("_allgather_base", 10_000_000, 20_000_000, [0, 1])
        file.launch(GATHER, 5, 8, 4000, stream=20, **args)
        file.write(tmp_path / f"rank{rank}.json")
    trace = zsim.read_trace(tmp_path)
    took = []
    for slowdown in (1.0, 1.5):
        monkeypatch.setattr("zsim.study.replay.replay.load_cluster", lambda _, s=slowdown: cluster_with(s))
        replay = zsim.replay(trace, cluster="dgx-h100")
        (lasted, _) = [end - start for _, info, start, end in replay.replayed.rows() if info.group]
        took.append(lasted)
    (row,) = replay.collectives()
    alone = Fabric(simpy.Environment(), Topology(cluster_with(1.0), 1, 2), {"pg": Group.regular("pg", 2)})
    latency = alone.transfer(Collective("all_gather", row["bytes"], "bf16", "pg"), 0).latency_seconds
    assert took[1] - latency == pytest.approx(1.5 * (took[0] - latency), rel=1e-6)
    same = zsim.replay(trace)
    lasted = next(end - start for _, info, start, end in same.replayed.rows() if info.group)
    assert lasted == pytest.approx(4e-3, abs=1e-9)


@pytest.mark.parametrize("cluster", ["dgx-h100", "cpu-gloo"])
def test_fewer_gpus_than_recorded_ranks_keep_their_kernels(
    kineto: Callable[..., KinetoBuilder],
    metadata: Callable[..., dict[str, Any]],
    tmp_path: Path,
    cluster: str,
) -> None:
    """Rank 1, which computes longest, stands for the only GPU; its gather has nobody to wait for: a launch of
    1 us, kernels of 160 and 50 us, and at most the 10 us that a collective of one takes to start."""
    trace = two_ranks(kineto, metadata, tmp_path)
    replay = zsim.replay(trace, cluster=cluster, gpus=1)
    assert replay.world_size == 1
    assert 211e-6 <= replay.step_seconds < 221e-6


def test_kernels_go_by_the_ratio_of_the_gpus(kineto: Callable[..., KinetoBuilder], tmp_path: Path) -> None:
    """A matrix product of 989.4 us on an H100 (989.4 TFLOP/s) takes 3,169 us on an A100 (312): 989.4 / 312;
    an elementwise kernel of 335 us at 3.35 TB/s takes 549 us at 2.039 TB/s."""
    file = kineto(world_size=1)
    file.head["deviceProperties"] = [{"name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85_000_000_000}]
    file.step(1, 0, 10)
    file.launch("sm90_xmma_gemm_bf16bf16", 0, 2, 989.4)
    file.launch("vectorized_elementwise_kernel", 4, 991.4, 335.0)
    trace = zsim.read_trace(file.write(tmp_path / "rank0.json"))
    replay = zsim.replay(trace, cluster="dgx-a100-80gb", gpus=1)
    lengths = [end - start for _, _, start, end in replay.replayed.rows()]
    assert lengths == pytest.approx([989.4e-6 * 989.4 / 312, 335e-6 * 3.35 / 2.039], rel=1e-3)
    assert any("recorded on h100-sxm-80gb" in note for note in replay.notes)


def test_the_optimizer_shrinks_with_the_shards(recorded: tuple[str, Trace, Trace]) -> None:
    name, _, trace = recorded

    def update(replay: Replay) -> float:
        rows = replay.replayed.rows()
        return sum(end - start for _, info, start, end in rows if info.kind == "optimizer")

    ratio = update(zsim.replay(trace, cluster="dgx-h100", gpus=64)) / update(zsim.replay(trace))
    expected = {"ddp": 1.0, "hsdp": 1.0}.get(name, 0.25)  # HSDP's shards stay inside the replica
    assert ratio == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 8}, "another number of GPUs needs a cluster"),
        ({"cluster": "dgx-h100", "gpus": 12}, "12 GPUs do not fill nodes of 8"),
        ({"cluster": "dgx-h100", "gpus": 16, "nodes": 3}, "3 nodes of dgx-h100 have 24 GPUs"),
        ({"cluster": "dgx-h100", "gpus": 3}, "cannot grow from 2 to 3|expected a multiple"),
        ({"cluster": "dgx-h100", "nodes": 99_999_999}, "gpus: found 799,999,992, expected at most 1,048,576"),
        ({"recorded_on": "h100-sxm-80gb"}, "recorded_on h100-sxm-80gb has no effect without a cluster"),
        ({"step": 7}, r"no step 7; recorded are \[1\]"),
        ({"cluster": "dgx-h100", "recorded_on": "h100"}, "h100"),
    ],
)
def test_what_cannot_be_asked_is_said(
    kineto: Callable[..., KinetoBuilder],
    metadata: Callable[..., dict[str, Any]],
    tmp_path: Path,
    options: dict[str, Any],
    message: str,
) -> None:
    trace = two_ranks(kineto, metadata, tmp_path)
    if options.get("gpus") == 3:  # the group of 2 fills the world: it may grow to 3
        assert zsim.replay(trace, **options).world_size == 3
        return
    with pytest.raises(zsim.InputError, match=message):
        zsim.replay(trace, **options)


def test_collectives_without_a_size_cannot_be_put_on_a_fabric(
    kineto: Callable[..., KinetoBuilder], tmp_path: Path
) -> None:
    file = kineto()
    file.step(1, 0, 20)
    file.launch(GATHER, 5, 10, 50, stream=20)
    trace = zsim.read_trace(file.write(tmp_path / "rank0.json"))
    assert zsim.replay(trace).step_seconds > 0
    with pytest.raises(zsim.InputError, match="sizes of 1 kinds of collectives are not recorded"):
        zsim.replay(trace, cluster="dgx-h100")


@pytest.mark.parametrize(
    ("device", "memory", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", 85e9, "h100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", 42.5e9, "a100-sxm-40gb"),
        ("NVIDIA A100-PG509-200", 85e9, "a100-sxm-80gb"),
        ("NVIDIA H200", 150e9, "h200-sxm-141gb"),
        ("NVIDIA GeForce RTX 4090", 25e9, "rtx-4090"),
        ("AMD Instinct MI300X", 206e9, "mi300x-192gb"),
        ("NVIDIA A100 80GB PCIe", 85e9, "a100-pcie-80gb"),
        ("Tesla T4", 16e9, "t4-16gb"),
        ("Quadro P4000", 8e9, None),
        ("", None, None),
    ],
)
def test_the_gpu_is_told_from_its_name_and_memory(
    device: str, memory: float | None, preset: str | None
) -> None:
    gpu = recorded_gpu({"gpu": device, "gpu_memory_bytes": memory}, None)
    assert (gpu.name if gpu else None) == preset


@pytest.mark.parametrize(
    ("name", "is_matrix"),
    [
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn", True),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", True),
        ("Cijk_Alik_Bljk_BBS_BH_MT128x128x32", True),
        ("flash_fwd_kernel", True),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", False),
        ("void cudnn::bn_bw_1C11_kernel_new<float>", False),
    ],
)
def test_matrix_products_are_told_from_their_names(name: str, is_matrix: bool) -> None:
    assert is_matrix_product(SpanInfo(name, "compute", "compute")) is is_matrix


def test_one_recorded_step_has_one_length_and_what_is_a_ranks_own_is_said() -> None:
    """Recorded, rank 1 takes longest: 45.29 ms. Rank 0, which traces are compared by, began 55 us after it
    and took 43.94 ms."""
    trace = zsim.read_trace(GLOO / "zero3-even-2ranks")
    step = trace.typical_step()
    assert (step.steps[0].slowest_rank(), step.begins) == (1, {0: about(54.922e-6)})
    result = zsim.replay(trace)
    assert result.recorded.step_seconds == trace.step_seconds == pytest.approx(45.29e-3, abs=5e-6)
    assert (result.rank, result.recorded_seconds) == (1, about(45.29e-3, abs=5e-6))
    assert not any("is the slowest when replayed" in note for note in result.notes)
    comparison = zsim.compare(trace, trace)
    assert "it took rank 0, whose times are compared, 43.94 ms" in comparison.notes[-1]


# -- The recipe about replaying runs as it stands; what it claims, it asserts ------------------------------


ROOT = Path(__file__).resolve().parents[2]


def test_the_recipe_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "recipes" / "replay.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for block in blocks:
        exec(compile(block, "replay.md", "exec"), names)
    assert len(blocks) == 3
    recorded = zsim.replay(zsim.read_trace("traces/gloo/zero3-even-2ranks")).recorded_seconds
    assert f"recorded {recorded * 1e3:.1f} ms" in capsys.readouterr().out


# -- Simulated pipelines, tensor and context parallel steps, replayed on a cluster -------------------------


UNTIED = Path(__file__).resolve().parents[1] / "golden" / "model.json"
MEGATRON: dict[str, Any] = {"kind": "megatron"}
TITAN: dict[str, Any] = {"kind": "fsdp2"}
SLOW: dict[str, Any] = {
    "extends": "dgx-h100",
    "nic": {"bandwidth": "10 Gb/s", "source": "a test", "evidence": "assumed"},
}
# (strategy, parallelism, nodes); models of gpt2's size are bound by their host
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "two stages": (MEGATRON, {"pipeline": 2}, 1),
    "four stages, tied embeddings": (MEGATRON, {"pipeline": 4}, 1),
    "stages on two nodes": (MEGATRON, {"pipeline": 2}, 2),
    "interleaved": (MEGATRON, {"pipeline": 4, "virtual_stages": 3}, 1),
    "tensor and pipeline": (MEGATRON, {"pipeline": 2, "tensor": 2, "sequence_parallel": True}, 1),
    "distributed optimizer on two nodes": ({**MEGATRON, "distributed_optimizer": True}, {"pipeline": 2}, 2),
    "context": (MEGATRON, {"context": 2}, 1),
    "context and pipeline": (MEGATRON, {"context": 2, "pipeline": 2}, 1),
    "DeepSpeed's": ({"kind": "deepspeed", "stage": 1}, {"pipeline": 2}, 1),
    "torchtitan's": (TITAN, {"pipeline": 2}, 1),
    "torchtitan's, interleaved": (TITAN, {"pipeline": 2, "schedule": "interleaved-1f1b"}, 2),
    "torchtitan's, zero bubble": (TITAN, {"pipeline": 2, "schedule": "interleaved-zero-bubble"}, 1),
}


def untied(folder: Path) -> Path:
    """A small model of eight layers that torchtitan may cut into stages."""
    config = json.loads(UNTIED.read_text())
    path = folder / "model" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**config, "num_hidden_layers": 8}))
    return path


def job(name: str, folder: Path, cluster: str | dict[str, Any] = "dgx-h100") -> zsim.Experiment:
    strategy, parallelism, nodes = JOBS[name]
    return zsim.Experiment(
        model=str(untied(folder)) if strategy == TITAN else "gpt2",
        cluster=cluster,
        nodes=nodes,
        training={"sequence_length": 512, "gradient_accumulation_steps": 4},
        strategy=strategy,
        parallelism=parallelism,
    )


def written(name: str, folder: Path) -> tuple[Trace, Trace]:
    """The simulated step, and what is read from its files."""
    step = zsim.simulate(job(name, folder)).trace
    write_chrome_traces(step, folder / "trace")
    return step, zsim.read_trace(folder / "trace")


@pytest.mark.parametrize("name", JOBS)
def test_a_pipeline_gives_its_step_back(name: str, tmp_path: Path) -> None:
    """Every stage waits for the others: one of them alone would be short by its bubble."""
    step, trace = written(name, tmp_path)
    assert zsim.replay(trace).step_seconds == pytest.approx(step.step_seconds, abs=1e-6)
    for found in (trace, step):
        replay = zsim.replay(found, cluster="dgx-h100")
        assert replay.step_seconds == pytest.approx(step.step_seconds, abs=1e-6)
        assert replay.unexplained_seconds == 0.0
    assert set(replay.replayed.ranks.tolist()) == set(step.ranks.tolist())


@pytest.mark.parametrize("name", ["stages on two nodes", "distributed optimizer on two nodes"])
def test_a_slower_network_takes_what_a_simulation_of_a_pipeline_takes(name: str, tmp_path: Path) -> None:
    step, trace = written(name, tmp_path)
    expected = zsim.simulate(job(name, tmp_path, SLOW)).trace.step_seconds
    assert expected > 1.04 * step.step_seconds
    assert zsim.replay(trace, cluster=SLOW).step_seconds == pytest.approx(expected, rel=0.02)


def test_a_pipeline_on_other_gpus_is_refused(tmp_path: Path) -> None:
    """More replicas would be other pairs, and more stages another model on each."""
    _, trace = written("two stages", tmp_path)
    with pytest.raises(NotSimulatedError, match=r"zsim run --gpus 16"):
        zsim.replay(trace, cluster="dgx-h100", gpus=16)


@pytest.mark.parametrize("name", ["two stages", "interleaved", "DeepSpeed's"])
def test_one_rank_of_a_pipeline_keeps_the_time_of_its_sends(name: str, tmp_path: Path) -> None:
    """As `zsim run --out` writes it: what the others do is in no file, but how long it was waited for."""
    step, _ = written(name, tmp_path)
    replay = zsim.replay(zsim.read_trace(tmp_path / "trace" / "rank0.json.gz"), cluster="dgx-h100")
    assert replay.step_seconds == pytest.approx(step.step_seconds, rel=0.02)
    assert any("send and recv take their recorded time" in note for note in replay.notes)


def test_sends_without_sides_keep_their_time(tmp_path: Path) -> None:
    """As in torch's recordings: one rank stands for all, and the replay says so."""
    _, trace = written("two stages", tmp_path)
    bare = replace(trace, infos=SpanInfos(info._replace(messages=()) for info in trace.infos))
    replay = zsim.replay(bare, cluster="dgx-h100")
    assert any("send and recv take their recorded time" in note for note in replay.notes)
    assert any("represents all ranks" in note for note in replay.notes)
