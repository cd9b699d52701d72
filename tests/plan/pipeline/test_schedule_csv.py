"""Schedules in torch's CSV format: read and lowered as torch does, and refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from tests.plan.pipeline.runtimes import orders_of, parallelism_of, steps_of
from tests.plan.pipeline.test_against_torch_schedules import settled, told
from tests.plan.pipeline.torch_schedules import FakeStage, Log, run_schedule, torch_schedule
from zsim.errors import InputError
from zsim.plan.pipeline.csv_schedule import read_csv
from zsim.plan.pipeline.lowering import ranks_of

RANKS, VIRTUAL, MICRO_BATCHES = 3, 2, 6
ZERO_BUBBLE = "0F0,0F1,,0I0,0W0,0B1\n1F0,1I0,1F1,1W0,1B1\n"  # 2 ranks, one stage each, 2 micro-batches


@pytest.mark.parametrize("kind", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", ["interleaved-1f1b", "interleaved-zero-bubble", "zbv-zero-bubble"])
def test_a_file_runs_as_in_torch(
    name: str, kind: Literal["compute_only", "compute_comms"], tmp_path: Path
) -> None:
    """Torch writes one of its schedules and reads it back; both formats give the schedule's own steps."""
    file = tmp_path / "schedule.csv"
    torch_schedule(name, RANKS, VIRTUAL, MICRO_BATCHES)._dump_csv(str(file), kind)
    rank_of = ranks_of(parallelism_of(name, RANKS, VIRTUAL), MICRO_BATCHES)
    programs = steps_of(
        "torch", "interleaved-1f1b", RANKS, VIRTUAL, MICRO_BATCHES, csv=file.read_text(), is_fsdp=True
    )
    for rank, steps in enumerate(programs):
        log: Log = []
        stages: Any = [
            FakeStage(log, stage, RANKS * VIRTUAL, rank, RANKS)
            for stage, home in enumerate(rank_of)
            if home == rank
        ]
        schedule = _PipelineScheduleRuntime(stages, MICRO_BATCHES)
        schedule._load_csv(str(file), kind)
        run_schedule(schedule, MICRO_BATCHES, log)
        assert settled(told(steps)) == settled(log), rank
    from_file = parallelism_of("1f1b", RANKS, VIRTUAL, csv=file.read_text())
    assert ranks_of(from_file, MICRO_BATCHES) == rank_of


def test_overlaps_are_read(tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    torch_schedule("dualpipe-v", RANKS, VIRTUAL, MICRO_BATCHES)._dump_csv(str(file), "compute_only")
    assert "OVERLAP_F_B" in file.read_text()
    counts = (RANKS, VIRTUAL, MICRO_BATCHES)
    orders = orders_of("torch", "dualpipe-v", *counts)
    assert read_csv(file.read_text(), *counts).orders == orders


def test_steps_that_wait_and_empty_cells_are_passed_over() -> None:
    steps = steps_of("torch", "1f1b", 2, 1, 2, csv=ZERO_BUBBLE)
    assert [str(one) for one in steps[0] if hasattr(one, "kind")] == ["0F0", "0F1", "0I0", "0W0", "0B1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("0F1", "0G1"), "row 1, cell 2: found '0G1', expected [stage][action][micro-batch] such"),
        (("0F1", "0F"), "row 1, cell 2: found '0F', expected"),
        (("0F1", "0F7"), "rank 0: 0B1 stands before the forward or the I of its micro-batch"),
        (("1F0,", "0F0,"), "stage 0 is on ranks 0 and 1; expected it on one"),
        (("1F0,1I0,1F1,1W0", "2F0,2I0,1F1,2W0"), "found 3 stages, numbered up to 2; expected 2, 0 to 1"),
        ((",1B1", ""), "stage 1 has 2 forwards and 1 backwards; expected one of each for each of the 2"),
        (("0W0", "0B0"), "stage 0 has 2 forwards and 3 backwards"),
        (("0W0", "0W0,0B0"), "stage 0 has 2 forwards and 3 backwards"),
        (("0W0,", ""), "a backward whole (B) or in two (I and W)"),
        (("0F0,0F1,,0I0", "0F0,0I0,,0F1"), "these wait for inputs that come after them: 0I0 on rank 0"),
        (("\n1F0", ",1F0"), "found 1 rows, one per pipeline rank; expected 2, as parallelism.pipeline"),
    ],
)
def test_a_file_that_cannot_be_a_schedule_is_refused(change: tuple[str, str], message: str) -> None:
    text = ZERO_BUBBLE.replace(*change)
    if "come after" in message:
        text = text.replace("1F0,1I0,1F1,1W0,1B1", "1F1,1I1,1F0,1W1,1B0")
    with pytest.raises(InputError) as caught:
        steps_of("torch", "1f1b", 2, 1, 2, csv=text)
    assert str(caught.value).startswith("parallelism.schedule_csv: ")
    assert message in str(caught.value)


def test_only_torch_reads_a_file() -> None:
    with pytest.raises(InputError, match=r"parallelism\.schedule_csv: Megatron reads no schedule"):
        steps_of("megatron", "1f1b", 2, 1, 2, csv=ZERO_BUBBLE)
