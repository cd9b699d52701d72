"""What MosaicML's composer does with a step's outputs: metrics after every micro-batch, and a log line.

Transcribed from composer/trainer/trainer.py, 0.11 to 0.16 (`_train_microbatch`, `_eval_train_metrics`,
`_accumulate_time_across_ranks`, `_compute_and_log_metrics`), and torchmetrics 0.9 to 0.11 (metric.py,
utilities/distributed.py).

# [Note: the outputs]
The logits stay in `state.outputs` until those of the next micro-batch take their place. After each backward
every metric takes torch's cross-entropy of them under autocast, without gradients.

# [Note: the log line]
After the optimizer the loss is reduced and `.cpu().item()` waits for it, so the host has no lead when the
next step begins. Then every state of every metric, a sum and a count, is gathered from all ranks
(`gather_all_tensors`): a barrier, which waits for the device, and a gather into a list of as many tensors
as there are ranks, each one filled with zeros first and copied to in the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.cost.losses import metric_kernels, metric_tensors
from zsim.cost.shapes import BatchShape, WorkOptions
from zsim.plan.builder import COMPUTE, PlanBuilder
from zsim.plan.ops import Group, Kernels
from zsim.specs.model import Loss, ModelSpec

OUTPUTS, METRICS = "outputs", "metrics"  # owners of memory
_STATES = 2
_LAUNCHES_PER_RANK = 2


@dataclass(frozen=True, slots=True)
class MetricLog:
    """`bytes` of logits, of which the trainer takes `num_metrics` metrics one after the other: each runs
    `kernels`, and `tensors` (bytes) pass in it."""

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
        group = max(builder.groups.values(), key=lambda group: group.size, default=Group("self", 1))
        builder.host_wait(builder.record(COMPUTE))
        for _ in range(self.num_metrics):
            builder.host("reduce metric", overhead="metric_reduction")
            for _ in range(_STATES if group.size > 1 else 0):
                builder.collective(
                    "all_reduce", 4, "fp32", group.name, stream=COMPUTE, name="barrier of metric"
                )
                builder.host_wait(builder.record(COMPUTE))
                builder.add(
                    "gather metric", "host", None,
                    launches=_LAUNCHES_PER_RANK * group.size, overhead="metric_part", events=group.size,
                )  # fmt: skip


def metric_log(model: ModelSpec, shape: BatchShape, options: WorkOptions) -> MetricLog | None:
    """Of a model whose loss has metrics; shape: of one micro-batch."""
    loss = next((module.work for module in model.after if isinstance(module.work, Loss)), None)
    if loss is None or not loss.num_metrics:
        return None
    kernels = Kernels(metric_kernels(shape.tokens, loss.vocab_size, options))
    tensors = metric_tensors(shape.tokens, loss.vocab_size, options)
    logits = shape.tokens * loss.vocab_size * options.activation_bytes
    return MetricLog(logits, loss.num_metrics, kernels, tensors)
