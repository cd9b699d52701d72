"""Other people's traces, in the folder that ZSIM_EXTERNAL_TRACES names; they stay out of the repository:
resnet50_ddp_2xA100_rank0_nccl_data.json.gz of facebookresearch/HolisticTraceAnalysis, and
dlrm_8xv100_kineto.tar.gz of facebookresearch/param."""

from __future__ import annotations

import os
import tarfile
from collections import Counter
from pathlib import Path

import pytest

import zsim
from tests.expect import there
from zsim.trace.trace import COLLECTIVES

NAMED = os.environ.get("ZSIM_EXTERNAL_TRACES")
FOLDER = Path(NAMED or "")
pytestmark = pytest.mark.skipif(not NAMED, reason="needs other people's traces: set ZSIM_EXTERNAL_TRACES")


def test_resnet50_has_the_buckets_that_ddp_makes() -> None:
    """Holistic Trace Analysis' test data, 2x A100, rank 0, 3 steps: elements of ResNet-50's five buckets
    (closing one at 1 MiB first and at 25 MiB later gives the same), and its BatchNorm buffers."""
    trace = zsim.read_trace(FOLDER / "resnet50_ddp_2xA100_rank0_nccl_data.json.gz")
    assert [step.number for step in trace.steps] == [4, 5, 6]
    for step in trace.steps:
        infos = [info for _, info, _, _ in trace.select_step(step.number).rows() if info.kind in COLLECTIVES]
        reduced = [info.bytes // 4 for info in infos if info.kind == "all_reduce"]
        assert reduced == [2_049_000, 7_875_584, 6_563_840, 6_637_568, 2_431_040]
        assert [info.bytes for info in infos if info.kind == "broadcast"] == [4 * 53_120, 8 * 53]
    assert trace.step_seconds == pytest.approx(0.2224, abs=1e-4)


def test_dlrm_of_2023_is_sized_by_shapes_and_its_ranks_wait_for_each_other(tmp_path: Path) -> None:
    """facebookresearch/param, 8x V100: sizes stand only in the shapes of inputs. Rank 0's first all-to-all
    lasts 2.1 ms, of which 10 us are transfer."""
    with tarfile.open(FOLDER / "dlrm_8xv100_kineto.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    trace = zsim.read_trace(tmp_path / "dlrm_kineto")
    assert trace.metadata["ranks"] == tuple(range(8))
    first = trace.select_rank(0)
    found = [
        (info.kind, info.bytes, round((end - start) * 1e6), round(transfer * 1e6))
        for (_, info, start, end), transfer in zip(first.rows(), there(first.transfer_seconds), strict=True)
        if info.kind in COLLECTIVES
    ]
    assert found[0] == ("all_to_all", 24_576, 2146, 10)
    assert Counter(kind for kind, *_ in found) == {"all_to_all": 5, "all_reduce": 3}
    assert [count for kind, count, _, _ in found if kind == "all_reduce"] == [1_576_964, 448, 907_840]


@pytest.mark.parametrize("step", [4, 5, 6])
def test_resnet50_replayed_without_changes_is_what_it_was(step: int) -> None:
    trace = zsim.read_trace(FOLDER / "resnet50_ddp_2xA100_rank0_nccl_data.json.gz")
    parts = zsim.replay(trace, step=step).breakdowns()
    assert parts["replayed"] == pytest.approx(parts["recorded"], abs=1e-9)


def test_eight_real_ranks_that_wait_for_each_other_are_replayed() -> None:
    """DLRM again, from the archive as it is: waiting for hosts that came later, and copies from pageable
    memory that block the host a millisecond for microseconds of copying."""
    archive = FOLDER / "dlrm_8xv100_kineto.tar.gz"
    replay = zsim.replay(zsim.read_trace(archive))
    assert sorted(set(replay.replayed.ranks.tolist())) == list(range(8))
    assert replay.step_seconds == pytest.approx(replay.recorded_seconds, abs=1e-9)
    parts = replay.breakdowns()
    assert parts["recorded"]["offload_stall"] == pytest.approx(972e-6, abs=1e-6)
    assert parts["replayed"] == pytest.approx(parts["recorded"], abs=1e-9)
