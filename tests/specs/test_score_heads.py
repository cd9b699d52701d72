"""Heads of a few outputs, as of reward models and classifiers."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from zsim.errors import InputError, NotSimulatedError
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment


def experiment(labels: int | None, model: str = "qwen3-4b", **changes: Any) -> Experiment:
    training = {"sequence_length": 512, "micro_batch_size": 2, **({"labels": labels} if labels else {})}
    return Experiment(model=model, cluster="dgx-h100", gpus=2, training=training, **changes)


def test_a_head_of_labels_stands_in_place_of_a_tied_one() -> None:
    """Qwen3-4B's head is its embedding, so 3 x 2560 weights come to its 4,022,468,096 parameters."""
    model = resolve(experiment(3)).model
    assert (model.numel, model.is_tied) == (4_022_468_096 + 3 * 2560, False)
    assert [module.name for module in model.after] == ["model.norm", "score", "loss"]


def test_what_squeezes_logits_goes_with_the_vocabulary() -> None:
    assert [module.name for module in resolve(experiment(1, "gemma2-2b")).model.after][-2:] == [
        "score",
        "loss",
    ]


def test_a_step_has_neither_the_products_of_the_head_nor_logits() -> None:
    """2 x 512 tokens of 151,936 logits in 16 and 32 bits are 0.9 GB."""
    words, labels = (
        zsim.simulate(experiment(count, strategy={"kind": "ddp"})).report.to_dict() for count in (None, 1)
    )
    assert words["peak_bytes"]["gpu"]["activations"] - labels["peak_bytes"]["gpu"]["activations"] > 0.9e9
    assert labels["step_seconds"] < words["step_seconds"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"labels": 200_000}, InputError, "found 200,000, but 'qwen3-4b' has 151,936 words; expected fewer"),
        ({"labels": 1, "model": "bert-base"}, InputError, "has no head of a language model"),
        (
            {"labels": 1, "parallelism": {"tensor": 2}},
            NotSimulatedError,
            "not simulated with model parallelism",
        ),
    ],
)
def test_bad_input_is_one_sentence(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve(experiment(**changes))
