"""Messages of Megatron-LM's pipelines in which tensor-parallel ranks send a part each."""

from __future__ import annotations

from zsim.plan.actions import Action
from zsim.plan.builder import COMPUTE
from zsim.plan.pipeline.messages import Messenger
from zsim.specs.strategy.mesh import TENSOR


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
