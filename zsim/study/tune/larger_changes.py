"""Changes for a job that no switch makes fit: other degrees of parallelism, adapters instead of the model.

Degrees are of expert, tensor and pipeline parallelism, in powers of two, small replicas first. The batch of a
step stays. If there are none, or none is enough, the model is frozen and LoRA trains adapters: another kind
of training, so it comes last.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from zsim.specs.model.expert_layer import num_experts
from zsim.specs.model.spec import ModelSpec
from zsim.study.tune.axis import ACCUMULATION, AxisChoice
from zsim.study.tune.base import Base
from zsim.study.tune.candidates import Candidate
from zsim.study.tune.degrees import EXPERT, PIPELINE, TENSOR
from zsim.study.tune.framework import tuning_of

LORA = "training.lora.rank"
_MAX_DEGREES = 24  # each is a plan, and the first ones that fit are wanted
_RANK = 16
_FROZEN = "adapters"


def degree_changes(start: Candidate) -> Iterator[Candidate]:
    """The job with other degrees, larger than its own, that divide the GPUs, heads, layers and experts."""
    base = start.base
    if not tuning_of(base.kind).schedules:
        return
    split, model = base.job.parallelism, base.job.model
    experts = _powers(num_experts(model), split.experts.members)
    tensors = [degree for degree in _powers(base.job.gpus_per_node, split.tensor) if _divides(model, degree)]
    pipelines = [
        degree
        for degree in _powers(base.world_size, split.pipeline)
        if len(model.blocks) % degree == 0 or degree == split.pipeline
    ]
    sizes = sorted(product(pipelines, tensors, experts), key=lambda size: (size[0] * size[1], sum(size)))
    num_yielded = 0
    for pipeline, tensor, expert in sizes:
        degrees = {PIPELINE: pipeline, TENSOR: tensor, EXPERT: expert}
        current_degrees = {PIPELINE: split.pipeline, TENSOR: split.tensor, EXPERT: split.experts.members}
        changes = {key: degree for key, degree in degrees.items() if degree != current_degrees[key]}
        accumulation = _accumulation(base, pipeline * tensor)
        if not changes or accumulation is None or num_yielded == _MAX_DEGREES:
            continue
        if accumulation != base.job.training.gradient_accumulation_steps:
            changes[ACCUMULATION] = accumulation
        num_yielded += 1
        yield start.replace_choice("degrees", AxisChoice("", changes), -1)


def adapter_change(start: Candidate) -> Candidate | None:
    """The job with LoRA on the frozen model, or None if it has adapters."""
    if start.base.job.experiment.training.lora is not None:
        return None
    return start.replace_choice(_FROZEN, AxisChoice("", {LORA: _RANK}), -1)


def _powers(total: int, minimum: int) -> list[int]:
    """The powers of two of at least `minimum` that divide `total`, and `minimum`."""
    degrees = [1 << power for power in range(max(1, total).bit_length()) if total % (1 << power) == 0]
    return [minimum, *(degree for degree in degrees if degree > minimum)]


def _divides(model: ModelSpec, degree: int) -> bool:
    op_specs = [module.op_spec for block in model.blocks for module in block.modules]
    return all(getattr(op_spec, "num_heads", degree) % degree == 0 for op_spec in op_specs)


def _accumulation(base: Base, ranks_per_replica: int) -> int | None:
    """Micro-batches with which fewer replicas train on the same batch. None without a whole number."""
    split, training = base.job.parallelism, base.job.training
    replicas, remainder = divmod(base.world_size, ranks_per_replica * split.context)
    if remainder or not replicas:
        return None
    accumulation, remainder = divmod(base.batch_sequences, replicas * training.micro_batch_size)
    return None if remainder or not accumulation else accumulation
