"""BERT, RoBERTa and ModernBERT, trained on masked tokens: every token sees all others.

Names, shapes and defaults as in transformers 5.23 (`modeling_bert.py`, `modeling_roberta.py`,
`modeling_modernbert.py` and their `configuration_*.py`): `BertForMaskedLM`, `RobertaForMaskedLM`,
`ModernBertForMaskedLM`, whose logits are of all tokens, masked or not.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import (
    activation,
    attention,
    embedding,
    layer_norm,
    linear,
    plain_mlp,
    replace_op_fields,
    residual,
    set_registration,
)
from zsim.specs.model.families.llama import build_unique_blocks, layer_windows
from zsim.specs.model.spec import Block, Linear, Loss, ModelSpec, Module, Parameter

_LM = "ForMaskedLM"
_KINDS = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}


def bert(config: ConfigReader) -> ModelSpec:
    """Post-norm blocks, learned positions and segments, a head with a layer of its own."""
    return _bert(config, "Bert", "bert", spare_rows=0)


def roberta(config: ConfigReader) -> ModelSpec:
    """BERT's block. Two rows of the positions are not used. XLM-RoBERTa and CamemBERT are the same."""
    return _bert(config, _KINDS[config.family], "roberta", spare_rows=2)


def _bert(config: ConfigReader, kind: str, root: str, *, spare_rows: int) -> ModelSpec:
    _check_architecture(config, kind)
    config = config.add_defaults(vocab_size=50265 if kind == "Roberta" else 30522)
    hidden, vocab = config.integer("hidden_size", 768), config.integer("vocab_size")
    positions, types = config.integer("max_position_embeddings", 512), config.integer("type_vocab_size", 2)
    dropout, act = config.fraction("hidden_dropout_prob", 0.1), config.activation("hidden_act", "gelu")
    block = _bert_block(config, kind, hidden, dropout, act)
    tables = {"word": vocab, "position": positions, "token_type": types}
    before = [
        *(embedding(f"{root}.embeddings.{name}_embeddings", rows, hidden) for name, rows in tables.items()),
        residual(f"{root}.embeddings.add_types", hidden),
        residual(f"{root}.embeddings.add_positions", hidden),
        layer_norm(f"{root}.embeddings.LayerNorm", hidden),
    ]
    if dropout:
        before.append(activation(f"{root}.embeddings.dropout", hidden, "dropout"))
    order = ("word", "position", "token_type") if kind == "Bert" else ("word", "token_type", "position")
    names = [f"{root}.embeddings.{name}_embeddings" for name in order]
    names.insert(3 if kind == "Bert" else 2, f"{root}.embeddings.LayerNorm")
    head, head_layer = (
        ("cls.predictions", "cls.predictions.transform") if kind == "Bert" else ("lm_head",) * 2
    )
    norm = "LayerNorm" if kind == "Bert" else "layer_norm"
    dense = linear(f"{head_layer}.dense", hidden, hidden, bias=True)
    squeeze = activation(f"{head_layer}.act", hidden, act if kind == "Bert" else "gelu")
    return _masked_model(
        config,
        before,
        [block] * config.num_blocks("num_hidden_layers"),
        [dense, squeeze, layer_norm(f"{head_layer}.{norm}", hidden)],
        head,
        root=f"{root}.encoder.layer",
        positions=positions - spare_rows,
        early=names,
        late=[head, f"{head_layer}.dense", f"{head_layer}.{norm}"],
    )


def _bert_block(config: ConfigReader, kind: str, hidden: int, dropout: float, act: str) -> Block:
    heads = config.integer("num_attention_heads", 12)
    head_dim, inner = config.head_dim(hidden, heads), config.integer("intermediate_size", 3072)
    for key in ("is_decoder", "add_cross_attention"):
        if config.boolean(key, False):
            raise config.error(f"'{key}' is true; expected false: zsim has {kind} as an encoder only")
    prefix = "attention.self"
    core = attention(
        f"{prefix}.core",
        heads,
        heads,
        head_dim,
        rotary=False,
        dropout=config.fraction("attention_probs_dropout_prob", 0.1),
        upcasts_softmax=False,
    )
    modules = (
        linear(f"{prefix}.query", hidden, hidden, bias=True),
        linear(f"{prefix}.key", hidden, hidden, bias=True, shares_input=True),
        linear(f"{prefix}.value", hidden, hidden, bias=True, shares_input=True),
        replace_op_fields(core, is_causal=False),
        linear("attention.output.dense", hidden, hidden, bias=True),
        residual("attention.output.dropout", hidden, dropout),
        layer_norm("attention.output.LayerNorm", hidden),
        *plain_mlp(("intermediate.dense", "intermediate.act", "output.dense"), hidden, inner, act),
        residual("output.dropout", hidden, dropout),
        layer_norm("output.LayerNorm", hidden),
    )
    return Block(f"{kind}Layer", modules)


