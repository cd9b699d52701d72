from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zsim
from tests.conftest import KinetoBuilder
from tests.expect import about, there
from zsim.trace.trace import Trace

ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
MAIN, AUTOGRAD = 4000, 4001


def collective_of(trace: Trace) -> tuple[str, int, str | None, str, int | None]:
    """(kind, bytes, dtype, group, group size) of the only collective of rank 0."""
    found = {
        (i.kind, i.bytes, i.dtype, i.group, i.group_size)
        for rank, i, _, _ in trace.rows()
        if i.group and rank == 0
    }
    assert len(found) == 1
    return found.pop()


def test_a_kernels_own_metadata_says_what_the_collective_is(
    kineto: Callable[..., KinetoBuilder], metadata: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Torch 2.3 and newer. 1,000 elements in, 2,000 out, 2 bytes each: an all-gather of 4,000 bytes."""
    file = kineto()
    file.step(3, 0, 100)
    file.launch("gemm", 1, 5, 20)
    file.launch(ALL_GATHER, 10, 15, 30, stream=20, **metadata("_allgather_base", 1000, 2000, [0, 1]))
    trace = zsim.read_trace(file.write(tmp_path / "rank0.json"))
    assert collective_of(trace) == ("all_gather", 4000, "bf16", "world", 2)
    assert trace.source == "recorded"
    assert trace.world_size == 2
    assert [step.number for step in trace.steps] == [3]


def test_metadata_on_the_cpu_op_is_joined_by_external_id(
    kineto: Callable[..., KinetoBuilder], metadata: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Torch 2.1 and 2.2, and RCCL, whose kernels are all called Generic: a reduce-scatter of 4,000 bytes."""
    file = kineto()
    file.step(3, 0, 100)
    args = metadata("_reduce_scatter_base", 2000, 1000, [0, 1])
    file.complete("cpu_op", "record_param_comms", 1, 2, **{"External id": 77}, **args)
    file.launch("ncclDevKernel_Generic_1(ncclDevKernelArgs)", 10, 15, 30, stream=20, external=77)
    trace = zsim.read_trace(file.write(tmp_path / "rank0.json.gz"))
    assert collective_of(trace) == ("reduce_scatter", 4000, "bf16", "world", 2)


def test_metadata_on_the_cpu_op_is_found_around_the_launch(
    kineto: Callable[..., KinetoBuilder], metadata: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """The kernel's External id is its own; the launch lies inside record_param_comms."""
    file = kineto()
    file.step(3, 0, 100)
    args = metadata("allreduce", 1000, 1000, [0, 1])
    file.complete("cpu_op", "record_param_comms", 8, 8, **{"External id": 77}, **args)
    file.launch("ncclDevKernel_Generic_1(ncclDevKernelArgs)", 10, 15, 30, stream=20)
    trace = zsim.read_trace(file.write(tmp_path / "rank0.json"))
    assert collective_of(trace) == ("all_reduce", 2000, "bf16", "world", 2)


def test_a_collective_is_sized_from_the_shapes_of_its_input(
    kineto: Callable[..., KinetoBuilder], tmp_path: Path
) -> None:
    """2022 and 2023: only Input Dims. An all-gather of 6,144 floats from each of 2 ranks is 49,152 bytes."""
    file = kineto()
    file.step(3, 0, 100)
    dims: dict[str, Any] = {"Input Dims": [[6144], [], []], "Input type": ["float", "Scalar", ""]}
    file.complete("cpu_op", "record_param_comms", 8, 9, **{"External id": 77}, **dims)
    inner: dict[str, Any] = {"Input Dims": [[6144]], "Input type": ["float"]}
    file.complete("user_annotation", "nccl:_all_gather_base", 9, 7, **inner)
    file.launch("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*)", 10, 15, 30, stream=20)
    trace = zsim.read_trace(file.write(tmp_path / "rank0.json"))
    assert collective_of(trace) == ("all_gather", 49_152, "fp32", "world", 2)
    assert any("taken to be all ranks" in note for note in trace.metadata["notes"])


def test_a_list_of_tensors_counts_as_their_sum(kineto: Callable[..., KinetoBuilder], tmp_path: Path) -> None:
    """DDP's bucket of 2 tensors, 100 and 3 x 4 floats: 448 bytes."""
    file = kineto()
    file.step(3, 0, 100)
    shapes: dict[str, Any] = {"Input Dims": [[[100], [3, 4]]], "Input type": ["TensorList"]}
    file.complete("user_annotation", "nccl:all_reduce", 9, 7, **shapes)
    file.launch("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", 10, 15, 30, stream=20)
    assert collective_of(zsim.read_trace(file.write(tmp_path / "a.json")))[:2] == ("all_reduce", 448)


def test_kernels_belong_to_the_part_of_the_step_that_launched_them(
    kineto: Callable[..., KinetoBuilder], tmp_path: Path
) -> None:
    """Autograd launches from its own thread; the optimizer and FSDP2 write ranges around what they do."""
    file = kineto()
    file.step(3, 0, 100)
    file.complete("user_annotation", "FSDP::pre_forward (layers.1)", 0, 10)
    file.complete("user_annotation", "Optimizer.step#AdamW.step", 60, 20)
    file.complete("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 30, 10, tid=AUTOGRAD)
    file.launch("first", 5, 15, 5)
    file.launch("second", 32, 35, 5, tid=AUTOGRAD)
    file.launch("third", 62, 65, 5)
    file.launch("void at::native::direct_copy_kernel_cuda", 20, 25, 5)
    trace = zsim.read_trace(file.write(tmp_path / "rank0.json"))
    found = {i.name[:6]: (i.kind, i.phase, i.module) for _, i, _, _ in trace.rows()}
    assert found == {
        "first": ("compute", "forward", "layers.1"),
        "second": ("compute", "backward", ""),
        "third": ("optimizer", "optimizer", ""),
        "void a": ("copy", "forward", ""),
    }


def test_streams_are_called_by_what_they_do(
    kineto: Callable[..., KinetoBuilder], metadata: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    file = kineto()
    file.step(3, 0, 100)
    file.launch("gemm", 1, 5, 20, stream=7)
    file.launch(ALL_GATHER, 10, 15, 30, stream=20, **metadata("_allgather_base", 1000, 2000, [0, 1]))
    file.launch("Memcpy HtoD (Pinned -> Device)", 12, 20, 5, stream=24, cat="gpu_memcpy", bytes=64)
    trace = zsim.read_trace(file.write(tmp_path / "rank0.json"))
    found = {(i.stream, i.kind, i.bytes) for _, i, _, _ in trace.rows()}
    assert found == {("compute", "compute", 0), ("all_gather", "all_gather", 4000), ("h2d", "h2d", 64)}


def test_a_step_ends_with_its_last_kernel_and_the_next_begins_there(
    kineto: Callable[..., KinetoBuilder], tmp_path: Path
) -> None:
    """The host runs ahead: it is done with the steps at 10 and 20 us, the GPU at 60 and 100."""
    file = kineto()
    file.step(1, 0, 10)
    file.step(2, 10, 10)
    file.launch("a", 1, 5, 55)
    file.launch("b", 11, 60, 40)
    trace = zsim.read_trace(file.write(tmp_path / "rank0.json"))
    assert [(s.number, s.seconds) for s in trace.steps] == [(1, about(60e-6)), (2, about(40e-6))]
    second = trace.select_step(2)
    assert second.start_seconds.tolist() == pytest.approx([0.0])
    assert second.step_seconds == pytest.approx(40e-6)
    assert trace.typical_step().step_seconds == pytest.approx(40e-6)


def test_without_a_schedule_steps_end_with_the_optimizer(
    kineto: Callable[..., KinetoBuilder], tmp_path: Path
) -> None:
    """Two optimizers of one step, one after the other, end one step; the next backward comes between.

    The clock begins when the first kernel is issued, at 3 us; the steps end at 90 and 190 us.
    """
    file = kineto()
    backward = "autograd::engine::evaluate_function: MmBackward0"
    for begin in (0, 100):
        file.launch("gemm", begin + 1, begin + 5, 20)
        file.complete("cpu_op", backward, begin + 30, 10, tid=AUTOGRAD)
        file.complete("user_annotation", "Optimizer.step#AdamW.step", begin + 60, 10)
        file.complete("user_annotation", "Optimizer.step#SGD.step", begin + 80, 10)
    trace = zsim.read_trace(file.write(tmp_path / "rank0.json"))
    assert [(s.number, round(s.end_seconds * 1e6)) for s in trace.steps] == [(1, 87), (2, 187)]
    assert any("Optimizer.step" in note for note in trace.metadata["notes"])


def test_work_outside_the_steps_is_counted_and_left_out(
    kineto: Callable[..., KinetoBuilder], tmp_path: Path
) -> None:
    file = kineto()
    file.launch("before", 1, 2, 5)
    file.step(3, 10, 90)
    file.launch("gemm", 11, 15, 20)
    trace = zsim.read_trace(file.write(tmp_path / "rank0.json"))
    assert [i.name for _, i, _, _ in trace.rows()] == ["gemm"]
    assert trace.metadata["spans_outside_steps"] == 1


def test_allocations_are_changes_of_memory(kineto: Callable[..., KinetoBuilder], tmp_path: Path) -> None:
    """500 bytes were allocated before the profiler began."""
    file = kineto()
    file.step(3, 0, 100)
    file.launch("gemm", 1, 5, 20)
    for ts, change, total in ((10, 300, 800), (20, -100, 700)):
        args = {"Bytes": change, "Total Allocated": total, "Device Type": 1, "Device Id": 0}
        event = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": ts, "args": args}
        file.events.append({**event, "pid": MAIN, "tid": MAIN, "s": "t"})
    memory = there(zsim.read_trace(file.write(tmp_path / "rank0.json")).memory)
    assert memory.deltas.tolist() == [500, 300, -100]
    assert set(memory.devices) == {"gpu"}


def test_a_host_that_synchronizes_is_blocked(kineto: Callable[..., KinetoBuilder], tmp_path: Path) -> None:
    file = kineto()
    file.step(3, 0, 100)
    file.launch("gemm", 1, 5, 20)
    file.complete("cuda_runtime", "cudaStreamSynchronize", 10, 16, correlation=9)
    trace = zsim.read_trace(file.write(tmp_path / "rank0.json"))
    ((rank, start, end, info),) = trace.host_blocks
    assert (rank, round(start * 1e6), round(end * 1e6)) == (0, 10, 26)
    assert trace.infos[info].name == "gemm"


def test_gloo_ranges_get_kind_and_size_from_the_call(
    kineto: Callable[..., KinetoBuilder], tmp_path: Path
) -> None:
    """gloo reduces with an all-reduce where a reduce-scatter of 2,000 floats was asked for."""
    file = kineto()
    file.head["distributedInfo"]["backend"] = "gloo"
    file.step(3, 0, 100)
    file.complete("user_annotation", "FSDP::post_backward_reduce (layers.2)", 0, 50)
    call: dict[str, Any] = {"Input Dims": [[1000], [2000], []], "Input type": ["float", "float", ""]}
    file.complete("cpu_op", "c10d::_reduce_scatter_base_", 5, 30, **call)
    ran: dict[str, Any] = {"Input Dims": [[2000]], "Input type": ["float"]}
    file.complete("user_annotation", "gloo:all_reduce", 8, 20, tid=4100, **ran)
    file.complete("cpu_op", "aten::mm", 60, 10)
    trace = zsim.read_trace(file.write(tmp_path / "rank0.json"))
    assert collective_of(trace) == ("reduce_scatter", 8000, "fp32", "world", 2)
    found = {i.name: (i.stream, i.phase, i.module) for _, i, _, _ in trace.rows()}
    assert found["gloo:all_reduce"] == ("", "backward", "layers.2")
    assert found["aten::mm"][0] == "compute"


EVENT = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 2, "ts": 1.0, "dur": 2.0}
STEP = {**EVENT, "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0.0, "dur": 9.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tid": [1]}, r"event 2: \{.*\}?: a value is not as expected \(TypeError: unhashable type: 'list'"),
        ({"pid": {}}, r"event 2: .* \(TypeError: unhashable type: 'dict'"),
        ({"cat": "kernel", "args": {"stream": [7]}}, r"event 2: .* \(TypeError: unhashable type: 'list'"),
        ({"dur": 1e30}, r"event 'aten::mm': dur is 1e\+30; expected microseconds"),
        ({"ts": 1e308}, r"event 'aten::mm': ts is 1e\+308; expected microseconds"),
    ],
)
def test_an_event_with_a_field_of_another_type_is_named(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"traceEvents": [STEP, {**EVENT, **changes}]}))
    with pytest.raises(zsim.InputError, match=words) as refused:
        zsim.read_trace(path)
    assert str(refused.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (
            {"distributedInfo": {"pg_config": 5}},
            "distributedInfo: pg_config is '5'; expected a list of groups",
        ),
        ({"distributedInfo": {"world_size": 10**12}}, "says it is rank 0 of 1000000000000"),
        ({"baseTimeNanoseconds": 10**30}, r"is damaged, or no kineto trace .* \(OverflowError"),
    ],
)
def test_a_head_with_a_field_of_another_type_is_refused(
    tmp_path: Path, head: dict[str, Any], words: str
) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({**head, "traceEvents": [STEP, EVENT]}))
    with pytest.raises(zsim.InputError, match=words):
        zsim.read_trace(path)


def test_what_the_allocator_cannot_hold_is_refused_by_the_file(tmp_path: Path) -> None:
    memory = {"ph": "i", "name": "[memory]", "ts": 1.0, "args": {"Bytes": 10**30, "Total Allocated": 0}}
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"traceEvents": [STEP, EVENT, memory]}))
    with pytest.raises(zsim.InputError, match=r"rank0\.json: holds a number of more than 64 bits"):
        zsim.read_trace(path)
