"""Models whose head has a few outputs in place of the vocabulary: reward models and classifiers.

transformers' `GenericForSequenceClassification` (5.24 modeling_layers.py) multiplies the hidden states of
all tokens by `score`, a Linear without bias, and takes one token's row of each sequence. Neither a tied
embedding's weight nor what squeezes logits has a part in it.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.errors import InputError
from zsim.operations.linear import Linear
from zsim.operations.loss import Loss
from zsim.operations.operation import HEAD, Module, Parameter, Role
from zsim.specs.model.spec import ModelSpec

SCORE = "score"


def with_labels(model: ModelSpec, labels: int) -> ModelSpec:
    """The model with a head of `labels` outputs.

    Raises InputError for a model without a language model's head, and for as many labels as it has words.
    """
    where = "training.labels"
    number = next((number for number, module in enumerate(model.after) if module.name == HEAD), None)
    if number is None or model.after[-1].role is not Role.LOSS:
        raise InputError(f"{where}: '{model.name}' has no head of a language model; expected it left out")
    if labels >= model.vocab_size:
        raise InputError(
            f"{where}: found {labels:,}, but '{model.name}' has {model.vocab_size:,} words; expected fewer"
        )
    features = model.after[number].op_spec.product_features[0]
    score = Module(SCORE, Linear(features, labels), (Parameter("weight", (labels, features)),))
    after = (*model.after[:number], score, replace(model.after[-1], op_spec=Loss(labels)))
    names = model.registered_after_blocks
    if names is not None:
        names = tuple(SCORE if name == HEAD else name for name in names)
    return replace(model, after=after, vocab_size=labels, is_tied=False, registered_after_blocks=names)
