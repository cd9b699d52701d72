"""Checks of an experiment whose model was captured from a torch module, against the example of the
capture.
"""

from __future__ import annotations

from zsim.errors import InputError, NotSimulatedError
from zsim.operations.operation import Role
from zsim.operations.traced import CaptureInfo
from zsim.specs.experiment.training.framework_training import training_of
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.training import TrainingConfig

_NEED_ATTENTION = ("selective", "selective-op")


def captured_length(model: ModelSpec, requested: int | None) -> int | None:
    """The length of a captured model's samples, or None for other models.

    Raises InputError if `requested`, the experiment's own length, differs from it.
    """
    captured = model.captured
    if captured is None:
        return None
    length = captured.sequence_length
    if requested is not None and requested != length:
        raise InputError(
            f"training.sequence_length: found {requested:,}, but '{model.name}' was captured with samples of "
            f"{length:,} {'position' if length == 1 else 'positions'}, and a length is part of what "
            "was seen; "
            f"expected {length:,}, or an example of that length (training.micro_batch_size is free)"
        )
    return length


def check_captured(
    model: ModelSpec, kind: str, training: TrainingConfig, parallelism: ParallelismConfig
) -> None:
    """Raises InputError for settings that a captured module has no place for, NotSimulatedError for those
    that zsim cannot apply to one."""
    if model.captured is None:
        return
    where = f"model '{model.name}' was captured from a torch module"
    training_of(kind).check_any_model(where)
    if not parallelism.is_trivial:
        raise NotSimulatedError(
            f"parallelism: {where}, which zsim cuts along data parallelism only; expected degrees of 1, or a "
            "preset or config.json"
        )
    if training.autocast:
        raise NotSimulatedError(
            f"training.autocast: {where} in the type that its weights are gathered in; expected "
            "autocast = false "
            "(param_dtype instead), or a preset or config.json"
        )
    policies = {training.activation_checkpointing, *training.block_checkpointing}
    for policy in _NEED_ATTENTION:
        blocks = [block for block in model.blocks if block.is_wrapped]
        if policy in policies and not all(
            any(module.role is Role.MIXER for module in block.modules) for block in blocks
        ):
            raise InputError(
                f"training.activation_checkpointing: found '{policy}', which runs causal attention of "
                "every block "
                f"again, but {where} and not all its blocks have one; expected 'full' or 'none'"
            )


def captured_notes(model: ModelSpec) -> list[str]:
    """Sentences of the report about a captured model."""
    captured = model.captured
    if captured is None:
        return []
    notes = [
        f"the model was captured from a torch module with {captured.samples:,} "
        f"{'sample' if captured.samples == 1 else 'samples'} of {_positions(captured)}"
    ]
    if captured.unpriced:
        names = ", ".join(captured.unpriced)
        notes.append(f"operators without a price, taken at memory bandwidth (assumed): {names}")
    return [*notes, *captured.notes]


def _positions(captured: CaptureInfo) -> str:
    length = captured.sequence_length
    return "one position" if length == 1 else f"{length:,} positions"
