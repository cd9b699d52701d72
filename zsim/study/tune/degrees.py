"""The axis of model parallelism: degrees of tensor, pipeline, context and expert parallelism, virtual stages.

Degrees are powers of two (frameworks refuse others for nearly all models): tensor parallelism inside a node,
pipeline and context parallelism up to the number of nodes. A split of the layers that the framework refuses
is refused like any other contradiction. Megatron's stages may count the embedding and the loss as a layer
each. Schedules are all that the framework has for so many stages on a rank. Experts are whole, shared by the
ranks of a node, or by all ranks of a stage. Details of a good split are decided afterwards, one by one: the
order of the mesh, degrees of expert parallelism between these, the dispatcher, and stages of unequal layers.

# [Note: stages of equal work]
The head and its loss are products with the vocabulary, as long as some blocks. A pipeline is as slow as its
slowest stage, so the last one takes so many blocks less that all have the same FLOPs. Stages of 1F1B keep the
more micro-batches the earlier they are, so a layout with fewer blocks on the first stage is tried too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from zsim.specs.model.expert_layer import num_experts
from zsim.specs.model.spec import Module
from zsim.specs.strategy.parallelism import SINGLE_STAGE, V_SHAPED
from zsim.study.tune.framework import AxisChoice, Base, Chosen, TunedAxis, tuning_of

TENSOR, PIPELINE, CONTEXT = "parallelism.tensor", "parallelism.pipeline", "parallelism.context"
VIRTUAL, SCHEDULE = "parallelism.virtual_stages", "parallelism.schedule"
SPLIT, ORDER = "parallelism.sequence_parallel", "parallelism.order"
FIRST, LAST = "parallelism.first_stage_less_layers", "parallelism.last_stage_less_layers"
LAYERS, EXPERT, EXPERT_TENSOR, DISPATCHER = (
    f"parallelism.{key}" for key in ("layers_per_stage", "expert", "expert_tensor", "dispatcher")
)
_LONG = 32_768  # tokens of a sequence from which on it is shared
_MAX_VIRTUAL = 8

Overrides = dict[str, Any]


def degrees(base: Base) -> Iterable[tuple[str, Overrides]]:
    """Labels and overrides of all combinations that divide the GPUs, the heads, the layers and the batch."""
    gpus, sequences = base.world_size, base.batch_sequences
    for tensor in _powers(base.job.gpus_per_node):
        for context in _powers(gpus // base.job.gpus_per_node if _is_long(base) else 1):
            for pipeline in _powers(base.job.num_nodes * base.job.gpus_per_node // tensor):
                replicas, remainder = divmod(gpus, tensor * context * pipeline)
                if remainder or replicas == 0 or sequences % replicas:
                    continue
                for layers in _splits(base, pipeline):
                    for expert in _expert_degrees(base, gpus // pipeline):
                        yield _choice(tensor, context, layers, expert)


def data_ranks(base: Base, chosen: Mapping[str, Any]) -> int:
    """Ranks over which data parallelism shards states, under the chosen degrees."""
    split = base.job.parallelism
    model_ranks: int = chosen.get(TENSOR, split.tensor) * chosen.get(PIPELINE, split.pipeline)
    return base.world_size // model_ranks


def replicas_of(base: Base, chosen: Mapping[str, Any]) -> int:
    """Replicas of the model under the chosen degrees."""
    context: int = chosen.get(CONTEXT, base.job.parallelism.context)
    return data_ranks(base, chosen) // context


def _expert_degrees(base: Base, ranks: int) -> list[int]:
    """Ranks of a stage that may share the experts: one, those of a node, or all that experts divide among."""
    most_ranks = max(power for power in _powers(ranks) if num_experts(base.job.model) % power == 0)
    return sorted({1, min(most_ranks, base.job.gpus_per_node), most_ranks})


def _powers(largest: int) -> list[int]:
    return [1 << power for power in range(largest.bit_length()) if 1 << power <= largest]


def _is_long(base: Base) -> bool:
    return base.job.training.sequence_length >= _LONG


def _splits(base: Base, pipeline: int) -> Iterable[Overrides]:
    """Virtual stages and the split of the layers on `pipeline` ranks. Megatron wants stages of equal layers,
    with embedding and loss counted as a layer each if that makes them so.
    """
    layers = len(base.job.model.blocks)
    if pipeline == 1:
        yield {PIPELINE: 1, VIRTUAL: None, FIRST: None, LAST: None, SCHEDULE: None}
        return
    for virtual in _powers(_MAX_VIRTUAL):
        stages = pipeline * virtual
        for ends in (0, 1):
            if (layers + 2 * ends) % stages == 0 and (layers + 2 * ends) // stages > ends:
                for schedule in schedules_of(base.kind, virtual):
                    yield {PIPELINE: pipeline, VIRTUAL: virtual, SCHEDULE: schedule, FIRST: ends, LAST: ends}
                break


def schedules_of(kind: str, virtual: int) -> list[str]:
    """The schedules of a strategy's framework for so many stages on a rank, its usual one first."""
    schedules = [name for name in tuning_of(kind).schedules if (virtual == 1) == (name in SINGLE_STAGE)]
    schedules = [name for name in schedules if virtual == 2 or name not in V_SHAPED]
    usual = "1f1b" if virtual == 1 else "interleaved-1f1b"
    return sorted(schedules, key=lambda name: name != usual)


