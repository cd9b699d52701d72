"""Multi-token prediction: Megatron's layers that predict further tokens, each with the head and a loss.

Read in Megatron-LM d98e8a64 megatron/core/transformer/multi_token_prediction.py and
megatron/core/models/gpt/gpt_model.py. Each of the `--mtp-num-layers` layers looks up the next tokens'
embedding, norms it and the hidden states, brings both together in one product (`eh_proj`), and passes a layer
like the model's last and a norm. In models of several kinds of blocks it has a pattern of its own
(core/models/hybrid/hybrid_layer_allocation.py). The model's own head and loss follow. The layers are on the
last stage of a pipeline, which then has a copy of the embedding whose gradient it sums up with the first
stage's. The loss of each is scaled and added by autograd alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.operations.operation import Role
from zsim.specs.model.families.builders import linear, rms_norm
from zsim.specs.model.spec import Block, ModelSpec, Module, join_names

PREDICTION_ENTRY = "eh_proj"
"""The product that brings a token's embedding and its hidden state together."""
_ROOT = "mtp.layers"
_ENDS = 4  # modules behind a layer: embedding, norm, head, loss


def add_prediction_layers(model: ModelSpec, count: int) -> ModelSpec:
    """The model with `count` layers of multi-token prediction after its blocks, which share its embedding and
    head.
    """
    last, hidden = model.blocks[-1], model.hidden_size
    table = next(module.op_spec for module in model.before if module.role is Role.EMBEDDING)
    head = next(module for module in model.after if module.role is Role.PRODUCT)
    loss = next(module for module in model.after if module.role is Role.LOSS)
    entry = (
        rms_norm("enorm", hidden),
        rms_norm("hnorm", hidden),
        linear(PREDICTION_ENTRY, 2 * hidden, hidden),
    )
    names = [module.name for module in entry]
    layer = _join_blocks(model.prediction_blocks) if model.prediction_blocks else last
    block = Block(
        f"MultiTokenPrediction{layer.kind}",
        (*entry, *layer.modules),
        None if layer.registration is None else (*names, *layer.registration),
    )
    ends: list[Module] = []
    for number in range(count):
        name = f"{_ROOT}.{number}"
        ends += [
            Module(join_names(name, "embedding"), table),
            rms_norm(join_names(name, "final_layernorm"), hidden),
            Module(join_names(name, head.name), head.op_spec),
            replace(loss, name=join_names(name, loss.name)),
        ]
    return replace(
        model,
        blocks=(*model.blocks, *[block] * count),
        after=(*ends, *model.after),
        block_names=(
            *(model.block_name(number) for number in range(len(model.blocks))),
            *(f"{_ROOT}.{number}" for number in range(count)),
        ),
        mtp_parameters=count * (block.numel + hidden),
        num_prediction_layers=count,
    )


def _join_blocks(blocks: Sequence[Block]) -> Block:
    """Blocks as one, their modules numbered by block."""
    modules: list[Module] = []
    registration: list[str] = []
    for number, block in enumerate(blocks):
        modules += (replace(module, name=f"layers.{number}.{module.name}") for module in block.modules)
        registration += (f"layers.{number}.{module.name}" for module in block.registered_modules)
    return Block("And".join(block.kind for block in blocks), tuple(modules), tuple(registration))


def remove_prediction_layers(model: ModelSpec) -> ModelSpec:
    """The model without its layers of multi-token prediction."""
    count = model.num_prediction_layers
    if not count:
        return model
    return replace(
        model,
        blocks=model.blocks[:-count],
        after=model.after[_ENDS * count :],
        block_names=(),
        num_prediction_layers=0,
    )
