"""Modules and blocks that the families are built from, named and shaped as in transformers 5.23.

Weights are in torch's layout: `[out, in]` for `nn.Linear`, `[in, out]` for GPT-2's `Conv1D`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.spec import (
    Activation,
    Attention,
    Block,
    Embedding,
    Linear,
    Loss,
    ModelSpec,
    Module,
    Norm,
    Parameter,
    Residual,
)


def check_translator(config: ConfigReader, kind: str, head: str = "ForConditionalGeneration") -> None:
    """Raises InputError for a file whose class is not the translator `kind`, nor its parts without a head."""
    names = f"{kind}{head}", f"{kind}Model", f"{kind}WithLMHeadModel"  # the last as T5 had it before 4.0
    classes = config.strings("architectures")
    if classes and not set(names) & set(classes):
        raise config.error(
            f"'architectures' is {', '.join(classes)}; zsim knows {kind} as a translator: expected "
            f"{names[0]}, or the key left out"
        )
    if not config.boolean("is_encoder_decoder", True):
        raise config.error(f"'is_encoder_decoder' is false; expected true: zsim has {kind} with both halves")


def linear(
    name: str, in_features: int, out_features: int, *, bias: bool = False, shares_input: bool = False
) -> Module:
    """`nn.Linear`."""
    parameters = [Parameter("weight", (out_features, in_features))]
    if bias:
        parameters.append(Parameter("bias", (out_features,)))
    return Module(name, Linear(in_features, out_features), tuple(parameters), shares_input)


def conv1d(name: str, in_features: int, out_features: int) -> Module:
    """GPT-2's `Conv1D`: a Linear with bias and a transposed weight."""
    parameters = (Parameter("weight", (in_features, out_features)), Parameter("bias", (out_features,)))
    return Module(name, Linear(in_features, out_features), parameters)


def embedding(name: str, rows: int, width: int) -> Module:
    """`nn.Embedding`."""
    return Module(name, Embedding(rows, width), (Parameter("weight", (rows, width)),))


def layer_norm(
    name: str, width: int, *, bias: bool = True, affine: bool = True, shares_input: bool = False
) -> Module:
    """`nn.LayerNorm`."""
    parameters = (Parameter("weight", (width,)),) if affine else ()
    if affine and bias:
        parameters = (*parameters, Parameter("bias", (width,)))
    return Module(name, Norm(width, "layer"), parameters, shares_input)


def rms_norm(name: str, width: int, *, rows_per_token: int = 1, kind: str = "rms") -> Module:
    """The families' RMSNorm, without a weight of kind "l2". With `rows_per_token` > 1 it normalises each
    head.
    """
    weight = () if kind == "l2" else (Parameter("weight", (width,)),)
    return Module(name, Norm(width * rows_per_token, kind), weight)


def residual(name: str, width: int, dropout: float = 0.0, *, scales: bool = False) -> Module:
    """The add to the residual stream, after its dropout and its product with a number."""
    return Module(name, Residual(width, dropout, scales))


def replace_op_fields(module: Module, **changes: Any) -> Module:
    """The module with fields of its op spec changed."""
    return replace(module, op_spec=replace(module.op_spec, **changes))


def activation(name: str, width: int, function: str, *, gated: bool = False) -> Module:
    """The MLP's non-linearity over `width` features."""
    return Module(name, Activation(width, gated, function))


def attention(
    name: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    rotary: bool = True,
    dropout: float = 0.0,
    window: int | None = None,
    upcasts_softmax: bool = True,
    splits_fused_qkv: bool = False,
) -> Module:
    """The core of attention: scores, softmax and values."""
    op_spec = Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        qk_head_dim=head_dim,
        v_head_dim=head_dim,
        rotary=rotary,
        dropout=dropout,
        window=window,
        upcasts_softmax=upcasts_softmax,
        splits_fused_qkv=splits_fused_qkv,
    )
    return Module(name, op_spec)


