"""DDP, as a job is resolved with it."""

from __future__ import annotations

from zsim.errors import InputError
from zsim.frameworks.ddp.settings import DdpConfig, DdpTable
from zsim.frameworks.torch.parallelism import KEMPNERFORGE, TORCH, UNSHARDED, check_torch_split, context_style
from zsim.report.framework import FrameworkReport
from zsim.specs.experiment.framework_resolver import FrameworkResolver, Resolution, StrategyRequest
from zsim.specs.experiment.training.framework_training import FrameworkTraining
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.parallelism_table import ParallelismTable
from zsim.specs.strategy.style import ModelParallelStyle
from zsim.specs.strategy.training import TrainingConfig


class DdpResolver(FrameworkResolver[DdpTable, DdpConfig]):
    """torch's DDP, beside which torchtitan has pipelines alone."""

    padded_experts = KEMPNERFORGE
    has_lenders = True

    def degrees(
        self, table: DdpTable, requested: ParallelismTable
    ) -> tuple[ParallelismTable, ModelParallelStyle]:
        """Refuses what torchtitan refuses with DDP (v0.2.2 `parallelize_llama`)."""
        style = context_style(requested)
        for key, degree in (("tensor", requested.tensor), ("context", requested.context)):
            if degree > 1 and (key == "tensor" or style is TORCH):
                raise InputError(
                    f"parallelism.{key}: found {degree} with strategy 'ddp', which torchtitan takes for data "
                    "parallelism alone; expected strategy 'fsdp2', with `replicate` for its replicas"
                )
        return requested, style

    def check_split(self, model: ModelSpec, training: TrainingConfig, parallelism: ParallelismConfig) -> None:
        check_torch_split(model, training, parallelism)

    def resolve(self, request: StrategyRequest[DdpTable, DdpConfig]) -> Resolution[DdpConfig]:
        table = request.table
        if table.optimizer_in_backward:
            _check_optimizer_in_backward(request)
        cap_bytes = round(table.bucket_cap_mb * 2**20)
        first_bytes = 2**20 if table.bucket_cap_mb == 25 else cap_bytes
        config = DdpConfig.resolve(table, bucket_cap_bytes=cap_bytes, first_bucket_cap_bytes=first_bytes)
        return Resolution(config, request.cluster)


def _check_optimizer_in_backward(request: StrategyRequest[DdpTable, DdpConfig]) -> None:
    """Refuses what torchtune refuses beside it (0.7.0 recipes/full_finetune_single_device.py `__init__`), and
    ranks, whose gradients the reducer needs.
    """
    training = request.training
    for key, value, expected in (
        ("training.gradient_clipping", training.gradient_clipping, 0),
        ("training.gradient_accumulation_steps", training.gradient_accumulation_steps, 1),
        ("gpus", request.placement.world_size, 1),
    ):
        if value != expected:
            raise InputError(
                f"strategy.optimizer_in_backward: found true with {key} = {value:g}, and a gradient is gone "
                f"before the next; expected {key} = {expected}"
            )
    if training.precision == "fp16":
        raise InputError(
            "strategy.optimizer_in_backward: found true with training.precision = 'fp16', whose gradients "
            "are unscaled after backward; expected 'bf16' or 'fp32'"
        )


RESOLVER = DdpResolver()


class DdpTraining(FrameworkTraining[DdpTable, DdpConfig]):
    """Weights are fp32 under torch.autocast, and ranks may differ."""

    title = "DDP"
    is_under_autocast = True
    has_stored_dtype = True
    has_uneven_batches = True
    has_references = True
    unadapted_degrees = ("tensor", "pipeline")
    merging_strategy = "'ddp'"

    def check_reference(self, where: str, table: DdpTable, config: DdpConfig | None) -> None:
        """Every rank holds all of the reference."""

    def synchronized_replicas(
        self, table: DdpTable, config: DdpConfig | None, replicas: int, nodes: int
    ) -> int:
        return 1 if table.no_sync else replicas


TRAINING = DdpTraining()


class DdpReport(FrameworkReport[DdpConfig]):
    """Nothing is sharded."""

    title_alone = UNSHARDED
    strategy_names = ("DDP",)


REPORT = DdpReport()
