"""Schedules in torch's CSV format: read and lowered as torch does, and refused in one sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import pytest
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import zsim
from tests.plan.pipeline.runtimes import orders_of, parallelism_of, steps_of
from tests.plan.pipeline.test_against_torch_schedules import settled, told
from tests.plan.pipeline.torch_schedules import FakeStage, Log, run_schedule, torch_schedule
from zsim.errors import InputError
from zsim.plan.checks import check_plan
from zsim.plan.make import make_plan
from zsim.plan.ops import Collective
from zsim.plan.pipeline.lowering import ranks_of, read_csv
from zsim.specs.experiment.resolve import resolve

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


def _fsdp_calls(text: str, file: Path) -> dict[str, int]:
    """Bytes of each kind of FSDP2's collectives on the first of 2 pipeline ranks with 2 stages each and 4
    micro-batches."""
    file.write_text(text)
    experiment = zsim.Experiment(
        model="llama-2-7b", cluster="dgx-h100", gpus=4, strategy={"kind": "fsdp2"},
        training={"sequence_length": 128, "micro_batch_size": 1, "gradient_accumulation_steps": 4},
        parallelism={"pipeline": 2, "virtual_stages": 2, "schedule_csv": str(file)},
    )  # fmt: skip
    plan = make_plan(resolve(experiment))
    check_plan(plan)
    works = [op.work for op in plan.programs[0].ops if isinstance(op.work, Collective)]
    kinds = ("all_gather", "reduce_scatter")
    return {kind: sum(work.bytes for work in works if work.kind == kind) for kind in kinds}


def test_gradients_may_be_reduced_behind_every_backward(tmp_path: Path) -> None:
    """Llama 3 shards gradients under an interleaved pipeline. torch runs what a lowered file says, and each
    `perform_reduce_grad` reshards too, so that four micro-batches reduce four times and gather four times."""
    file = tmp_path / "schedule.csv"
    torch_schedule("interleaved-1f1b", 2, 2, 4)._dump_csv(str(file), "compute_comms")
    late = file.read_text()
    kept = re.sub(r"\dREDUCE_GRAD,?", "", late)
    early = re.sub(r"\b(\d)B(\d)\b", r"\1B\2,\1REDUCE_GRAD", kept)
    last, every = _fsdp_calls(late, file), _fsdp_calls(early, file)
    assert every == {kind: 4 * size for kind, size in last.items()}


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