def _choice(tensor: int, context: int, layers: Overrides, expert: int) -> tuple[str, Overrides]:
    overrides = {TENSOR: tensor, SPLIT: True if tensor > 1 else None, CONTEXT: context, **layers}
    overrides |= {EXPERT: expert, **({EXPERT_TENSOR: 1} if expert > 1 else {})}
    labels = [f"TP {tensor}"] if tensor > 1 else []
    labels += [f"CP {context}"] if context > 1 else []
    labels += [f"EP {expert}"] if expert > 1 else []
    if layers[PIPELINE] > 1:
        virtual, schedule = layers[VIRTUAL], layers[SCHEDULE]
        labels.append(f"PP {layers[PIPELINE]}" + (f" x {virtual} stages" if virtual > 1 else ""))
        labels += [] if schedule in ("1f1b", "interleaved-1f1b") else [schedule]
    return " ".join(labels) or "data parallel", overrides


def _experts(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Half and twice the ranks that share the experts, of the chosen degree."""
    split = base.job.parallelism
    degree = chosen.get(EXPERT, split.experts.members)
    experts, ranks = num_experts(base.job.model), base.world_size // chosen.get(PIPELINE, split.pipeline)
    if "parallelism" not in base.data or experts == 1:
        return
    for count in (degree // 2, degree * 2):
        if count >= 1 and experts % count == 0 and ranks % count == 0:
            yield AxisChoice(f"EP {count}", {EXPERT: count})


def _dispatchers(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """The dispatchers that the framework has, where several ranks share the experts."""
    split = base.job.parallelism
    if chosen.get(EXPERT, split.experts.members) == 1:
        return
    for name in split.style.dispatchers:
        yield AxisChoice(f"dispatcher {name}", {DISPATCHER: name})


def _layouts(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Stages of unequal layers. See [Note: stages of equal work]."""
    split, model = base.job.parallelism, base.job.model
    pipeline, virtual = chosen.get(PIPELINE, split.pipeline), chosen.get(VIRTUAL, split.virtual_stages) or 1
    stages = pipeline * virtual
    if "parallelism" not in base.data or pipeline == 1 or len(model.blocks) <= stages:
        return
    head = _flops(base, model.after) / _flops(base, model.blocks[len(model.blocks) // 2].modules)
    for first in (0, 1):
        layers = even_layers(len(model.blocks), stages, first, head)
        yield AxisChoice(layers_label(layers), {LAYERS: layers, FIRST: None, LAST: None})


def _flops(base: Base, modules: Iterable[Module]) -> float:
    return sum(module.forward_flops(base.job.training.sequence_length) for module in modules)


def layers_label(layers: Sequence[int]) -> str:
    """E.g. "layers 11, 6 x 12, 10"."""
    runs = [(count, len(list(group))) for count, group in groupby(layers)]
    return "layers " + ", ".join(str(count) if times == 1 else f"{times} x {count}" for count, times in runs)


def even_layers(layers: int, stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Layers of each stage, as equal as whole ones allow, where the first and the last stage have more work,
    worth so many layers. Remainders go to the stages after the first, which keep fewer micro-batches.
    """
    share = (layers + first + last) / stages
    ends = [max(0, round(share - first)), max(0, round(share - last))]
    if stages < 3:
        return (layers - ends[1], ends[1]) if stages == 2 else (layers,)
    size, more = divmod(layers - sum(ends), stages - 2)
    return (ends[0], *(size + (number < more) for number in range(stages - 2)), ends[1])


EXPERTS = TunedAxis("experts", _experts, changes_kernels=True)
DISPATCHERS = TunedAxis("dispatcher", _dispatchers, changes_kernels=True)
LAYOUTS = TunedAxis("layers", _layouts, changes_kernels=True)
