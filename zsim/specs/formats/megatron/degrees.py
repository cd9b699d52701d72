"""Megatron's flags of tensor, pipeline and context parallelism -> `[parallelism]`.

Read in Megatron-Core 0.16.1: `validate_args` of `training/arguments.py`, `get_num_layers_to_build` of
`core/transformer/transformer_block.py`, `core/transformer/pipeline_parallel_layer_layout.py`.
"""

from __future__ import annotations

import re
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.specs.formats.megatron.arguments import Arguments, refuse

CONTEXT_METHODS = {"p2p": "p2p", "a2a": "all-to-all", "all_gather": "all-gather", "a2a+p2p": "a2a+p2p"}
_LAYOUT = "pipeline-model-parallel-layout"
_FIRST, _LAST = "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"
_EMBEDDING, _LOSS = "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"
_PER_VIRTUAL, _VIRTUAL = "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"
_REFUSED = {
    "hybrid-context-parallel": "context parallelism that differs by sequence",
    "use-ring-exchange-p2p": "ring exchange between stages",
    "defer-embedding-wgrad-compute": "a head's weight gradient that is deferred",
    "mtp-standalone": "multi-token prediction",
    "encoder-pipeline-model-parallel-size": "encoders with decoders",
    "encoder-tensor-model-parallel-size": "encoders with decoders",
    "pipeline-model-parallel-split-rank": "encoders with decoders",
    "standalone-embedding-stage": "a stage of the embedding alone",
}
_IN_LINE = (
    "no-async-tensor-model-parallel-allreduce",
    "disable-async-tensor-model-parallel-allreduce",
)
_TENSOR_OVERLAP = (
    "no-tp-comm-bulk-wgrad", "no-tp-comm-bulk-dgrad", "no-tp-comm-overlap-ag", "no-tp-comm-overlap-rs",
    "no-tp-comm-split-ag", "no-tp-comm-split-rs", "disable-tp-comm-bulk-wgrad", "disable-tp-comm-bulk-dgrad",
    "disable-tp-comm-overlap-ag", "disable-tp-comm-overlap-rs", "disable-tp-comm-split-ag",
    "disable-tp-comm-split-rs", "tp-comm-overlap-rs-dgrad",
)  # fmt: skip


def read_degrees(found: Arguments) -> dict[str, Any]:
    """The keys of `[parallelism]` that the flags give.

    Raises InputError for what Megatron refuses, NotSimulatedError for what zsim lacks.
    """
    for flag, what in _REFUSED.items():
        refuse(found, flag, what)
    tensor, context = found.count("tensor-model-parallel-size"), found.count("context-parallel-size")
    given = {"tensor": found.has("tensor-model-parallel-size"), "context": found.has("context-parallel-size")}
    keys: dict[str, Any] = {
        key: degree for key, degree in (("tensor", tensor), ("context", context)) if given[key]
    }
    keys |= _tensor(found, tensor) | _context(found, context) | _pipeline(found)
    if found.has("use-tp-pp-dp-mapping"):
        keys["order"] = "tp-cp-pp-dp"
    return keys


def _tensor(found: Arguments, tensor: int) -> dict[str, Any]:
    is_sequence_parallel = found.has("sequence-parallel") and tensor > 1  # switched off with one rank
    overlaps = found.has("tp-comm-overlap")
    if overlaps and not is_sequence_parallel:
        raise InputError(
            f"{found.where}: --tp-comm-overlap: Megatron refuses it without --sequence-parallel"
            f"{'' if tensor > 1 else ' and --tensor-model-parallel-size above 1'}; expected both"
        )
    changed = [flag for flag in _TENSOR_OVERLAP if found.has(flag)]
    if overlaps and changed:
        raise NotSimulatedError(
            f"{found.where}: --{changed[0]}: zsim does not simulate a part of --tp-comm-overlap yet"
        )
    keys: dict[str, Any] = {"sequence_parallel": True} if is_sequence_parallel else {}
    given = [flag for flag in _IN_LINE if found.has(flag)]
    if given and tensor > 1 and not is_sequence_parallel:  # which always overlaps
        keys["overlap_tensor_reduce"] = False
    return keys | ({"async_tensor": True} if overlaps else {})


def _context(found: Arguments, context: int) -> dict[str, Any]:
    kinds = list(dict.fromkeys(found.texts("cp-comm-type"))) or ["p2p"]
    sizes = found.texts("hierarchical-context-parallel-sizes")
    for kind in kinds:
        if kind not in CONTEXT_METHODS:
            raise InputError(
                f"{found.where}: --cp-comm-type: found '{kind}', expected one of {', '.join(CONTEXT_METHODS)}"
            )
    if context == 1:
        return {}
    if len(kinds) > 1:
        raise NotSimulatedError(
            f"{found.where}: --cp-comm-type: zsim does not simulate a method that differs by layer yet"
        )
    if kinds == ["a2a+p2p"] and not sizes:
        raise InputError(
            f"{found.where}: --hierarchical-context-parallel-sizes: missing, as Megatron asks for it with "
            "--cp-comm-type a2a+p2p"
        )
    return {"context_method": CONTEXT_METHODS[kinds[0]]}


