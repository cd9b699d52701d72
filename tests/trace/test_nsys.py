"""Exports of `nsys export --type sqlite`, made by hand after NVIDIA's schema reference."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

import zsim
from tests.expect import about

PROCESS = 5 * 0x1000000
GEMM, GATHER, SYNCHRONIZE, STEP = 1, 2, 3, 4
NAMES = {
    GEMM: "ampere_bf16_gemm",
    GATHER: "ncclDevKernel_AllGather_RING_LL",
    SYNCHRONIZE: "cudaStreamSynchronize_v3020",
    STEP: "step 7",
}


def make_export(path: Path, processes: Sequence[int] = (PROCESS,), has_kernels: bool = True) -> Path:
    database = sqlite3.connect(path)
    run = database.execute
    run("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL)")
    database.executemany("INSERT INTO StringIds VALUES (?, ?)", NAMES.items())
    if has_kernels:
        run(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, streamId INT, "
            "correlationId INT, globalPid INT, demangledName INT, shortName INT)"
        )
        run("CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT, end INT, deviceId INT, streamId INT, "
            "correlationId INT, globalPid INT, bytes INT, copyKind INT)")  # fmt: skip
        run("CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT, correlationId INT, "
            "nameId INT)")  # fmt: skip
        run("CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT, textId INT, "
            "globalTid INT)")  # fmt: skip
        for device, process in enumerate(processes):
            thread, kernels = process + 77, "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,?,?,?,?,?)"
            run(kernels, (5_000, 25_000, device, 7, 11, process, GEMM, GEMM))
            run(kernels, (15_000, 45_000, device, 20, 12, process, GATHER, GATHER))
            copy = (50_000, 52_000, device, 7, 13, process, 640, 1)
            run("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?,?,?,?,?,?,?,?)", copy)
            for start, end, number, name in (
                (1_000, 2_000, 11, 0),
                (3_000, 4_000, 12, 0),
                (8_000, 9_000, 13, 0),
                (10_000, 60_000, 14, SYNCHRONIZE),
            ):
                row = (start, end, thread, number, name)
                run("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,?)", row)
            for text_row in (
                (0, 100_000, 59, None, STEP, thread),
                (2_500, 4_500, 59, "FSDP::all_gather (layers.1)", None, thread),
            ):
                run("INSERT INTO NVTX_EVENTS VALUES (?,?,?,?,?,?)", text_row)
    database.commit()
    database.close()
    return path


def test_an_export_has_kernels_copies_ranges_and_waits(tmp_path: Path) -> None:
    trace = zsim.read_trace(make_export(tmp_path / "report.sqlite"))
    assert [(s.number, s.seconds) for s in trace.steps] == [(7, about(100e-6))]
    rows = {(i.kind, i.stream, i.bytes, i.module, round(s * 1e6), round(e * 1e6))
            for _, i, s, e in trace.rows()}  # fmt: skip
    assert rows == {
        ("compute", "compute", 0, "", 5, 25),
        ("all_gather", "all_gather", 0, "layers.1", 15, 45),
        ("h2d", "compute", 640, "", 50, 52),
    }
    assert [block[:3] for block in trace.host_blocks] == [(0, about(10e-6), about(60e-6))]
    assert "1 collectives whose size is not recorded" in trace.metadata["notes"]


def test_each_process_with_a_gpu_is_a_rank(tmp_path: Path) -> None:
    trace = zsim.read_trace(make_export(tmp_path / "node.sqlite", (9 * 0x1000000, PROCESS)))
    assert trace.metadata["ranks"] == (0, 1)
    assert trace.world_size == 2


def test_an_export_without_kernels_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(zsim.InputError, match=r"has no table CUPTI_ACTIVITY_KIND_KERNEL \(it has StringIds"):
        zsim.read_trace(make_export(tmp_path / "a.sqlite", has_kernels=False))
    damaged = tmp_path / "b.sqlite"
    damaged.write_bytes(make_export(tmp_path / "c.sqlite").read_bytes()[:3000])
    with pytest.raises(zsim.InputError, match="cannot be read as an export of `nsys"):
        zsim.read_trace(damaged)
