"""The pipelines of Megatron-Core: what their settings demand of the counts, their steps and their messages.

# [Note: timers that wait]
Megatron's timers wait for the device when they start and when they stop (`torch.cuda.synchronize`,
Megatron-LM d98e8a64 megatron/core/timers.py). Level 2 times every forward, every backward and every exchange
of messages (core/pipeline_parallel/schedules.py, p2p_communication.py), so that messages which would be
waited for at their use are waited for where they are posted. What level 1 times, around all micro-batches and
in the optimizer, ends where the host waits anyway. Its barriers are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zsim.errors import InputError
from zsim.frameworks.megatron.pipeline import MegatronPipeline, one_forward_one_backward_steps
from zsim.frameworks.megatron.pipeline_combined import paired_without_pipeline, run_pair
from zsim.frameworks.megatron.pipeline_interleaved import interleaved_steps
from zsim.plan.actions import Action, Overlap, Step
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.pipeline.messages import Messenger
from zsim.plan.pipeline.pipeline_checks import check_micro_batches
from zsim.plan.pipeline.runtime import PipelineRuntime
from zsim.plan.stage import Stage
from zsim.plan.walk import Walk
from zsim.specs.strategy.mesh import TENSOR


@dataclass(frozen=True, slots=True)
class MegatronRuntime(PipelineRuntime):
    """`core/pipeline_parallel/schedules.py` of Megatron-Core 0.16.1, with the checks of
    `training/arguments.py`.
    """

    settings: MegatronPipeline = field(default_factory=MegatronPipeline)

    @property
    def synchronizes(self) -> bool:
        """See [Note: timers that wait]."""
        return self.settings.synchronizes_timers

    def check(self, micro_batches: int) -> None:
        if self.parallelism.schedule == "interleaved-1f1b":
            self._check_interleaved(micro_batches)

    def _check_interleaved(self, micro_batches: int) -> None:
        ranks, virtual, settings = self.parallelism.pipeline, self.parallelism.virtual_stages, self.settings
        group = settings.group_size or ranks
        if virtual < 2:
            raise InputError(
                f"parallelism.virtual_stages: found {virtual} with Megatron's 'interleaved-1f1b', expected 2 "
                "or more"
            )
        if settings.flushes_ahead and not settings.overlaps_p2p:
            raise InputError(
                "overlap_p2p_comm_warmup_flush: found true without overlap_p2p_comm, which Megatron refuses; "
                "expected both, or neither"
            )
        if ranks == 2 and not settings.overlaps_p2p:
            raise InputError(
                "parallelism.pipeline: found 2, but Megatron's interleaved schedule without overlapped p2p "
                "takes more than 2; expected 3 or more, or the overlap"
            )
        if group < ranks:
            raise InputError(
                f"parallelism.pipeline: found {ranks} with microbatch_group_size_per_vp_stage = {group}; "
                f"Megatron takes a group of at least the pipeline ranks: {ranks}"
            )

        def is_right(number: int) -> bool:
            return number >= group and (number % group == 0 or number % group >= ranks)

        expected = (
            f"at least a group of {group}, and behind whole groups none or at least {ranks}, the pipeline "
            "ranks"
        )
        check_micro_batches(self.parallelism, micro_batches, expected, is_right)

    def steps(self, micro_batches: int) -> list[list[Step]]:
        ranks, virtual = self.parallelism.pipeline, self.parallelism.virtual_stages
        if self.parallelism.schedule == "interleaved-1f1b":
            return interleaved_steps(ranks, virtual, micro_batches, self.settings)
        return one_forward_one_backward_steps(ranks, micro_batches, self.settings)

    def steps_without_pipeline(self, micro_batches: int) -> list[Step]:
        if self.settings.pairs:
            return paired_without_pipeline(micro_batches)
        return PipelineRuntime.steps_without_pipeline(self, micro_batches)

    def messenger(
        self, builder: PlanBuilder, stages: Mapping[int, Stage], ranks: Sequence[int], rank: int
    ) -> Messenger:
        is_unique_per_rank = self.parallelism.tensor == 1 or self.parallelism.sequence_parallel
        if self.settings.scatters_messages and not is_unique_per_rank:
            return PartitioningMessenger(builder, stages, ranks, rank, empties_outputs=True)
        return PipelineRuntime.messenger(self, builder, stages, ranks, rank)

    def run_pair(
        self,
        builder: PlanBuilder,
        pair: Overlap,
        walks: tuple[Walk, Walk],
        *,
        is_last: bool,
        schedule_manages_sharding: bool,
    ) -> None:
        run_pair(
            builder,
            pair,
            walks,
            is_last=is_last,
            schedule_manages_sharding=schedule_manages_sharding,
            is_delayed=self.settings.delays_weights,
        )


class PartitioningMessenger(Messenger):
    """Messages of Megatron-LM 2.1 to 3.0 without sequence parallelism. Each tensor-parallel rank sends its
    part of an activation or gradient, and the receivers gather all of it
    (`scatter_gather_tensors_in_pipeline`, Narayanan et al. 2021, arXiv 2104.04473, section 4.1;
    megatron/p2p_communication.py).
    """

    def pre_forward(self, stage: int, micro_batch: int) -> None:
        super().pre_forward(stage, micro_batch)
        if not self.stages[stage].is_first:
            self._gather("input", stage)

    def pre_backward(self, stage: int, micro_batch: int) -> None:
        super().pre_backward(stage, micro_batch)
        if not self.stages[stage].is_last:
            self._gather("gradient", stage)

    def _gather(self, label: str, stage: int) -> None:
        receiver = self.stages[stage]
        self.builder.collective(
            "all_gather", receiver.message_bytes, receiver.message_dtype, TENSOR, stream=COMPUTE,
            name=f"all_gather {label} of stage {stage}",
        )  # fmt: skip

    def _bytes(self, message: Action) -> int:
        return super()._bytes(message) // self.stages[message.stage].parallelism.tensor
