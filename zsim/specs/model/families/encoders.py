"""BERT, RoBERTa, ELECTRA, DistilBERT and ModernBERT: every token sees all others.

Names, shapes and defaults as in transformers 5.24 (`modeling_bert.py` and those of the others, and their
`configuration_*.py`). Heads are of masked tokens, whose logits are of all tokens, masked or not, or of
labels. That of sequences, which reads one token of each, is counted as if it read all: below 1 % of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
_SEQUENCES, _TOKENS, _ANSWERS = "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"


class _Variant(NamedTuple):
    name: str
    """What the names of its classes begin with."""
    root: str
    embeddings: Sequence[str]
    """Tables and their norm, as they are registered."""
    head: tuple[str, str, str, str]
    """The layer before the logits of words, its activation (empty for the blocks'), its norm, the logits."""
    registered_last: Sequence[int]
    """The order of the parts of `head` in `named_parameters()`."""
    classifier: tuple[str, str, str]
    """The layer before the logits of a sequence, its activation, the logits."""
    has_decoder: bool = False
    """A head that is not tied is a module within that of the bias."""
    layers: str = "encoder.layer"
    block: Sequence[str] = (
        "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
        "attention.output.LayerNorm", "intermediate.dense", "intermediate.act", "output.dense",
        "output.LayerNorm",
    )  # fmt: skip
    spare_rows: int = 0
    """Rows of the positions that are not used."""
    vocab_size: int = 30_522
    default_sizes: tuple[int, int, int, int] = (768, 768, 12, 3072)
    """Features of the embeddings and of blocks, heads, and features of the MLP."""


_BERT = ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm")
_ROBERTA = _Variant(
    "Roberta", "roberta", (_BERT[0], _BERT[2], _BERT[3], _BERT[1]),
    ("lm_head.dense", "gelu", "lm_head.layer_norm", "lm_head"), (3, 0, 2),
    ("classifier.dense", "tanh", "classifier.out_proj"), has_decoder=True, spare_rows=2,
)  # fmt: skip
_VARIANTS = {
    "bert": _Variant(
        "Bert", "bert", _BERT,
        ("cls.predictions.transform.dense", "", "cls.predictions.transform.LayerNorm", "cls.predictions"),
        (3, 0, 2), ("bert.pooler.dense", "tanh", "classifier"), has_decoder=True,
    ),
    "roberta": _ROBERTA._replace(vocab_size=50_265),
    "xlm-roberta": _ROBERTA._replace(name="XLMRoberta"),
    "camembert": _ROBERTA._replace(name="Camembert"),
    "electra": _Variant(
        "Electra", "electra", _BERT,
        ("generator_predictions.dense", "gelu", "generator_predictions.LayerNorm", "generator_lm_head"),
        (2, 0, 3), ("classifier.dense", "gelu", "classifier.out_proj"), default_sizes=(128, 256, 4, 1024),
    ),
    "distilbert": _Variant(
        "DistilBert", "distilbert", (_BERT[0], _BERT[1], _BERT[3]),
        ("vocab_transform", "", "vocab_layer_norm", "vocab_projector"), (0, 2, 3),
        ("pre_classifier", "relu", "classifier"), layers="transformer.layer", block=(
            "attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "sa_layer_norm",
            "ffn.lin1", "ffn.activation", "ffn.lin2", "output_layer_norm",
        ),
    ),
}  # fmt: skip


def bert(config: ConfigReader) -> ModelSpec:
    """Post-norm blocks and learned positions. DistilBERT has no segments, ELECTRA narrow embeddings."""
    variant = _VARIANTS[config.family]
    task = _task_of(config, variant.name)
    narrow, wide, *_ = variant.default_sizes
    hidden = config.integer("hidden_size", wide)
    width = config.integer("embedding_size", narrow) if variant.name == "Electra" else hidden
    positions, types = config.integer("max_position_embeddings", 512), config.integer("type_vocab_size", 2)
    dropout, act = config.fraction("hidden_dropout_prob", 0.1), config.activation("hidden_act", "gelu")
    root, vocab = f"{variant.root}.embeddings", config.integer("vocab_size", variant.vocab_size)
    rows = {"word_embeddings": vocab, "position_embeddings": positions, "token_type_embeddings": types}
    tables = [name for name in rows if name in variant.embeddings]
    before = [
        *(embedding(f"{root}.{name}", rows[name], width) for name in tables),
        *(residual(f"{root}.add_{name}", width) for name in tables[1:]),
        layer_norm(f"{root}.LayerNorm", width),
        *([activation(f"{root}.dropout", width, "dropout")] if dropout else []),
    ]
    early = [f"{root}.{name}" for name in variant.embeddings]
    if width != hidden:
        before.append(linear(f"{root}_project", width, hidden, bias=True))
        early.append(before[-1].name)
    dense, squeeze, last = variant.classifier
    final = []
    head = Linear(hidden, _num_labels(config, task)), "qa_outputs" if task == _ANSWERS else "classifier"
    if task == _LM:
        name, head_act, norm, last = variant.head
        final = [
            linear(name, hidden, width, bias=True),
            activation(f"{name}.act", width, head_act or act),
            layer_norm(norm, width),
        ]
        head = Linear(width, vocab), last
    elif task == _SEQUENCES:
        final = [linear(dense, hidden, hidden, bias=True), activation(f"{dense}.act", hidden, squeeze)]
        head = head[0], last
    return _add_head(
        config,
        hidden,
        before,
        [_bert_block(config, variant, hidden, dropout, act)] * config.num_blocks("num_hidden_layers"),
        final,
        head,
        root=f"{variant.root}.{variant.layers}",
        is_tied=task == _LM and config.boolean("tie_word_embeddings", True),
        positions=positions - variant.spare_rows,
        has_decoder=task == _LM and variant.has_decoder,
        early=early,
        late=[variant.head[number] for number in variant.registered_last] if task == _LM else (),
    )


def _bert_block(config: ConfigReader, variant: _Variant, hidden: int, dropout: float, act: str) -> Block:
    *_, default_heads, default_inner = variant.default_sizes
    heads = config.integer("num_attention_heads", default_heads)
    head_dim, inner = config.head_dim(hidden, heads), config.integer("intermediate_size", default_inner)
    for key in ("is_decoder", "add_cross_attention"):
        if config.boolean(key, False):
            raise config.error(f"'{key}' is true; expected false: zsim has {variant.name} as an encoder only")
    query, key_name, value, output, norm, up, act_name, down, last_norm = variant.block
    core = attention(
        f"{query.rpartition('.')[0]}.core",
        heads,
        heads,
        head_dim,
        rotary=False,
        dropout=config.fraction("attention_probs_dropout_prob", 0.1),
        upcasts_softmax=False,
    )
    modules = (
        linear(query, hidden, hidden, bias=True),
        linear(key_name, hidden, hidden, bias=True, shares_input=True),
        linear(value, hidden, hidden, bias=True, shares_input=True),
        replace_op_fields(core, is_causal=False),
        linear(output, hidden, hidden, bias=True),
        residual(f"{output}.residual", hidden, 0.0 if variant.name == "DistilBert" else dropout),
        layer_norm(norm, hidden),
        *plain_mlp((up, act_name, down), hidden, inner, act),
        residual(f"{down}.residual", hidden, dropout),
        layer_norm(last_norm, hidden),
    )
    return Block("TransformerBlock" if variant.name == "DistilBert" else f"{variant.name}Layer", modules)


def modernbert(config: ConfigReader) -> ModelSpec:
    """ModernBERT has pre-norm blocks with rotary positions and a gated MLP.

    Two layers of three see a window on both sides. The first block has no norm before its attention, as the
    embeddings have one.
    """
    task = _task_of(config, "ModernBert")
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
    labels = Linear(hidden, _num_labels(config, task)), "classifier"
    return _add_head(
        config,
        hidden,
        before,
        build_unique_blocks([(index == 0, window) for index, window in enumerate(windows)], block),
        final,
        (Linear(hidden, config.integer("vocab_size")), "decoder") if task == _LM else labels,
        root="model.layers",
        is_tied=task == _LM and config.boolean("tie_word_embeddings", True),
        has_bias=task != _LM or config.boolean("decoder_bias", True),
    )


def _task_of(config: ConfigReader, kind: str) -> str:
    """The task of the file's class, masked tokens without one. Raises InputError for another class."""
    tasks = (_LM, _SEQUENCES, _TOKENS, _ANSWERS)
    named = config.strings("architectures")
    task = next((task for task in tasks if not named or f"{kind}{task}" in named), None)
    if task is None:
        raise config.error(
            f"'architectures' is {', '.join(named)}; zsim knows {kind} with the heads {', '.join(tasks)}: "
            "give one of those, or leave the key out"
        )
    return task


def _num_labels(config: ConfigReader, task: str) -> int:
    """The outputs of a head of labels: those of the file, or two."""
    return 2 if task == _ANSWERS else config.integer("num_labels", len(config.nested("id2label").values) or 2)


def _add_head(
    config: ConfigReader,
    hidden: int,
    before: Sequence[Module],
    blocks: Sequence[Block],
    final: Sequence[Module],
    head: tuple[Linear, str],
    *,
    root: str,
    is_tied: bool,
    positions: int | None = None,
    has_bias: bool = True,
    has_decoder: bool = False,
    early: Sequence[str] = (),
    late: Sequence[str] = (),
) -> ModelSpec:
    """The model with a head, which is tied to the word embedding but for its bias.

    `early` and `late` are the modules before and after the blocks, in the order of `named_parameters()`,
    where they run in another.
    """
    op_spec, name = head
    features, outputs = op_spec.product_features
    bias = (Parameter("bias", (outputs,)),) if has_bias else ()
    weight: tuple[Parameter, ...] = () if is_tied else (Parameter("weight", (outputs, features)),)
    if has_decoder and not is_tied:  # a module of its own, whose bias is tied with its weight
        weight = (Parameter("decoder.weight", (outputs, features)), Parameter("decoder.bias", (outputs,)))
    return ModelSpec(
        name=config.name,
        family=config.family,
        hidden_size=hidden,
        vocab_size=outputs,
        max_positions=positions,
        before=tuple(before),
        blocks=tuple(blocks),
        after=(*final, Module(name, op_spec, (*weight, *bias)), Module("loss", Loss(outputs))),
        block_prefix=root,
        is_tied=is_tied,
        source=config.where,
        registered_before_blocks=tuple(early) or None,
        registered_after_blocks=tuple(late) or None,
    )
