"""torch's pipelines: the counts that `torch/distributed/pipelining/schedules.py` of torch 2.13 takes, and the
steps and messages of their runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zsim.frameworks.torch import pipeline_stage, pipeline_stages
from zsim.frameworks.torch.pipeline_messages import TorchMessenger
from zsim.plan.actions import Order, Step
from zsim.plan.builder import PlanBuilder
from zsim.plan.pipeline.csv_schedule import read_csv
from zsim.plan.pipeline.lowering import orders_of
from zsim.plan.pipeline.orders import chunk_group_size, ranks_of_stages
from zsim.plan.pipeline.pipeline_checks import check_micro_batches
from zsim.plan.pipeline.runtime import PipelineRuntime
from zsim.plan.stage import Stage


@dataclass(frozen=True, slots=True)
class TorchRuntime(PipelineRuntime):
    """`torch.distributed.pipelining`."""

    is_fsdp: bool = False
    """Stages are wrapped by FSDP, which is told when to gather, free and reduce."""

    def check(self, micro_batches: int) -> None:
        schedule, ranks = self.parallelism.schedule, self.parallelism.pipeline
        if schedule == "1f1b":
            expected = f"at least one per pipeline rank, {ranks}"
            check_micro_batches(self.parallelism, micro_batches, expected, lambda number: number >= ranks)
        elif schedule in ("interleaved-1f1b", "interleaved-zero-bubble"):
            expected = f"a multiple of its rounds, micro-batches // {ranks} pipeline ranks"
            check_micro_batches(
                self.parallelism, micro_batches, expected,
                lambda number: number % max(1, number // ranks) == 0,
            )  # fmt: skip
        elif schedule == "dualpipe-v":
            expected = f"at least one per stage, {2 * ranks}"
            check_micro_batches(self.parallelism, micro_batches, expected, lambda number: number >= 2 * ranks)

    def steps(self, micro_batches: int) -> list[list[Step]]:
        schedule, ranks = self.parallelism.schedule, self.parallelism.pipeline
        if self.parallelism.schedule_text:
            return self._steps_of_file(micro_batches)
        if schedule == "gpipe":
            return pipeline_stage.gpipe_steps(ranks, micro_batches, is_fsdp=self.is_fsdp)
        if schedule == "1f1b":
            return pipeline_stage.one_forward_one_backward_steps(ranks, micro_batches, is_fsdp=self.is_fsdp)
        virtual, group_size = self.parallelism.virtual_stages, chunk_group_size(ranks, micro_batches)
        orders = orders_of(schedule, ranks, virtual, micro_batches, group_size)
        return self._lower(orders, ranks_of_stages(schedule, ranks, virtual), micro_batches)

    def _steps_of_file(self, micro_batches: int) -> list[list[Step]]:
        parallelism = self.parallelism
        counts = parallelism.pipeline, parallelism.virtual_stages, micro_batches
        schedule = read_csv(parallelism.schedule_text, *counts)
        if schedule.is_lowered:
            return pipeline_stages.steps_of_orders(schedule.orders, is_fsdp=self.is_fsdp)
        return self._lower(schedule.orders, schedule.rank_of, micro_batches)

    def _lower(self, orders: Sequence[Order], rank_of: Sequence[int], micro_batches: int) -> list[list[Step]]:
        lowered = pipeline_stages.lower_orders(orders, rank_of, micro_batches)
        return pipeline_stages.steps_of_orders(lowered, is_fsdp=self.is_fsdp)

    def messenger(
        self, builder: PlanBuilder, stages: Mapping[int, Stage], ranks: Sequence[int], rank: int
    ) -> TorchMessenger:
        return TorchMessenger(builder, stages, ranks, rank)
