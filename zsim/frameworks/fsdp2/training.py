"""FSDP2's part in `[training]`.

# [Note: plain kernels and DTensors]
FSDP2's parameters are DTensors. bitsandbytes' optimizers call operators of their own on them, and on plain
tensors of scales, which torch refuses ("got mixed torch.Tensor and DTensor", bitsandbytes 0.50.2 with torch
2.13). Its 32-bit operator "does not have a sharding strategy registered". DeepSpeed's FusedLion reads raw
pointers (csrc/adam/multi_tensor_apply.cuh of 0.19.8), and `data_ptr()` of a DTensor is 0 (torch 2.13).
Transformer Engine's FusedAdam takes the local tensors (pytorch/optimizers/fused_adam.py of 2.17).
"""

from __future__ import annotations

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.fsdp2.settings import Fsdp2Config, Fsdp2Table
from zsim.frameworks.torch.fsdp_training import FsdpTraining
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.strategy.fp8 import Fp8, Fp8Recipe
from zsim.specs.strategy.optimizers import Optimizer
from zsim.specs.strategy.training import TrainingConfig


class Fsdp2Training(FsdpTraining[Fsdp2Table, Fsdp2Config]):
    """DTensors, which may be gathered in fp8."""

    title = "FSDP2"
    unadapted_degrees = ("tensor", "pipeline")
    merging_strategy = "'fsdp2' with wrapping 'huggingface'"

    def check_stored_dtype(
        self, training: TrainingConfig, requested: TrainingTable, table: Fsdp2Table
    ) -> None:
        conflicts = {
            f"training.optimizer '{training.optimizer}'": training.optimizer in ("muon", "adamw-bf16"),
            "training.lora": requested.lora is not None,
            "strategy.param_dtype 'fp8'": table.param_dtype == "fp8",
        }
        for conflict, is_so in conflicts.items():
            if is_so:
                raise NotSimulatedError(
                    f"training.stored_dtype: found '{training.stored_dtype}' with {conflict} under FSDP2, "
                    "which is not simulated; expected 'fp32', or another choice there"
                )

    def make_fp8(self, recipe: Fp8Recipe, table: Fsdp2Table) -> Fp8:
        return Fp8(recipe, recasts_weights=True, has_quantized_weights=table.param_dtype == "fp8")

    def check_recipe(self, recipe: Fp8Recipe, training: TrainingTable, table: Fsdp2Table) -> None:
        if recipe == "torchao-rowwise" and table.param_dtype == "fp8":
            raise InputError(
                "strategy.param_dtype: found 'fp8' with fp8_recipe 'torchao-rowwise', but torchao gathers in "
                "fp8 with one scale per tensor only; expected param_dtype 'bf16', or fp8_recipe "
                "'torchao-tensorwise'"
            )

    def check_optimizer(
        self,
        optimizer: Optimizer,
        training: TrainingTable,
        table: Fsdp2Table,
        config: Fsdp2Config | None,
    ) -> None:
        """See [Note: plain kernels and DTensors]."""
        if optimizer.library == "bitsandbytes":
            raise InputError(
                f"training.optimizer: torch refuses '{optimizer.name}' of {optimizer.source} under FSDP2, "
                "whose parameters are DTensors ('got mixed torch.Tensor and DTensor'); expected "
                "'adamw-8bit-torchao', or strategy 'fsdp1' or 'ddp'"
            )
        if optimizer.name == "lion":
            raise InputError(
                f"training.optimizer: 'lion' of {optimizer.source} writes where `data_ptr()` points, which "
                "of a DTensor, as FSDP2's parameters are, is 0; expected 'adamw', or strategy 'fsdp1' or "
                "'ddp'"
            )
        super().check_optimizer(optimizer, training, table, config)


TRAINING = Fsdp2Training()