def language_model(
    config: ConfigReader,
    hidden: int,
    before: Sequence[Module],
    blocks: Sequence[Block],
    max_positions: int | None,
    *,
    root: str = "transformer.h",
    final: Sequence[Module] | None = None,
    is_tied: bool | None = False,
    head_width: int | None = None,
    head_bias: bool = False,
    softcaps: bool = False,
    scales: bool = False,
    registration: Sequence[str] = (),
) -> ModelSpec:
    """Embeddings, blocks, the `final` modules (default: GPT-2's norm), LM head, loss.

    `is_tied` is the family's default of `tie_word_embeddings`, and None where its class ties nothing. A tied
    head computes with the embedding's weight and owns at most a bias. With `softcaps` the logits are squeezed
    through tanh (Gemma 2), and with `scales` they are multiplied by a number. `registration` is the order of
    the modules around the blocks in `named_parameters()`, if they do not run in that order.
    """
    final = [layer_norm("transformer.ln_f", hidden)] if final is None else final
    vocab = config.integer("vocab_size")
    is_tied = is_tied is not None and config.boolean("tie_word_embeddings", is_tied)
    head = linear("lm_head", head_width or hidden, vocab, bias=head_bias)
    if is_tied:
        head = Module(head.name, head.op_spec, head.parameters[1:])
    cap = [activation("logit_softcap", vocab, "softcap")] if softcaps else []
    cap += [activation("logit_scale", vocab, "scale")] if scales else []
    owners = {module.name for module in (*before, *final) if module.parameters}
    return ModelSpec(
        name=config.name,
        family=config.family,
        hidden_size=hidden,
        vocab_size=vocab,
        max_positions=max_positions,
        before=tuple(before),
        blocks=tuple(blocks),
        after=(*final, head, *cap, Module("loss", Loss(vocab))),
        block_prefix=root,
        is_tied=is_tied,
        source=config.where,
        registered_before_blocks=tuple(name for name in registration if name in owners) or None,
    )


def translator(
    config: ConfigReader,
    hidden: int,
    before: Sequence[Module],
    halves: Mapping[str, Sequence[Block]],
    after: Sequence[Module],
    max_positions: int | None = None,
) -> ModelSpec:
    """An encoder and a decoder, by the names of their lists of blocks, and a head that is their embedding.
    Both have as many tokens.
    """
    vocab = config.integer("vocab_size")
    return ModelSpec(
        name=config.name,
        family=config.family,
        hidden_size=hidden,
        vocab_size=vocab,
        max_positions=max_positions,
        before=tuple(before),
        blocks=tuple(block for blocks in halves.values() for block in blocks),
        after=(*after, Module("loss", Loss(vocab))),
        block_prefix=next(iter(halves)),
        is_tied=True,
        source=config.where,
        has_encoder=True,
        block_names=tuple(
            f"{name}.{number}" for name, blocks in halves.items() for number in range(len(blocks))
        ),
    )


def word_embedding(config: ConfigReader, width: int, name: str = "transformer.wte") -> Module:
    """The word embedding: a row of `width` for every entry of the vocabulary."""
    return embedding(name, config.integer("vocab_size"), width)


def separate_qkv(prefix: str, hidden: int, *, bias: bool = False) -> list[Module]:
    """Separate projections of one input to queries, keys and values."""
    return [
        linear(f"{prefix}.{name}_proj", hidden, hidden, bias=bias, shares_input=name != "q") for name in "qkv"
    ]


def plain_mlp(
    names: tuple[str, str, str],
    hidden: int,
    inner: int,
    act: str,
    *,
    bias: bool = True,
    shares_input: bool = False,
) -> list[Module]:
    """`down(act(up(x)))`, with the `names` of up, act and down."""
    return [
        linear(names[0], hidden, inner, bias=bias, shares_input=shares_input),
        activation(names[1], inner, act),
        linear(names[2], inner, hidden, bias=bias),
    ]


def fused_mlp(
    names: tuple[str, str, str], hidden: int, inner: int, act: str, *, bias: bool = False
) -> list[Module]:
    """`down(act(gate) * up)`, where one product makes gate and up, with the `names` of its modules."""
    return [
        linear(names[0], hidden, 2 * inner, bias=bias),
        activation(names[1], inner, act, gated=True),
        linear(names[2], inner, hidden, bias=bias),
    ]


def attention_mlp_block(
    kind: str,
    norms: tuple[Module, Module],
    attend: Sequence[Module],
    mlp: Sequence[Module],
    adds: tuple[Module, Module],
) -> Block:
    """Norm, attention, add, then norm, MLP, add."""
    return Block(kind, (norms[0], *attend, adds[0], norms[1], *mlp, adds[1]))


def set_registration(block: Block, *order: str) -> Block:
    """The same block, with the order of its modules in `named_parameters()`."""
    owners = {module.name for module in block.modules if module.parameters}
    assert set(order) >= owners, (block.kind, owners - set(order))
    return Block(block.kind, block.modules, tuple(name for name in dict.fromkeys(order) if name in owners))


def rename_modules(modules: list[Module], old: str, new: str) -> list[Module]:
    """Modules with `old` replaced in their names."""
    return [replace(module, name=module.name.replace(old, new, 1)) for module in modules]
