"""A trainer's logits and logs: how long the logits are held, and in MosaicML's composer metrics after every
micro-batch and a log line per step.

Transcribed from composer/trainer/trainer.py, 0.11 to 0.16 (`_train_microbatch`, `_eval_train_metrics`,
`_accumulate_time_across_ranks`, `_compute_and_log_metrics`), and torchmetrics 0.9 to 0.11 (metric.py,
utilities/distributed.py).

# [Note: the outputs]
The logits stay in `state.outputs` until the logits of the next micro-batch, for which the head has allocated
new memory, replace them (here: when the loss begins). The same holds for every loop that keeps the logits in
a variable and does not delete it (torchtitan's `pred` until its pull request 391, fms-fsdp's `output` until
its 152). In composer every metric computes torch's cross-entropy of the logits after each backward, under
autocast and without gradients. The micro-batch's other work in Python (a copy of the batch, the modules' eval
and train) is not counted.

# [Note: the log line]
After the optimizer the loss is reduced, and `.cpu().item()` waits for it, so the host has no lead when the
next step begins. Samples and time are summed over the ranks and read as well. Then both states of every
metric, a sum and a count, are gathered from all ranks (`gather_all_tensors`): a barrier, which waits for the
device, and an all-gather into a list with one tensor per rank, each filled with zeros before and copied to
after.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.operations import Loss
from zsim.operations.operation import operations_of
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.host_reads import read_scalar
from zsim.plan.ops import Group, Kernels
from zsim.specs.model.spec import ModelSpec

OUTPUTS, METRICS = "outputs", "metrics"  # owners of memory changes
_STATES = 2
_LAUNCHES_PER_RANK = 2


@dataclass(frozen=True, slots=True)
class MetricLog:
    """The logits that a trainer holds, and the metrics that it computes from them one after the other."""

    bytes: int
    """Bytes of the logits that are held."""
    num_metrics: int
    kernels: Kernels
    """The kernels of each metric."""
    tensors: tuple[int, ...]
    """Bytes of each tensor that a metric allocates temporarily."""

    def begin_step(self, builder: PlanBuilder) -> None:
        """Allocate the logits that the previous step left."""
        builder.allocate("activations", self.bytes, owner=OUTPUTS)

    def replace_outputs(self, builder: PlanBuilder) -> None:
        """Replace the held logits by those of this micro-batch. See [Note: the outputs]."""
        builder.free("activations", self.bytes, owner=OUTPUTS)
        builder.allocate("activations", self.bytes, owner=OUTPUTS)

    def end_micro_batch(self, builder: PlanBuilder) -> None:
        """Issue the metrics of a micro-batch, after its backward. See [Note: the outputs]."""
        for _ in range(self.num_metrics):
            builder.allocate("activations", sum(self.tensors), owner=METRICS, tensors=self.tensors)
            builder.kernels(METRICS, self.kernels.kernels)
            builder.free("activations", sum(self.tensors), owner=METRICS)

    def end_step(self, builder: PlanBuilder) -> None:
        """Free the logits and issue the log line. See [Note: the log line]."""
        builder.free("activations", self.bytes, owner=OUTPUTS)
        if not self.num_metrics:
            return
        groups = _all_ranks(builder.groups.values())
        ranks = prod(group.size for group in groups)
        names = [group.name for group in groups]
        for scalar in ("loss", "samples", "batch time"):
            read_scalar(builder, scalar, "fp32", names)
        for _ in range(self.num_metrics):
            builder.host("reduce metric", overhead="metric_reduction")
            for _ in range(_STATES if groups else 0):
                read_scalar(builder, "barrier", "fp32", names)
                launches = _LAUNCHES_PER_RANK * ranks
                builder.add(
                    "gather metric", "host", None, launches=launches, overhead="metric_part", events=ranks
                )
                for group in groups:
                    builder.collective("all_gather", 4 * group.size, "fp32", group.name, stream=COMPUTE)


def _all_ranks(groups: Iterable[Group]) -> list[Group]:
    """A group of all ranks, or else all groups of several ranks. [] if every group is one rank."""
    multi_rank_groups = [group for group in groups if group.size > 1]
    world = max((group.members.size for group in multi_rank_groups), default=1)
    return next(([group] for group in multi_rank_groups if group.size == world), multi_rank_groups)


def metric_log(model: ModelSpec, shape: BatchShape, options: WorkOptions) -> MetricLog | None:
    """The logits that the trainer holds, and its metrics, for micro-batches of `shape`. None if it holds
    none.
    """
    loss = next(iter(operations_of(model.after, Loss)), None)
    if loss is None or loss.holds_logits == "no":
        return None
    kernels = Kernels(loss.metric_kernels(shape, options))
    logits = shape.tokens * loss.vocab_size
    tensors = loss.metric_sizes(shape, options)
    element_bytes = 4 if loss.holds_logits == "in fp32" else options.activation_bytes
    return MetricLog(logits * element_bytes, loss.num_metrics, kernels, tensors)
