"""Sentences that the terminal and the page both show."""

from __future__ import annotations

from collections.abc import Iterator

from zsim.report.framework import report_role
from zsim.report.memory import START_UP, OutOfMemory, Remedy
from zsim.report.report import Report
from zsim.units import format_bytes, format_gpus, format_seconds
from zsim.validated.validation import describe_unexplained, format_validation

_POOLS = {
    "gpu": "GPU memory", "host": "host memory of a node", "nvme": "NVMe of a node",
    "pinned": "page-locked memory of a node",
}  # fmt: skip


def headline(report: Report) -> str:
    """Model, strategy, cluster, world size and each GPU's batch, where the labels have them."""
    labels = report.labels
    strategy = labels.get("strategy") or labels.get("framework")
    words = [labels.get("model"), strategy, labels.get("parallelism"), labels.get("cluster")]
    gpus = labels.get("gpus") or format_gpus(report.simulation.world_size)
    words += [gpus, labels.get("batch")]
    return " | ".join(word for word in words if word)


def format_trust(report: Report) -> str:
    """How far to trust the step: its interval, what the validated runs behind it have in common, and where
    the job is beyond them.

    Empty where the step is not judged.
    """
    validation = report.validation
    if validation is None:
        return ""
    sentence = f"Step {format_validation(validation, report.step_seconds)}"
    sentence += f" ({validation.regime})" if validation.runs else ""
    unexplained = describe_unexplained(validation)
    sentence += f". {unexplained[0].upper()}{unexplained[1:]}" if unexplained else ""
    beyond = f" Extrapolates: {'; '.join(validation.extrapolates)}." if validation.extrapolates else ""
    return f"{sentence}.{beyond}"


SHARDING = "sharding"  # among the changes that were tried
NO_GPUS = "More GPUs alone, up to 65,536, would not help"
NO_REMEDY = "None of these makes it fit on these GPUs"
NO_CHANGE = "No change that was tried makes it fit on these GPUs"


def missing_memory(finding: OutOfMemory, kind: str = "") -> str:
    """The first op that does not fit, when, by how much, and what would make the job of a `kind` of strategy
    fit.
    """
    missing, at_peak = format_bytes(finding.missing_bytes), format_bytes(finding.peak_missing_bytes)
    pool = _POOLS.get(finding.pool, finding.pool)
    # A host that runs ahead has issued some of a step's ops before the step begins.
    time_text = f", issued at {format_seconds(finding.seconds)}" if finding.seconds else ""
    capacity = format_bytes(finding.capacity_bytes)
    if finding.op == START_UP:
        text = (
            f"{pool}: the whole model, on every GPU before it is sharded, exceeds {capacity} by {missing}; "
            f"{_built_sharded(kind)} it would never be whole"
        )
    elif finding.seconds == 0 and finding.op in ("", "start"):
        text = (
            f"{pool}: the peak exceeds {capacity} by {at_peak}, and what is held from the start by {missing}"
        )
    else:
        op = f"'{finding.op}'" if finding.op else "an op"
        text = (
            f"{pool}: the peak exceeds {capacity} by {at_peak}; the first op without room is "
            f"{op}{time_text}, which lacks {missing}"
        )
    remedy = "" if finding.remedy is None else f" {format_remedy(finding.remedy)}"
    if finding.least_gpus is not None:
        return f"{text}. {format_gpus(finding.least_gpus)} would hold all tensors.{remedy}"
    if finding.pool == "gpu" and finding.tried:
        untried = (
            "" if SHARDING in finding.tried else " Strategies that shard were not tried (strategy.kind)."
        )
        remedy = remedy or f" {NO_REMEDY}: {', '.join(finding.tried)}.{untried}"
        return f"{text}.{remedy} {NO_GPUS}."
    return f"{text}.{remedy}"


def _built_sharded(kind: str) -> str:
    framework = report_role(kind)
    return f"built under {framework.sharded_builder} ({framework.sharded_builder_key} = true)"


def format_remedy(remedy: Remedy) -> str:
    """E.g. "training.activation_checkpointing = full would fit: 37.18 GB, step 9.500 s."."""
    step = format_seconds(remedy.step_seconds)
    odds = (
        "" if remedy.fits_probability is None else f" with {100 * remedy.fits_probability:.0f} % probability"
    )
    text = f"{remedy.words} would fit{odds}: {format_bytes(remedy.gpu_peak_bytes)}, step {step}"
    if remedy.script_changes:
        text += f" (needs a change of the script: {'; '.join(_format_script_changes(remedy))})"
    return f"{text}."


def _format_script_changes(remedy: Remedy) -> Iterator[str]:
    """Changes of the script, without repeating the remedy's words: for a single switch only the change, for
    several the key too.
    """
    switches = remedy.words.split(" and ")
    for change in remedy.script_changes:
        known_switch = next((switch for switch in switches if change.startswith(f"{switch}: ")), None)
        description = change if known_switch is None else change.removeprefix(f"{known_switch}: ")
        yield (
            description
            if known_switch is None or len(switches) == 1
            else f"{known_switch.partition(' = ')[0]}: {description}"
        )
