"""The `[parallelism]` of a published run, from its degrees, its strategy's text and its launch settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from validation.published.mixtures import expert_parallelism
from validation.published.table import PublishedRun
from zsim.errors import NotSimulatedError
from zsim.programs.nanotron.read import stage_layers

_DEGREES = {"tp": "tensor", "pp": "pipeline", "cp": "context"}
_STATED = {
    "tp": r"tp|tensor[- ]?(?:model[- ]?)?parallel\w*|mp", "pp": r"pp|pipeline[- ]?(?:model[- ]?)?parallel\w*",
    "vp": r"vp|vpp|virtual[- ]?\w*", "cp": r"cp|context[- ]?parallel\w*", "ep": r"ep|expert[- ]?parallel\w*",
}  # fmt: skip
_CONTEXT_METHODS = {"p2p": "p2p", "all_gather": "all-gather", "a2a": "all-to-all", "a2a+p2p": "a2a+p2p"}
_OFF = ("0", "False")
_SEQUENCE_PARALLEL = r"\(SP\b|\+ ?SP\b|, SP\b"
_ASYNC_TENSOR = r"Async ?TP|\bSP\b.*\basync\)"


def stated_degrees(run: PublishedRun) -> dict[str, str]:
    """The degrees that the strategy's text says and no column has: {"tp": "8"} of "TP8", "TP=8" and "8-way
    tensor parallelism"."""
    text = run.text("strategy")
    found = {}
    for column, words in _STATED.items():
        match = re.search(
            rf"(?i)(?<![a-z])(?:{words})[ =:_-]*(\d+)(?![\d.])|(\d+)[- ]?way (?:{words})(?![a-z])", text
        )
        if match is not None and not run.text(column):
            found[column] = match[1] or match[2]
    return found


def launch_settings(run: PublishedRun) -> dict[str, str]:
    """The launch settings from the rules on the row's source, or from its `hybrid{...}` note: {"sp": "1"}."""
    match = re.search(r"hybrid\{([^}]*)\}", run.text("notes"))
    text = run.text("hybrid") or (match[1] if match else "")
    pairs = (item.partition("=") for item in text.split(",") if item)
    return {key.strip(): value.strip() for key, _, value in pairs}


def command_line(run: PublishedRun) -> dict[str, str]:
    """Megatron's flags in the row's note: {"cp-comm-type": "a2a+p2p", ...}."""
    return dict(re.findall(r"(?:^|; )([a-z][a-z0-9-]+)=([^;{}]+)", run.text("notes")))


def is_on(settings: Mapping[str, str], key: str) -> bool:
    """Whether a launch setting is there and is not switched off."""
    return settings.get(key, "0") not in _OFF


def model_ranks_of(run: PublishedRun) -> int:
    """The number of ranks that share one replica of the model."""
    return prod(run.count(column) or 1 for column in _DEGREES)


def kind_of_parallelism(run: PublishedRun) -> str:
    """Which of "TP", "PP" and "CP" is above 1: "mixed" if several are, "data parallel" if none is."""
    kinds = [column.upper() for column in _DEGREES if (run.count(column) or 1) > 1]
    return "mixed" if len(kinds) > 1 else kinds[0] if kinds else "data parallel"


def replicas_of(run: PublishedRun, gpus: int) -> int:
    """The number of replicas of the model on `gpus` GPUs. Raises NotSimulatedError where the degrees do not
    divide them.
    """
    ranks = model_ranks_of(run)
    if gpus % ranks:
        degrees = ", ".join(f"{column} {run.text(column)}" for column in _DEGREES if run.text(column))
        raise NotSimulatedError(f"{degrees} do not divide {gpus} GPUs")
    return gpus // ranks


def parallelism_table(
    run: PublishedRun, strategy: Mapping[str, Any], assumptions: list[str]
) -> dict[str, Any]:
    """The table `[parallelism]`, empty without any. `strategy` is the row's table.

    Where the layers do not divide by the stages but two more would, embedding and loss count as a layer each,
    which is an assumption. nanotron's stages are those of its own rule. Megatron-DeepSpeed's models count
    blocks also where no tensor parallelism says that they are Megatron's.
    """
    degrees = {key: run.count(column) or 1 for column, key in _DEGREES.items()}
    table: dict[str, Any] = {key: degree for key, degree in degrees.items() if degree > 1}
    settings, text = launch_settings(run), run.text("strategy")
    experts = expert_parallelism(run, settings, strategy["kind"], assumptions)
    if not table:
        return experts
    if degrees["tensor"] > 1:
        table |= _tensor_table(settings, text, is_torch=strategy["kind"] == "fsdp2")
    method = _CONTEXT_METHODS.get(command_line(run).get("cp-comm-type", ""))
    if method and degrees["context"] > 1:
        table["context_method"] = method
    if degrees["pipeline"] > 1:
        table |= _pipeline_table(run, strategy, settings, degrees["pipeline"], assumptions)
    return table | experts


