"""The Chrome JSON: legal, deterministic, and what tools for recorded traces expect."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zsim
from zsim.trace.chrome import chrome_trace, write_chrome_trace, write_chrome_traces
from zsim.trace.trace import Trace

GATHER = {
    "kind": "all_gather", "stream": "all_gather", "name": "gather layer 0", "bytes": 1600, "dtype": "bf16",
    "group": "shard", "group_size": 4,
}  # fmt: skip


def events_of(document: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    return [
        event
        for event in document["traceEvents"]
        if all(event.get(key) == value for key, value in wanted.items())
    ]


def test_a_kernel_is_written_in_microseconds_with_its_stream_and_correlation(
    make_trace: Callable[..., Trace],
) -> None:
    """A kernel from 1 to 3 ms, issued at 0.5 ms."""
    trace = make_trace([{"name": "gemm", "issue": 0.5e-3, "start": 1e-3, "end": 3e-3, "flops": 7.0}])
    (kernel,) = events_of(chrome_trace(trace), cat="kernel")
    assert (kernel["name"], kernel["ts"], kernel["dur"]) == ("gemm", 1000.0, 2000.0)
    assert (kernel["pid"], kernel["tid"], kernel["args"]["stream"], kernel["args"]["device"]) == (0, 7, 7, 0)
    (launch,) = events_of(chrome_trace(trace), cat="cuda_runtime")
    assert (launch["name"], launch["ts"] + launch["dur"]) == ("cudaLaunchKernel", 500.0)
    assert launch["args"]["correlation"] == kernel["args"]["correlation"]
    flow = {event["ph"]: event for event in events_of(chrome_trace(trace), cat="ac2g")}
    assert flow["s"]["tid"] == launch["tid"]
    assert (flow["f"]["tid"], flow["f"]["ts"]) == (7, 1000.0)


@pytest.mark.parametrize(
    ("kind", "collective", "kernel", "elements_in", "elements_out"),
    [
        ("all_gather", "_allgather_base", "ncclDevKernel_AllGather_RING_LL", 200, 800),
        ("reduce_scatter", "_reduce_scatter_base", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 800, 200),
        ("all_reduce", "allreduce", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 800, 800),
        ("send", "send", "ncclDevKernel_SendRecv", 800, 800),
    ],
)
def test_collectives_carry_the_metadata_of_recorded_ones(
    make_trace: Callable[..., Trace],
    kind: str,
    collective: str,
    kernel: str,
    elements_in: int,
    elements_out: int,
) -> None:
    """1600 bytes of bf16 are 800 elements, 200 for each of 4 ranks."""
    trace = make_trace([{**GATHER, "kind": kind, "start": 0, "end": 1}])
    document = chrome_trace(trace)
    (event,) = events_of(document, cat="kernel")
    assert event["name"].split("(")[0] == kernel
    (parent,) = events_of(document, name="record_param_comms")
    for args in (event["args"], parent["args"]):
        assert (args["Collective name"], args["dtype"], args["Group size"]) == (collective, "BFloat16", 4)
        assert (args["In msg nelems"], args["Out msg nelems"]) == (elements_in, elements_out)
        assert (args["Process Group Name"], args["Process Group Ranks"]) == ("0", "[0, 1, 2, 3]")
        assert args["Process Group Description"] == "shard"


def test_groups_have_the_ranks_of_the_rank_that_is_written(make_trace: Callable[..., Trace]) -> None:
    """World 16, group of 4 with stride 4: rank 6 is with 2, 10 and 14. Rank 6 of 8 GPUs is device 6."""
    span = {**GATHER, "start": 0, "end": 1, "rank": 6}
    metadata = {"groups": {"shard": (4, 4)}, "gpus_per_node": 8}
    document = chrome_trace(make_trace([span], world_size=16, metadata=metadata))
    info = document["distributedInfo"]
    assert (info["backend"], info["rank"], info["world_size"], info["pg_count"]) == ("nccl", 6, 16, 1)
    assert info["pg_config"][0]["ranks"] == [2, 6, 10, 14]
    assert events_of(document, cat="kernel")[0]["pid"] == 6


def test_a_second_stream_is_a_second_track_with_its_name(make_trace: Callable[..., Trace]) -> None:
    document = chrome_trace(make_trace([{"start": 1, "end": 2}, {**GATHER, "start": 0, "end": 1}]))
    tracks = {event["tid"]: event["args"]["name"] for event in events_of(document, name="thread_name", pid=0)}
    assert tracks == {7: "stream 7 compute", 20: "stream 20 all_gather"}
    assert events_of(document, cat="kernel")[0]["tid"] == 20


def test_spans_that_overlap_on_a_stream_get_a_track_each(make_trace: Callable[..., Trace]) -> None:
    spans = [{"start": 0, "end": 2, "name": "a"}, {"start": 1, "end": 3, "name": "b"}, {"start": 2, "end": 4}]
    kernels = events_of(chrome_trace(make_trace(spans)), cat="kernel")
    assert [kernel["tid"] for kernel in kernels] == [7, 20, 7]


def test_copies_and_cpu_work_are_where_a_profiler_puts_them(make_trace: Callable[..., Trace]) -> None:
    """A copy is a memcpy on the GPU's process; the CPU optimizer is on a thread of the host's."""
    spans = [
        {"kind": "h2d", "stream": "h2d", "bytes": 64, "start": 0, "end": 1},
        {"kind": "cpu", "stream": "cpu", "name": "cpu_adam", "start": 1, "end": 2},
    ]
    document = chrome_trace(make_trace(spans))
    (copy,) = events_of(document, cat="gpu_memcpy")
    assert (copy["name"], copy["args"]["bytes"]) == ("Memcpy HtoD (Pinned -> Device)", 64)
    (adam,) = events_of(document, name="cpu_adam")
    assert (adam["cat"], adam["pid"]) == ("cpu_op", events_of(document, name="cudaMemcpyAsync")[0]["pid"])


def test_the_host_thread_works_between_issues_and_shows_its_blocks(make_trace: Callable[..., Trace]) -> None:
    """Issued at 1 and 6; from 2 to 5 the host was blocked on the first op: working 0-1 and 5-6. Then a hook
    took it until 8."""
    spans = [{"name": "a", "issue": 1, "start": 1, "end": 5}, {"name": "b", "issue": 6, "start": 6, "end": 7}]
    spans.append({"kind": "host", "stream": "host", "name": "hook", "start": 8, "end": 8})
    document = chrome_trace(make_trace(spans, host_blocks=[(0, 2.0, 5.0, "a")]))
    ops = {
        event["name"]: (event["ts"] / 1e6, event["dur"] / 1e6) for event in events_of(document, cat="cpu_op")
    }
    assert ops == {"a": (0.0, 1.0), "b": (5.0, 1.0)}
    (block,) = events_of(document, name="cudaStreamSynchronize")
    assert (block["ts"], block["dur"]) == (2e6, 3e6)
    (hook,) = events_of(document, name="hook")
    assert (hook["ts"], hook["dur"]) == (6e6, 2e6)


def test_memory_is_a_counter_per_device_with_a_series_per_category(make_trace: Callable[..., Trace]) -> None:
    """What one instant allocates is one sample, and what it frees after that another."""
    memory = [
        (0, 0.0, "gpu", "parameters", 10, "a"),
        (0, 1.0, "gpu", "buffers", 4, "b"),
        (0, 1.0, "host", "buffers", 7, "b"),
        (0, 1.0, "gpu", "buffers", 1, "b"),
        (0, 1.0, "gpu", "buffers", -2, "b"),
        (0, 0.5, "gpu", "buffers", -1, "b"),
        (0, 2.0, "gpu", "buffers", -2, "b"),
        (0, 2.0, "gpu", "parameters", 3, "b"),
    ]
    document = chrome_trace(make_trace([{"start": 0, "end": 2}], memory=memory))
    samples = [(event["name"], event["ts"], event["args"]) for event in events_of(document, ph="C")]
    assert samples == [
        ("gpu memory", 0.0, {"buffers": 0, "parameters": 10}),
        ("gpu memory", 1e6, {"buffers": 5, "parameters": 10}),
        ("gpu memory", 1e6, {"buffers": 2, "parameters": 10}),
        ("host memory", 1e6, {"buffers": 7, "parameters": 0}),
        ("gpu memory", 2e6, {"buffers": 0, "parameters": 13}),
    ]


def test_the_step_and_its_phases_are_annotated(make_sharded_step: Callable[..., Trace]) -> None:
    document = chrome_trace(make_sharded_step(), step=3)
    (step,) = events_of(document, cat="user_annotation")
    assert (step["name"], step["ts"]) == ("ProfilerStep#3", 0.0)
    names = [event["name"] for event in events_of(document, cat="gpu_user_annotation")]
    assert names == ["## forward ##", "## backward ##", "## optimizer ##"]


def test_recomputation_is_part_of_the_backward_pass(make_trace: Callable[..., Trace]) -> None:
    spans = [{"start": i, "end": i + 1, "phase": phase} for i, phase in enumerate(["recompute", "backward"])]
    (backward,) = events_of(chrome_trace(make_trace(spans)), cat="gpu_user_annotation")
    assert (backward["name"], backward["dur"]) == ("## backward ##", 2e6)


def test_complete_events_of_a_thread_nest_and_never_cross(make_sharded_step: Callable[..., Trace]) -> None:
    """In whole nanoseconds, as viewers read them."""
    rows = defaultdict(list)
    for event in events_of(chrome_trace(make_sharded_step(num_blocks=7)), ph="X"):
        start = round(event["ts"] * 1000)
        rows[event["pid"], event["tid"]].append((start, -round(event["dur"] * 1000)))
    for spans in rows.values():
        open_ends: list[int] = []
        for start, negative in sorted(spans):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or start - negative <= open_ends[-1]
            open_ends.append(start - negative)


def test_the_same_trace_gives_the_same_bytes_and_gz_is_the_same_json(
    make_sharded_step: Callable[..., Trace], tmp_path: Path
) -> None:
    first, second = (
        write_chrome_trace(make_sharded_step(), tmp_path / name) for name in ("a.json.gz", "b.json.gz")
    )
    assert first.read_bytes() == second.read_bytes()
    text = write_chrome_trace(make_sharded_step(), tmp_path / "a.json").read_bytes()
    assert gzip.decompress(first.read_bytes()) == text
    assert first.read_bytes()[4:8] == bytes(4), "the time of writing is not in the file"

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    assert json.loads(text, parse_constant=refuse)["displayTimeUnit"] == "ms"


def test_the_rank_stands_on_a_line_with_a_space_where_traceinsight_looks_for_it(
    make_sharded_step: Callable[..., Trace], tmp_path: Path
) -> None:
    path = write_chrome_trace(make_sharded_step(rank=3), tmp_path / "a.json")
    lines = [line for line in path.read_text().splitlines() if re.search(r'"rank":\s+3\b', line)]
    assert len(lines) == 1
    assert len(lines[0]) < 1000


def test_a_recording_without_issue_times_has_no_launches(make_trace: Callable[..., Trace]) -> None:
    document = chrome_trace(make_trace([{"issue": float("nan"), "start": 0, "end": 1}]))
    assert events_of(document, cat="cuda_runtime") == []
    assert len(events_of(document, cat="kernel")) == 1


def test_each_rank_gets_a_file(make_trace: Callable[..., Trace], tmp_path: Path) -> None:
    trace = make_trace([{"start": 0, "end": 1, "rank": 2}, {"start": 0, "end": 2, "rank": 5}])
    paths = write_chrome_traces(trace, tmp_path / "traces")
    assert [path.name for path in paths] == ["rank2.json.gz", "rank5.json.gz"]
    document = json.loads(gzip.decompress(paths[1].read_bytes()))
    assert document["distributedInfo"]["rank"] == 5
    assert [event["dur"] for event in events_of(document, cat="kernel")] == [2e6]


@pytest.mark.skipif(importlib.util.find_spec("hta") is None, reason="traceinsight is not installed")
def test_traceinsight_reads_it_and_finds_the_same_overlap(
    make_sharded_step: Callable[..., Trace], tmp_path: Path
) -> None:
    """4 blocks: 8 gathers of 1 ms and 4 reduce-scatters of 2 ms are 16 ms of communication. Exposed are the
    first gather and the last reduce-scatter, 3 ms; the rest runs under kernels: 13/16 = 81.25 %."""
    from hta.trace_analysis import TraceAnalysis

    for rank in range(2):
        write_chrome_trace(make_sharded_step(rank=rank), tmp_path / f"rank{rank}.json.gz")
    analysis = TraceAnalysis(trace_dir=str(tmp_path))
    overlap = analysis.get_comm_comp_overlap(visualize=False)
    assert overlap["comp_comm_overlap_pctg"].tolist() == pytest.approx([81.25, 81.25], abs=0.1)
    breakdown = analysis.get_temporal_breakdown(visualize=False)
    assert breakdown["compute_time(us)"].tolist() == pytest.approx([27000, 27000])
    kernels, _ = analysis.get_gpu_kernel_breakdown(visualize=False)
    assert set(kernels["kernel_type"]) >= {"COMPUTATION", "COMMUNICATION"}


def test_a_ranks_trace_knows_its_own_groups_alone() -> None:
    """Pairs of other pipeline ranks are groups of the step, and none of this rank's."""
    model = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024,
    }  # fmt: skip
    experiment = zsim.Experiment(
        model=model,
        cluster="dgx-h100",
        gpus=4,
        strategy={"kind": "megatron"},
        parallelism={"pipeline": 4, "virtual_stages": 2},
        training={"sequence_length": 128, "gradient_accumulation_steps": 4},
    )
    trace = zsim.simulate(experiment).trace
    found = {}
    for rank in range(4):
        events = chrome_trace(trace, rank)["traceEvents"]
        groups = {event["args"].get("Process Group Ranks") for event in events if "args" in event} - {None}
        assert groups
        assert all(str(rank) in group for group in groups)
        found[rank] = groups
    assert found[0] != found[2]