def _pipeline(found: Arguments) -> dict[str, Any]:
    pipeline, where = found.count("pipeline-model-parallel-size"), found.where
    layers = found.integer("num-layers")
    first, last = found.integer(_FIRST), found.integer(_LAST)
    ends = (int(found.has(_EMBEDDING)), int(found.has(_LOSS)))
    layout = found.text(_LAYOUT)
    given = [flag for flag in (_PER_VIRTUAL, _VIRTUAL, _LAYOUT) if found.has(flag)]
    if len(given) > 1:
        raise InputError(f"{where}: --{given[1]}: Megatron refuses it beside --{given[0]}; give one of them")
    if pipeline == 1:
        found.has(_VIRTUAL, _PER_VIRTUAL, _LAYOUT)
        return {}
    keys: dict[str, Any] = {"pipeline": pipeline, "schedule": "1f1b"}
    if layout is not None:
        return keys | _from_layout(found, layout, pipeline)
    virtual = _virtual_stages(found, pipeline, layers, ends)
    if virtual > 1:
        keys |= {"schedule": "interleaved-1f1b", "virtual_stages": virtual}
    if first is not None or last is not None:
        if any(ends):
            raise InputError(
                f"{where}: --{_EMBEDDING if ends[0] else _LOSS}: Megatron refuses it beside "
                f"--{_FIRST if first is not None else _LAST}; give one of them"
            )
        if layers is not None:
            keys["layers_per_stage"] = _uneven(found, layers, pipeline, virtual, first, last)
    elif any(ends):
        keys |= {"first_stage_less_layers": ends[0], "last_stage_less_layers": ends[1]}
    return keys


def _virtual_stages(found: Arguments, pipeline: int, layers: int | None, ends: tuple[int, int]) -> int:
    virtual, each = found.integer(_VIRTUAL), found.integer(_PER_VIRTUAL)
    if virtual is not None or each is None or layers is None:
        return virtual or 1
    if found.has(_FIRST, _LAST):
        raise InputError(
            f"{found.where}: --{_PER_VIRTUAL}: Megatron refuses it with uneven stages; expected --{_VIRTUAL}"
        )
    total = layers + sum(ends)
    if total % pipeline or (total // pipeline) % each:
        rank = total // pipeline
        divisors = [one for one in range(1, rank + 1) if rank % one == 0]
        nearest = min(divisors, key=lambda one: abs(one - each), default=1)
        hint = f"; the nearest that does is {nearest}" if total % pipeline == 0 else ""
        raise InputError(
            f"{found.where}: --{_PER_VIRTUAL}: found {each}: {total} layers on {pipeline} pipeline ranks are "
            f"not a whole number of such stages on each{hint}"
        )
    return total // pipeline // each


def _uneven(
    found: Arguments, layers: int, pipeline: int, virtual: int, first: int | None, last: int | None
) -> list[int]:
    """The number of layers of every virtual stage, in model order. Chunk c of rank r is stage `c x pipeline +
    r`.
    """
    middle = pipeline - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if rest < 0 or (middle == 0) != (rest == 0) or (middle and rest % middle):
        raise InputError(
            f"{found.where}: --{_FIRST if first is not None else _LAST}: {rest} layers are left for {middle} "
            f"stages, which Megatron refuses; expected a multiple of {middle}"
        )
    ranks = [rest // middle if middle else 0] * pipeline
    if first is not None:
        ranks[0] = first
    if last is not None:
        ranks[-1] = last
    for each in ranks:
        if each % virtual:
            divisors = [one for one in range(1, each + 1) if each % one == 0]
            nearest = min(divisors, key=lambda one: abs(one - virtual))
            raise InputError(
                f"{found.where}: --{_VIRTUAL}: found {virtual}, which does not divide the {each} layers of a "
                f"pipeline rank; the nearest that does is {nearest}"
            )
    return [each // virtual for _ in range(virtual) for each in ranks]


def _from_layout(found: Arguments, layout: str, pipeline: int) -> dict[str, Any]:
    """The stages of a layout that is written out, as in `Et*3|(tt|)*29,m|L`."""
    text = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d{1,5})", r"(.)\*(\d{1,5})"):
        text = re.sub(pattern, lambda one: one[1] * int(one[2]), text)
    stages = text.split("|")
    strange = set(text) - set("EtLm|")
    if strange:
        raise InputError(
            f"{found.where}: --{_LAYOUT}: found '{min(strange)}' in '{layout[:50]}', expected E, t, m, L or |"
        )
    if len(stages) % pipeline:
        nearest = max(1, round(len(stages) / pipeline)) * pipeline
        raise InputError(
            f"{found.where}: --{_LAYOUT}: found {len(stages)} stages on {pipeline} pipeline ranks, expected "
            f"a multiple; the nearest is {nearest}"
        )
    if "m" in text:
        raise NotSimulatedError(f"{found.where}: --{_LAYOUT}: zsim does not simulate multi-token prediction")
    if "E" not in stages[0] or "L" not in stages[-1]:
        raise NotSimulatedError(
            f"{found.where}: --{_LAYOUT}: zsim puts the embedding on the first and the loss on the last stage"
        )
    keys: dict[str, Any] = {"layers_per_stage": [stage.count("t") for stage in stages]}
    virtual = len(stages) // pipeline
    return keys | ({"schedule": "interleaved-1f1b", "virtual_stages": virtual} if virtual > 1 else {})
