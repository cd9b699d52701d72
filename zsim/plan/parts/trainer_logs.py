"""What a trainer does with a step's outputs: how long it holds them; in MosaicML's composer also metrics
after every micro-batch, and a log line.

Transcribed from composer/trainer/trainer.py, 0.11 to 0.16 (`_train_microbatch`, `_eval_train_metrics`,
`_accumulate_time_across_ranks`, `_compute_and_log_metrics`), and torchmetrics 0.9 to 0.11 (metric.py,
utilities/distributed.py).

# [Note: the outputs]
The logits stay in `state.outputs` until those of the next micro-batch, which the head has made beside them,
take their place (here: when the loss begins). So they do in every loop that has a variable for them and does
not delete it (torchtitan's `pred` until its pull request 391, fms-fsdp's `output` until its 152). In composer
every metric takes torch's cross-entropy of them after each backward, under autocast and without gradients. Of
the micro-batch's other work in Python (a copy of the batch, the modules' eval and train) nothing is counted.

# [Note: the log line]
After the optimizer the loss is reduced, and `.cpu().item()` waits for it, so the host has no lead when the
next step begins; samples and time are summed over the ranks and read as well. Then every state of every
metric, a sum and a count, is gathered from all ranks (`gather_all_tensors`): a barrier, which waits for the
device, and a gather into a list of as many tensors as there are ranks, each filled with zeros first and
copied to in the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from zsim.cost.kernels.losses import log_probabilities, metric_kernels
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.ops import Group, Kernels
from zsim.plan.parts.host_reads import read_scalar
from zsim.specs.model.spec import Loss, ModelSpec

OUTPUTS, METRICS = "outputs", "metrics"  # owners of memory
_STATES = 2
_LAUNCHES_PER_RANK = 2


@dataclass(frozen=True, slots=True)
class MetricLog:
    """`bytes` of logits that are held, of which the trainer takes `num_metrics` metrics one after the other:
    each runs `kernels`, and `tensors` (bytes) pass in it."""

    bytes: int
    num_metrics: int
    kernels: Kernels
    tensors: tuple[int, ...]

    def begin_step(self, builder: PlanBuilder) -> None:
        """The outputs of the step before are there."""
        builder.allocate("activations", self.bytes, owner=OUTPUTS)

    def replace_outputs(self, builder: PlanBuilder) -> None:
        """See [Note: the outputs]."""
        builder.free("activations", self.bytes, owner=OUTPUTS)
        builder.allocate("activations", self.bytes, owner=OUTPUTS)

    def end_micro_batch(self, builder: PlanBuilder) -> None:
        """See [Note: the outputs]."""
        for _ in range(self.num_metrics):
            builder.allocate("activations", sum(self.tensors), owner=METRICS, tensors=self.tensors)
            builder.kernels(METRICS, self.kernels.kernels)
            builder.free("activations", sum(self.tensors), owner=METRICS)

    def end_step(self, builder: PlanBuilder) -> None:
        """See [Note: the log line]."""
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
    """One group of all ranks, or those that cross to all of them; none where a rank is alone."""
    wide = [group for group in groups if group.size > 1]
    world = max((group.members.size for group in wide), default=1)
    return next(([group] for group in wide if group.size == world), wide)


def metric_log(model: ModelSpec, shape: BatchShape, options: WorkOptions) -> MetricLog | None:
    """Of a model whose logits are held; shape: of one micro-batch."""
    loss = next((module.work for module in model.after if isinstance(module.work, Loss)), None)
    if loss is None or loss.holds_logits == "no":
        return None
    kernels = Kernels(metric_kernels(shape.tokens, loss.vocab_size, options))
    logits = shape.tokens * loss.vocab_size
    tensors = log_probabilities(logits, options)
    element = 4 if loss.holds_logits == "in fp32" else options.activation_bytes
    return MetricLog(logits * element, loss.num_metrics, kernels, tensors)
