"""The decisions of the search that frameworks have in common, as data, and those of each framework in order.

The structure decides where states are kept and how the batch is cut. Every combination is considered, except
for the loss, which is varied only for the best few and where memory requires it (`zsim.study.tune.refine`).
Details are sizes and switches that improve a good structure slightly. They are refined one after the other.
A framework's own decisions stand in its folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zsim.specs.experiment.programs import find_config_mapping
from zsim.specs.strategy.registry import kinds
from zsim.study.tune.axis import (
    ACCUMULATION,
    BLOCKS,
    CHECKPOINTING,
    EVERY,
    LOSS,
    MICRO_BATCH,
    AxisChoice,
    Chosen,
    TunedAxis,
)
from zsim.study.tune.base import Base
from zsim.study.tune.degrees import degrees, replicas_of
from zsim.study.tune.framework import tuning_of
from zsim.study.tune.settings import value_of

_MAX_MICRO_BATCHES = 512


def divisors(count: int) -> list[int]:
    small = [number for number in range(1, int(count**0.5) + 1) if count % number == 0]
    return sorted({*small, *(count // number for number in small)})


def _micro_batches(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Every division of a replica's sequences into equal micro-batches."""
    sequences = base.batch_sequences // replicas_of(base, chosen)
    for size in divisors(sequences):
        steps = sequences // size
        if steps <= _MAX_MICRO_BATCHES:
            yield micro_batch_choice(size, steps)


def micro_batch_choice(size: int, steps: int) -> AxisChoice:
    """The choice of `steps` micro-batches of `size` sequences."""
    suffix = f" x {steps}" if steps > 1 else ""
    return AxisChoice(f"micro-batch {size}{suffix}", {MICRO_BATCH: size, ACCUMULATION: steps})


def _checkpointings(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """No checkpointing, whole blocks, every second block, and a form in between: selective by op where
    attention is one op whose output can be saved, else the core of attention alone."""
    intermediate = "selective" if base.job.training.attention == "math" else "selective-op"
    reset: dict[str, Any] = {BLOCKS: {}} if base.job.training.block_checkpointing else {}
    names = ("none", intermediate, "full")
    forms = [AxisChoice(f"checkpointing {name}", {CHECKPOINTING: name, EVERY: 1, **reset}) for name in names]
    forms.insert(-1, AxisChoice("checkpointing every 2nd block", {CHECKPOINTING: "full", EVERY: 2, **reset}))
    return forms


def _losses(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """The configured loss, one that is one kernel, and one that never holds all logits. Where the program
    casts the logits before every loss, as transformers does, the one kernel is Liger's on the cast copy.
    """
    configured = base.job.training.cross_entropy
    has_fused = find_config_mapping(base.program, base.kind, LOSS, "fused") is not None
    for name in dict.fromkeys((configured, "fused" if has_fused else "liger", "fused_linear")):
        yield AxisChoice("" if name == configured else f"cross entropy {name}", {LOSS: name})


def _degrees(base: Base, chosen: Chosen) -> Iterable[AxisChoice]:
    """Degrees of the experiments that have a `[parallelism]` table, or are asked to search it."""
    splits = degrees(base) if "parallelism" in base.data else []
    return [AxisChoice(label, overrides) for label, overrides in splits]


PARALLELISM = TunedAxis("parallelism", _degrees)
CHECKPOINTINGS = TunedAxis("checkpointing", _checkpointings)
LOSSES = TunedAxis("cross-entropy", _losses)
MICRO_BATCHES = TunedAxis("micro-batch", _micro_batches)


def choices_of(axis: TunedAxis, base: Base, chosen: Chosen) -> list[AxisChoice]:
    """The choices of an axis.

    Those that the configuration of the experiment's program cannot express are left out, unless the
    configuration has them already.
    """
    return [choice for choice in axis.choices(base, chosen) if _is_expressible(base, choice)]


def _is_expressible(base: Base, choice: AxisChoice) -> bool:
    return all(
        find_config_mapping(base.program, base.kind, key, value) is not None
        or value == value_of(base, {}, key)
        for key, value in choice.overrides.items()
    )


def axis_names() -> set[str]:
    """The names of all decisions on structure and details, of all frameworks."""
    tunings = [tuning_of(kind) for kind in kinds()]
    return {axis.name for tuning in tunings for axis in (*tuning.structure, *tuning.details)}
