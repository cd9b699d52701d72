"""Frozen and trainable parameters of a model."""

from zsim.specs.model.spec import Block, Linear, ModelSpec, Module, Parameter


def test_a_frozen_parameter_is_counted_but_not_as_trainable() -> None:
    """Two blocks of a frozen 4 x 6 weight and a trainable bias of 4: 56 parameters, 8 of them trained."""
    weight, bias = Parameter("weight", (4, 6), trainable=False), Parameter("bias", (4,))
    block = Block("block", (Module("proj", Linear(6, 4), (weight, bias)),))
    model = ModelSpec("m", "m", 6, 9, None, (), (block, block), (), "layers", False, "test")
    assert (model.numel, model.trainable_numel) == (56, 8)
    assert block.modules[0].trainable_numel == block.trainable_numel == 4
