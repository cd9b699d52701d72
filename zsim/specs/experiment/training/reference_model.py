"""`training.reference`: a frozen model that a loss asks for probabilities of the same sequences.

# [Note: a reference's forward]
DPO, KTO and the like score each sequence by the trained model and by a frozen one (TRL 1.10
trainer/dpo_trainer.py `_compute_loss`, LLaMA-Factory 0.9.6 train/dpo/trainer.py). The reference runs after
the trained model's forward and before its backward, without autograd, while all that the forward keeps is
there. KTO asks both models for mismatched pairs as well (TRL's kto_trainer.py, LLaMA-Factory's
train/kto/trainer.py), which are three forwards without gradients in place of one. A copy is loaded like the
model and held by every rank (TRL's `prepare_deepspeed` before stage 3, `accelerator.prepare_model`). With
adapters the model itself runs without them. The work of the adapters is counted in that pass too, which is
little.
"""

from __future__ import annotations

from zsim.errors import InputError, NotSimulatedError
from zsim.specs.experiment.training.framework_training import training_of
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.table import StrategyConfig, StrategyTable

KEY = "training.reference"


def check_reference(
    table: TrainingTable,
    strategy: StrategyTable,
    config: StrategyConfig | None,
    parallelism: ParallelismConfig,
) -> None:
    """Raises InputError for a base without adapters, NotSimulatedError where its forward would gather or
    send, see [Note: a reference's forward].
    """
    if table.reference is None:
        if table.reference_forwards != 1:
            raise InputError(
                f"{KEY}_forwards: found {table.reference_forwards} without {KEY}; expected {KEY} with it"
            )
        return
    if table.reference == "base" and table.lora is None:
        raise InputError(f"{KEY}: found 'base' without training.lora, whose base it is; expected 'copy'")
    if not parallelism.is_trivial:
        raise NotSimulatedError(
            f"{KEY}: not simulated with model parallelism; expected data parallelism alone"
        )
    training_of(strategy.kind).check_reference(KEY, strategy, config)


def reference_notes(table: TrainingTable) -> list[str]:
    """The sentence on how often the loss runs forward."""
    if table.reference is None:
        return []
    model = "a frozen copy of the model" if table.reference == "copy" else "the model without its adapters"
    times = "" if table.reference_forwards == 1 else f", {table.reference_forwards} times in all"
    return [
        f"{model} runs forward on every micro-batch as well{times}; MFU counts the trained model's work alone"
    ]
