"""Megatron's flags of tensor, pipeline and context parallelism -> `[parallelism]`.

Read in Megatron-Core 0.16.1: `validate_args` of `training/arguments.py`, `get_num_layers_to_build` of
`core/transformer/transformer_block.py`, `core/transformer/pipeline_parallel_layer_layout.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.programs.megatron_lm.arguments import Arguments, refuse
from zsim.programs.megatron_lm.flags import NOT_SIMULATED_DEGREES

CONTEXT_METHODS = {"p2p": "p2p", "a2a": "all-to-all", "all_gather": "all-gather", "a2a+p2p": "a2a+p2p"}
_LAYOUT = "pipeline-model-parallel-layout"
_FIRST, _LAST = "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"
_EMBEDDING, _LOSS = "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"
_PER_VIRTUAL, _VIRTUAL = "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"
_BLOCKING_REDUCE = (
    "no-async-tensor-model-parallel-allreduce",
    "disable-async-tensor-model-parallel-allreduce",
)
_TENSOR_OVERLAP = (
    "no-tp-comm-bulk-wgrad", "no-tp-comm-bulk-dgrad", "no-tp-comm-overlap-ag", "no-tp-comm-overlap-rs",
    "no-tp-comm-split-ag", "no-tp-comm-split-rs", "disable-tp-comm-bulk-wgrad", "disable-tp-comm-bulk-dgrad",
    "disable-tp-comm-overlap-ag", "disable-tp-comm-overlap-rs", "disable-tp-comm-split-ag",
    "disable-tp-comm-split-rs", "tp-comm-overlap-rs-dgrad",
)  # fmt: skip


def read_degrees(arguments: Arguments) -> dict[str, Any]:
    """The keys of `[parallelism]` that the flags give.

    Raises InputError for what Megatron refuses, NotSimulatedError for what zsim lacks.
    """
    for flag, feature in NOT_SIMULATED_DEGREES.items():
        refuse(arguments, flag, feature)
    tensor, context = arguments.count("tensor-model-parallel-size"), arguments.count("context-parallel-size")
    is_set = {
        "tensor": arguments.has("tensor-model-parallel-size"),
        "context": arguments.has("context-parallel-size"),
    }
    keys: dict[str, Any] = {
        key: degree for key, degree in (("tensor", tensor), ("context", context)) if is_set[key]
    }
    keys |= _tensor(arguments, tensor) | _context(arguments, context) | _pipeline(arguments)
    if arguments.has("use-tp-pp-dp-mapping"):
        keys["order"] = "tp-cp-pp-dp"
    return keys


def _tensor(arguments: Arguments, tensor: int) -> dict[str, Any]:
    is_sequence_parallel = arguments.has("sequence-parallel") and tensor > 1  # switched off with one rank
    overlaps = arguments.has("tp-comm-overlap")
    if overlaps and not is_sequence_parallel:
        raise InputError(
            f"{arguments.where}: --tp-comm-overlap: Megatron refuses it without --sequence-parallel"
            f"{'' if tensor > 1 else ' and --tensor-model-parallel-size above 1'}; expected both"
        )
    overlap_changes = [flag for flag in _TENSOR_OVERLAP if arguments.has(flag)]
    if overlaps and overlap_changes:
        raise NotSimulatedError(
            f"{arguments.where}: --{overlap_changes[0]}: zsim does not simulate a part of --tp-comm-overlap "
            "yet"
        )
    keys: dict[str, Any] = {"sequence_parallel": True} if is_sequence_parallel else {}
    blocking_flags = [flag for flag in _BLOCKING_REDUCE if arguments.has(flag)]
    if blocking_flags and tensor > 1 and not is_sequence_parallel:  # which always overlaps
        keys["overlap_tensor_reduce"] = False
    return keys | ({"async_tensor": True} if overlaps else {})


def _context(arguments: Arguments, context: int) -> dict[str, Any]:
    kinds = list(dict.fromkeys(arguments.texts("cp-comm-type"))) or ["p2p"]
    sizes = arguments.texts("hierarchical-context-parallel-sizes")
    for kind in kinds:
        if kind not in CONTEXT_METHODS:
            raise InputError(
                f"{arguments.where}: --cp-comm-type: found '{kind}', expected one of "
                f"{', '.join(CONTEXT_METHODS)}"
            )
    if context == 1:
        return {}
    if len(kinds) > 1:
        raise NotSimulatedError(
            f"{arguments.where}: --cp-comm-type: zsim does not simulate a method that differs by layer yet"
        )
    if kinds == ["a2a+p2p"] and not sizes:
        raise InputError(
            f"{arguments.where}: --hierarchical-context-parallel-sizes: missing, as Megatron asks for it "
            "with --cp-comm-type a2a+p2p"
        )
    return {"context_method": CONTEXT_METHODS[kinds[0]]}


def _pipeline(arguments: Arguments) -> dict[str, Any]:
    pipeline, where = arguments.count("pipeline-model-parallel-size"), arguments.where
    layers = arguments.integer("num-layers")
    first, last = arguments.integer(_FIRST), arguments.integer(_LAST)
    end_layers = (int(arguments.has(_EMBEDDING)), int(arguments.has(_LOSS)))
    layout = arguments.text(_LAYOUT)
    split_flags = [flag for flag in (_PER_VIRTUAL, _VIRTUAL, _LAYOUT) if arguments.has(flag)]
    if len(split_flags) > 1:
        raise InputError(
            f"{where}: --{split_flags[1]}: Megatron refuses it beside --{split_flags[0]}; give one of them"
        )
    if pipeline == 1:
        arguments.has(_VIRTUAL, _PER_VIRTUAL, _LAYOUT)
        return {}
    keys: dict[str, Any] = {"pipeline": pipeline, "schedule": "1f1b"}
    if layout is not None:
        return keys | _parse_layout(arguments, layout, pipeline)
    virtual = _virtual_stages(arguments, pipeline, layers, end_layers)
    if virtual > 1:
        keys |= {"schedule": "interleaved-1f1b", "virtual_stages": virtual}
    if first is not None or last is not None:
        if any(end_layers):
            raise InputError(
                f"{where}: --{_EMBEDDING if end_layers[0] else _LOSS}: Megatron refuses it beside "
                f"--{_FIRST if first is not None else _LAST}; give one of them"
            )
        if layers is not None:
            keys["layers_per_stage"] = _uneven_stages(arguments, layers, pipeline, virtual, first, last)
    elif any(end_layers):
        keys |= {"first_stage_less_layers": end_layers[0], "last_stage_less_layers": end_layers[1]}
    return keys


def late_stages(arguments: Arguments) -> Callable[[int], dict[str, list[int]]] | None:
    """The split of flags that name an end's layers, for a model whose layers they do not say."""
    ranks, layers = arguments.count("pipeline-model-parallel-size"), arguments.integer("num-layers")
    first, last = arguments.integer(_FIRST), arguments.integer(_LAST)
    if ranks == 1 or layers is not None or (first is None and last is None):
        return None
    virtual = arguments.integer(_VIRTUAL) or 1
    key = "parallelism.layers_per_stage"
    return lambda num_layers: {key: _uneven_stages(arguments, num_layers, ranks, virtual, first, last)}


