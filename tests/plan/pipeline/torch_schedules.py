"""Torch's own pipeline schedules, run on stages that only write down what they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules

CLASSES = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,
    "looped-bfs": schedules.ScheduleLoopedBFS,
    "interleaved-zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv-zero-bubble": schedules.ScheduleZBVZeroBubble,
    "dualpipe-v": schedules.ScheduleDualPipeV,
}
Log = list[str]


class FakeFsdp(FSDPModule):
    """A module that is FSDP's and writes down what it is told."""

    log: Log
    stage: int

    def __new__(cls, log: Log, stage: int) -> FakeFsdp:
        module: FakeFsdp = object.__new__(cls)
        module.log, module.stage = log, stage
        return module

    def modules(self) -> Iterator[FakeFsdp]:
        yield self

    def unshard(self, async_op: bool = False) -> Any:
        assert async_op
        self.log.append(f"{self.stage}UNSHARD")
        return SimpleNamespace(wait=lambda: None)

    def reshard(self) -> None:
        self.log.append(f"{self.stage}RESHARD")


class FakeStage:
    """A stage without a model: writes its computations and hands out messages by name."""

    def __init__(self, log: Log, stage: int, stages: int, rank: int, ranks: int) -> None:
        self.log, self.stage_index, self.num_stages = log, stage, stages
        self.group_rank, self.group_size, self.has_backward = rank, ranks, True
        self.submod = FakeFsdp(log, stage)
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.stage_index_to_group_rank: dict[int, int] = {}

    def _ops(self, kind: str, number: int, *, is_none: bool) -> list[Any]:
        name = f"{self.stage_index}{kind}{number}"
        operation = dist.isend if kind.startswith("SEND") else dist.irecv
        op = SimpleNamespace(op=operation, tensor=name, group=None, tag=0, group_peer=0, peer=0)
        return [] if is_none else [op]

    def get_fwd_recv_ops(self, number: int) -> list[Any]:
        return self._ops("RECV_F", number, is_none=self.is_first)

    def get_fwd_send_ops(self, number: int) -> list[Any]:
        return self._ops("SEND_F", number, is_none=self.is_last)

    def get_bwd_recv_ops(self, number: int) -> list[Any]:
        return self._ops("RECV_B", number, is_none=self.is_last)

    def get_bwd_send_ops(self, number: int) -> list[Any]:
        return self._ops("SEND_B", number, is_none=self.is_first)

    def forward_one_chunk(self, number: int, *_: Any, **__: Any) -> None:
        self.log.append(f"{self.stage_index}F{number}")

    def backward_one_chunk(self, number: int, *, full_backward: bool = True, **_: Any) -> None:
        self.log.append(f"{self.stage_index}{'B' if full_backward else 'I'}{number}")

    def backward_weight_one_chunk(self, number: int, **_: Any) -> None:
        self.log.append(f"{self.stage_index}W{number}")

    def perform_reduce_grad(self, _: int) -> None:
        self.log.append(f"{self.stage_index}REDUCE_GRAD")

    def set_local_fwd_input(self, *_: Any) -> None:
        """Nothing: the stages have no data."""

    def set_local_bwd_input(self, *_: Any) -> None:
        """Nothing: the stages have no data."""

    def get_local_bwd_output(self, _: int) -> None:
        """Nothing: the stages have no data."""


def torch_schedule(
    name: str, ranks: int, virtual: int, micro_batches: int, rank: int = 0, log: Log | None = None
) -> Any:
    """The schedule object of one rank; raises ValueError for the counts that torch refuses."""
    log = [] if log is None else log
    is_v = name in ("zbv-zero-bubble", "dualpipe-v")
    held = [rank, 2 * ranks - 1 - rank] if is_v else [rank + ranks * chunk for chunk in range(virtual)]
    stages = [FakeStage(log, stage, ranks * virtual, rank, ranks) for stage in held]
    made: Any = CLASSES[name]
    return made(stages[0] if name in ("gpipe", "1f1b") else stages, n_microbatches=micro_batches)


def torch_log(name: str, ranks: int, virtual: int, micro_batches: int, rank: int) -> Log:
    """All that torch's schedule does on a rank: computations, FSDP's actions, messages as "isend ...",
    "irecv ..." and "batch ...", and "wait ..."."""
    log: Log = []
    schedule = torch_schedule(name, ranks, virtual, micro_batches, rank, log)
    run_schedule(schedule, micro_batches, log)
    return log


def run_schedule(schedule: Any, micro_batches: int, log: Log) -> None:
    """Runs a schedule's step over its fake stages, with torch's sends and receives written to `log`."""

    def work(text: str) -> Any:
        return SimpleNamespace(wait=lambda: log.append(f"wait {text}"))

    def alone(operation: str) -> Callable[..., Any]:
        def post(tensor: str, **_: Any) -> Any:
            log.append(f"{operation} {tensor}")
            return work(tensor)

        return post

    def batch(ops: Sequence[Any]) -> list[Any]:
        names = " ".join(op.tensor for op in ops)
        log.append(f"batch {names}")
        return [work(names)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", alone("isend"))
        patch.setattr(dist, "irecv", alone("irecv"))
        patch.setattr(dist, "batch_isend_irecv", batch)
        patch.setattr(schedule, "_initialize_stage", lambda *_: None, raising=False)
        patch.setattr(schedule, "_initialize_stages", lambda *_: None, raising=False)
        schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches)
