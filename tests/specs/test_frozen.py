"""Frozen and trainable parameters of a model."""

from typing import Any

import pytest

from zsim.plan.checks import check_plan
from zsim.plan.make import make_plan
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.model.spec import Block, Linear, ModelSpec, Module, Parameter


def test_a_frozen_parameter_is_counted_but_not_as_trainable() -> None:
    """Two blocks of a frozen 4 x 6 weight and a trainable bias of 4: 56 parameters, 8 of them trained."""
    weight, bias = Parameter("weight", (4, 6), trainable=False), Parameter("bias", (4,))
    block = Block("block", (Module("proj", Linear(6, 4), (weight, bias)),))
    model = ModelSpec("m", "m", 6, 9, None, (), (block, block), (), "layers", False, "test")
    assert (model.numel, model.trainable_numel) == (56, 8)
    assert block.modules[0].trainable_numel == block.trainable_numel == 4


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
@pytest.mark.parametrize(
    ("name", "embedding"),
    [
        ("gpt2", "transformer.wte"),
        ("bert-base", "*.word_embeddings"),
        ("modernbert-base", "*.tok_embeddings"),
        ("llama-3.2-1b", "model.embed_tokens"),
    ],
)
def test_a_head_tied_to_a_frozen_embedding_makes_no_gradient(
    name: str, embedding: str, strategy: str
) -> None:
    """Embeddings of positions that are trained, and a head with a bias of its own, change nothing."""
    heads = {}
    for frozen in ([], [f"{embedding}.weight"]):
        training: dict[str, Any] = {"sequence_length": 128, "frozen": frozen}
        job = resolve(
            Experiment(model=name, cluster="dgx-h100", strategy={"kind": strategy}, training=training)
        )
        check_plan(make_plan(job))
        heads[bool(frozen)] = next(
            one
            for one in reversed(job.model.after)
            if isinstance(one.op_spec, Linear) and one.op_spec.out_features > 9999
        )
    assert [heads[frozen].trains_weight for frozen in (False, True)] == [True, False]