def _virtual_stages(
    arguments: Arguments, pipeline: int, layers: int | None, end_layers: tuple[int, int]
) -> int:
    virtual, layers_per_stage = arguments.integer(_VIRTUAL), arguments.integer(_PER_VIRTUAL)
    if virtual is not None or layers_per_stage is None or layers is None:
        return virtual or 1
    if arguments.has(_FIRST, _LAST):
        raise InputError(
            f"{arguments.where}: --{_PER_VIRTUAL}: Megatron refuses it with uneven stages; expected "
            f"--{_VIRTUAL}"
        )
    total = layers + sum(end_layers)
    if total % pipeline or (total // pipeline) % layers_per_stage:
        rank = total // pipeline
        divisors = [divisor for divisor in range(1, rank + 1) if rank % divisor == 0]
        nearest = min(divisors, key=lambda divisor: abs(divisor - layers_per_stage), default=1)
        hint = f"; the nearest that does is {nearest}" if total % pipeline == 0 else ""
        raise InputError(
            f"{arguments.where}: --{_PER_VIRTUAL}: found {layers_per_stage}: {total} layers on {pipeline} "
            f"pipeline ranks are not a whole number of such stages on each{hint}"
        )
    return total // pipeline // layers_per_stage


def _uneven_stages(
    arguments: Arguments, layers: int, pipeline: int, virtual: int, first: int | None, last: int | None
) -> list[int]:
    """The number of layers of every virtual stage, in model order. Chunk c of rank r is stage `c x pipeline +
    r`.
    """
    num_middle = pipeline - (first is not None) - (last is not None)
    remaining_layers = layers - (first or 0) - (last or 0)
    if (
        remaining_layers < 0
        or (num_middle == 0) != (remaining_layers == 0)
        or (num_middle and remaining_layers % num_middle)
    ):
        raise InputError(
            f"{arguments.where}: --{_FIRST if first is not None else _LAST}: {remaining_layers} layers are "
            f"left for {num_middle} stages, which Megatron refuses; expected a multiple of {num_middle}"
        )
    ranks = [remaining_layers // num_middle if num_middle else 0] * pipeline
    if first is not None:
        ranks[0] = first
    if last is not None:
        ranks[-1] = last
    for num_layers in ranks:
        if num_layers % virtual:
            divisors = [divisor for divisor in range(1, num_layers + 1) if num_layers % divisor == 0]
            nearest = min(divisors, key=lambda divisor: abs(divisor - virtual))
            raise InputError(
                f"{arguments.where}: --{_VIRTUAL}: found {virtual}, which does not divide the {num_layers} "
                f"layers of a pipeline rank; the nearest that does is {nearest}"
            )
    return [num_layers // virtual for _ in range(virtual) for num_layers in ranks]


def _parse_layout(arguments: Arguments, layout: str, pipeline: int) -> dict[str, Any]:
    """The stages of a layout that is written out, as in `Et*3|(tt|)*29,m|L`."""
    text = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d{1,5})", r"(.)\*(\d{1,5})"):
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    stages = text.split("|")
    invalid = set(text) - set("EtLm|")
    if invalid:
        raise InputError(
            f"{arguments.where}: --{_LAYOUT}: found '{min(invalid)}' in '{layout[:50]}', expected E, t, m, "
            "L or |"
        )
    if len(stages) % pipeline:
        nearest = max(1, round(len(stages) / pipeline)) * pipeline
        raise InputError(
            f"{arguments.where}: --{_LAYOUT}: found {len(stages)} stages on {pipeline} pipeline ranks, "
            f"expected a multiple; the nearest is {nearest}"
        )
    if "m" in text:
        raise NotSimulatedError(
            f"{arguments.where}: --{_LAYOUT}: zsim does not simulate multi-token prediction"
        )
    if "E" not in stages[0] or "L" not in stages[-1]:
        raise NotSimulatedError(
            f"{arguments.where}: --{_LAYOUT}: zsim puts the embedding on the first and the loss on the last "
            "stage"
        )
    keys: dict[str, Any] = {"layers_per_stage": [stage.count("t") for stage in stages]}
    virtual = len(stages) // pipeline
    return keys | ({"schedule": "interleaved-1f1b", "virtual_stages": virtual} if virtual > 1 else {})