def modernbert(config: ConfigReader) -> ModelSpec:
    """ModernBERT has pre-norm blocks with rotary positions and a gated MLP.

    Two layers of three see a window on both sides. The first block has no norm before its attention, as the
    embeddings have one.
    """
    _check_architecture(config, "ModernBert")
    hidden, heads = config.integer("hidden_size", 768), config.integer("num_attention_heads", 12)
    head_dim, inner = config.head_dim(hidden, heads), config.integer("intermediate_size", 1152)
    layers, act = config.num_blocks("num_hidden_layers"), config.activation("hidden_activation", "gelu")
    global_interval = config.integer("global_attn_every_n_layers", 3)
    half = config.integer("local_attention", 128) // 2
    windows = layer_windows(config, layers, half, [index % global_interval != 0 for index in range(layers)])
    norm_bias, mlp_bias = config.boolean("norm_bias", False), config.boolean("mlp_bias", False)
    has_bias = config.boolean("attention_bias", False)
    attention_dropout, dropout = (
        config.fraction("attention_dropout", 0.0),
        config.fraction("mlp_dropout", 0.0),
    )

    def block(kind: tuple[bool, int | None]) -> Block:
        is_first, window = kind
        core = attention(
            "attn.core",
            heads,
            heads,
            head_dim,
            dropout=attention_dropout,
            window=window,
            splits_fused_qkv=True,
        )
        modules = [
            linear("attn.Wqkv", hidden, 3 * hidden, bias=has_bias),
            replace_op_fields(core, is_causal=False),
            linear("attn.Wo", hidden, hidden, bias=has_bias),
            residual("attn.out_drop", hidden, attention_dropout),
            layer_norm("mlp_norm", hidden, bias=norm_bias),
            linear("mlp.Wi", hidden, 2 * inner, bias=mlp_bias),
            activation("mlp.act", inner, act, gated=True),
            *([activation("mlp.drop", inner, "dropout")] if dropout else []),
            linear("mlp.Wo", inner, hidden, bias=mlp_bias),
            residual("mlp.residual", hidden),
        ]
        if not is_first:
            modules.insert(0, layer_norm("attn_norm", hidden, bias=norm_bias))
        encoder_layer = Block("ModernBertEncoderLayer", tuple(modules))
        return set_registration(
            encoder_layer, "attn_norm", "attn.Wqkv", "attn.Wo", "mlp_norm", "mlp.Wi", "mlp.Wo"
        )

    before = [
        embedding("model.embeddings.tok_embeddings", config.integer("vocab_size"), hidden),
        layer_norm("model.embeddings.norm", hidden, bias=norm_bias),
    ]
    if config.fraction("embedding_dropout", 0.0):
        before.append(activation("model.embeddings.drop", hidden, "dropout"))
    final = [
        layer_norm("model.final_norm", hidden, bias=norm_bias),
        linear("head.dense", hidden, hidden, bias=config.boolean("classifier_bias", False)),
        activation("head.act", hidden, config.activation("classifier_activation", "gelu")),
        layer_norm("head.norm", hidden, bias=norm_bias),
    ]
    return _masked_model(
        config,
        before,
        build_unique_blocks([(index == 0, window) for index, window in enumerate(windows)], block),
        final,
        "decoder",
        root="model.layers",
        positions=None,
        has_bias=config.boolean("decoder_bias", True),
    )


def _check_architecture(config: ConfigReader, kind: str) -> None:
    """Raises InputError for a file of another head than that of masked tokens."""
    named = config.strings("architectures")
    if named and f"{kind}{_LM}" not in named:
        raise config.error(
            f"'architectures' is {', '.join(named)}; zsim knows {kind} as {kind}{_LM} only: give that, or "
            "leave the key out"
        )


def _masked_model(
    config: ConfigReader,
    before: Sequence[Module],
    blocks: Sequence[Block],
    final: Sequence[Module],
    head: str,
    *,
    root: str,
    positions: int | None,
    has_bias: bool = True,
    early: Sequence[str] = (),
    late: Sequence[str] = (),
) -> ModelSpec:
    """The model with a head tied to the word embedding but for its bias.

    `early` and `late` are the modules before and after the blocks, in the order of `named_parameters()`,
    where they run in another.
    """
    hidden, vocab = config.integer("hidden_size", 768), config.integer("vocab_size")
    is_tied = config.boolean("tie_word_embeddings", True)
    bias = (Parameter("bias", (vocab,)),) if has_bias else ()
    weight: tuple[Parameter, ...] = () if is_tied else (Parameter("weight", (vocab, hidden)),)
    if early and not is_tied:  # BERT's product is a module of its own, whose bias is tied with its weight
        weight = (Parameter("decoder.weight", (vocab, hidden)), Parameter("decoder.bias", (vocab,)))
    return ModelSpec(
        name=config.name,
        family=config.family,
        hidden_size=hidden,
        vocab_size=vocab,
        max_positions=positions,
        before=tuple(before),
        blocks=tuple(blocks),
        after=(*final, Module(head, Linear(hidden, vocab), (*weight, *bias)), Module("loss", Loss(vocab))),
        block_prefix=root,
        is_tied=is_tied,
        source=config.where,
        registered_before_blocks=tuple(early) or None,
        registered_after_blocks=tuple(late) or None,
    )