def _tensor_table(settings: Mapping[str, str], text: str, *, is_torch: bool) -> dict[str, bool]:
    """Sequence parallelism, and collectives that overlap with the products. torchtitan has sequence
    parallelism unless it is switched off, but the others' command lines switch it on.
    """
    is_sequence = is_on(settings, "sp") or bool(re.search(_SEQUENCE_PARALLEL, text))
    overlaps = is_on(settings, "tp_overlap") or bool(re.search(_ASYNC_TENSOR, text))
    table = {} if is_torch and "sp" not in settings else {"sequence_parallel": is_sequence}
    return table | ({"async_tensor": True} if overlaps and (is_sequence or is_torch) else {})


def _pipeline_table(
    run: PublishedRun,
    strategy: Mapping[str, Any],
    settings: Mapping[str, str],
    ranks: int,
    assumptions: list[str],
) -> dict[str, Any]:
    virtual, layers = run.count("vp") or 1, run.count("n_layers") or 0
    table: dict[str, Any] = {"virtual_stages": virtual} if virtual > 1 else {}
    if strategy.get("engine") == "nanotron":
        if "sched" not in settings:
            assumptions.append("1F1B")
        return {**table, "schedule": "1f1b", "layers_per_stage": nanotron_layers(run, ranks)}
    if strategy["kind"] == "fsdp2":
        return table
    stages = ranks * virtual
    layout = parse_pipeline_layout(run.text("notes"), stages)
    if layout:
        return {**table, "layers_per_stage": layout}
    ends = re.fullmatch(r"(\d+)/(\d+)", settings.get("first_last", ""))
    if ends:
        first, last = int(ends[1]), int(ends[2])
        inner, rest = stages - 2, layers - first - last
        return {**table, "layers_per_stage": [first, *[rest // max(inner, 1)] * inner, last]}
    if layers + 2 == stages:
        assumptions.append("embedding and loss have a stage each")
        return {**table, "layers_per_stage": [0, *[1] * layers, 0]}
    if layers % stages and (layers + 2) % stages == 0:
        assumptions.append("embedding and loss count as a layer each")
        table |= {"first_stage_less_layers": 1, "last_stage_less_layers": 1}
    elif layers % stages and strategy["kind"] == "megatron" and layers > stages:
        assumptions.append(f"pipeline: {layers} layers over {stages} stages as evenly as they divide")
        each, more = divmod(layers, stages)
        table["layers_per_stage"] = [
            each + (stages - 1 - more <= stage < stages - 1) for stage in range(stages)
        ]
    elif strategy["kind"] == "deepspeed" and (run.count("tp") or 1) == 1:
        table |= {"first_stage_less_layers": 0}
    return table


def parse_pipeline_layout(notes: str, stages: int) -> list[int]:
    """Layers of every stage as Megatron's `--pipeline-model-parallel-layout` writes them, in model order.

    "Et*4|(t*4|)*14tmL" has E for the embedding, t for a layer, m for multi-token prediction, L for the loss
    and | between stages. The list is empty without a layout, or if it is for another number of stages.
    """
    match = re.search(r"(?:pp_layout|pipeline-model-parallel-layout)=([A-Za-z0-9*|()]+)", notes)
    if match is None:
        return []
    text = re.sub(r"\(([^()]*)\)\*(\d+)", lambda part: part[1] * int(part[2]), match[1])
    text = re.sub(r"([A-Za-z])\*(\d+)", lambda part: part[1] * int(part[2]), text)
    layers = [part.count("t") for part in text.split("|")]
    return layers if len(layers) == stages else []


def nanotron_layers(run: PublishedRun, ranks: int) -> list[int]:
    """The layers of nanotron's stages."""
    sizes = [run.count(column) or 0 for column in ("n_layers", "hidden", "ffn", "vocab")]
    return stage_layers(*sizes, ranks=ranks)


def pipeline_micro_batches(run: PublishedRun, kind: str, micro_batch: int, assumptions: list[str]) -> int:
    """The number of micro-batches that torchtitan's pipeline cuts a batch into. It is the number of pipeline
    ranks where the row does not state it (`pipeline_parallel_microbatches` of its config_manager.py until
    2025), and 1 for all other frameworks.
    """
    ranks = run.count("pp") or 1
    if kind != "fsdp2" or ranks == 1:
        return 1
    if micro_batch % ranks:
        raise NotSimulatedError(f"{micro_batch} sequences are no whole micro-batches of {ranks} stages")
    assumptions.append(f"{ranks} micro-batches in the pipeline")
    return ranks
