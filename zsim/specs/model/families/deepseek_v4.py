"""DeepSeek-V4: compressed attention, experts in every layer, and a residual of several streams.

Names, shapes and defaults as in transformers 5.24 (`modeling_deepseek_v4.py`, `configuration_deepseek_v4.py`)
and the checkpoints' own keys (`compress_ratios`, `num_hash_layers`, `qk_rope_head_dim`). The limits of the
experts' gates are a part of their fused activation. `indexer_loss` is that of
`zsim.specs.model.families.sparse`. Modules for multi-token prediction are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.operations.hyper_connection import StreamCollapse, StreamExpand
from zsim.operations.mixers.compressed_attention import CompressedAttention, KeyPooling
from zsim.operations.router import Router
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import linear, rms_norm, set_registration
from zsim.specs.model.families.llama import Shape, build_unique_blocks, decoder, gated_mlp
from zsim.specs.model.families.mixers import layer_kinds
from zsim.specs.model.families.moe import EXPERTS_FIRST, GATE_FIRST, routed_mlp
from zsim.specs.model.families.sparse import indexer_loss
from zsim.specs.model.spec import Block, ModelSpec, Module, Norm, Parameter

_WINDOW, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_ROOT, _POOL, _INDEXER = "self_attn", "self_attn.compressor", "self_attn.compressor.indexer"
_POOLED = ("kv_proj", "gate_proj", "kv_norm")
_ORDER = (
    _ROOT,
    *(f"{_ROOT}.{name}" for name in ("q_a_proj", "q_a_norm", "q_b_proj", "kv_proj", "kv_norm")),
    *(f"{_ROOT}.{name}" for name in ("o_a_proj", "o_b_proj")),
    _POOL, *(f"{_POOL}.{name}" for name in _POOLED),
    _INDEXER, *(f"{_INDEXER}.{name}" for name in (*_POOLED, "q_b_proj", "scorer.weights_proj")),
    *GATE_FIRST, *EXPERTS_FIRST, "input_layernorm", "post_attention_layernorm", "attn_hc", "ffn_hc",
)  # fmt: skip


def deepseek_v4(config: ConfigReader) -> ModelSpec:
    """V4 Flash and Pro."""
    config = config.add_defaults(hidden_size=4096, num_attention_heads=64, vocab_size=129_280)
    layers, width = config.num_blocks("num_hidden_layers", 43), config.integer("moe_intermediate_size", 2048)
    shape = Shape(
        hidden=config.integer("hidden_size"),
        ffn=width,
        layers=layers,
        heads=config.integer("num_attention_heads"),
        kv_heads=1,
        head_dim=config.integer("head_dim", 512),
        vocab=config.integer("vocab_size"),
        dropout=0.0,
        act=config.activation("hidden_act", "silu"),
    )
    model = decoder(
        config, shape, build_unique_blocks(_layers(config, layers), _DeepseekV4(config, shape).block),
        max_positions=1_048_576,
    )  # fmt: skip
    streams = config.integer("hc_mult", 4)
    head = StreamCollapse(shape.hidden, streams, is_last=True)
    parameters = (
        Parameter("hc_fn", (streams, streams * shape.hidden)), Parameter("hc_base", (streams,)),
        Parameter("hc_scale", (1,)),
    )  # fmt: skip
    return replace(
        model,
        after=(Module("model.hc_head", head, parameters), *model.after),
        registered_after_blocks=("model.norm", "model.hc_head", "lm_head"),
    )


def _layers(config: ConfigReader, layers: int) -> list[str]:
    """The kind of each layer: by `layer_types`, by `compress_ratios` (0, 4 or 128, with entries of layers for
    multi-token prediction behind), or the default.
    """
    default = [_HEAVY if index < 2 or index % 2 == 0 else _SPARSE for index in range(layers)]
    ratios = config.integers("compress_ratios")
    if ratios and not config.values.get("layer_types"):
        kinds = {0: _WINDOW, 4: _SPARSE, 128: _HEAVY}
        unknown = next((ratio for ratio in ratios if ratio not in kinds), None)
        if unknown is not None:
            raise config.error(f"'compress_ratios' has {unknown}; expected 0, 4 or 128")
        default = [kinds[ratio] for ratio in ratios[:layers]]
    return layer_kinds(config, layers, default, _WINDOW, _SPARSE, _HEAVY)


@dataclass(frozen=True, slots=True)
class _DeepseekV4:
    """Builds the blocks of one model."""

    config: ConfigReader
    shape: Shape

    def block(self, kind: str) -> Block:
        hidden, streams = self.shape.hidden, self.config.integer("hc_mult", 4)
        modules = (
            self._collapse("attn_hc", streams),
            rms_norm("input_layernorm", hidden),
            *self._attention(kind),
            Module("attn_hc.expand", StreamExpand(hidden, streams)),
            self._collapse("ffn_hc", streams),
            rms_norm("post_attention_layernorm", hidden),
            *self._experts(),
            Module("ffn_hc.expand", StreamExpand(hidden, streams)),
        )
        return set_registration(Block("DeepseekV4DecoderLayer", modules), *_ORDER)

    def _collapse(self, name: str, streams: int) -> Module:
        work = StreamCollapse(self.shape.hidden, streams)
        parameters = (
            Parameter("fn", (work.weights, streams * self.shape.hidden)),
            Parameter("base", (work.weights,)),
            Parameter("scale", (3,)),
        )
        return Module(name, work, parameters)

    def _attention(self, kind: str) -> list[Module]:
        config, shape = self.config, self.shape
        rank, head, heads = config.integer("q_lora_rank", 1024), shape.head_dim, shape.heads
        groups, inner = config.integer("o_groups", 8), config.integer("o_lora_rank", 1024)
        if heads * head % groups:
            raise config.error(f"'o_groups' is {groups}; expected a divisor of {heads * head:,}")
        ratio, rates = 0, config.nested("compress_rates")
        if kind != _WINDOW:
            legacy = config.integer("compress_rate_csa" if kind == _SPARSE else "compress_rate_hca",
                                    4 if kind == _SPARSE else 128)  # fmt: skip
            ratio = rates.integer(kind, legacy)
        work = CompressedAttention(heads, head, config.integer("sliding_window", 128), ratio)
        if kind == _SPARSE:
            work = replace(
                work, top_k=config.integer("index_topk", 512),
                index_heads=config.integer("index_n_heads", 64),
                index_dim=config.integer("index_head_dim", 128),
                loss=indexer_loss(config),
            )  # fmt: skip
        # One product for each group of heads: rows of a group's features.
        first = replace(
            linear(f"{_ROOT}.o_a_proj", heads * head // groups, inner),
            parameters=(Parameter("weight", (groups * inner, heads * head // groups)),),
            rows_per_token=float(groups),
        )
        return [
            linear(f"{_ROOT}.q_a_proj", shape.hidden, rank),
            rms_norm(f"{_ROOT}.q_a_norm", rank),
            linear(f"{_ROOT}.q_b_proj", rank, heads * head),
            Module(f"{_ROOT}.q_b_norm", Norm(heads * head, "l2")),
            linear(f"{_ROOT}.kv_proj", shape.hidden, head, shares_input=True),
            rms_norm(f"{_ROOT}.kv_norm", head),
            *(self._pooling(_POOL, head, ratio, overlaps=kind == _SPARSE) if ratio else []),
            *(self._indexer(work) if kind == _SPARSE else []),
            Module(_ROOT, work, (Parameter("sinks", (heads,)),)),
            first,
            linear(f"{_ROOT}.o_b_proj", groups * inner, shape.hidden),
        ]

    def _pooling(self, root: str, width: int, ratio: int, *, overlaps: bool) -> list[Module]:
        """The products for features and gates, the pooling, and a norm of the entries."""
        work = KeyPooling(width, ratio, overlaps)
        return [
            linear(f"{root}.kv_proj", self.shape.hidden, work.inputs, shares_input=True),
            linear(f"{root}.gate_proj", self.shape.hidden, work.inputs, shares_input=True),
            Module(root, work, (Parameter("position_bias", (ratio, work.inputs)),)),
            replace(rms_norm(f"{root}.kv_norm", width), rows_per_token=1 / ratio),
        ]

    def _indexer(self, work: CompressedAttention) -> list[Module]:
        """Nothing of it has a gradient of its input."""
        rank = self.config.integer("q_lora_rank", 1024)
        modules = [
            *self._pooling(_INDEXER, work.index_dim, work.ratio, overlaps=True),
            linear(f"{_INDEXER}.q_b_proj", rank, work.index_heads * work.index_dim, shares_input=True),
            linear(f"{_INDEXER}.scorer.weights_proj", self.shape.hidden, work.index_heads, shares_input=True),
        ]
        return [replace(module, input_gradient=False) for module in modules]

    def _experts(self) -> list[Module]:
        """Scores are square roots of softplus. The first layers choose by a table of tokens instead."""
        config, shape = self.config, self.shape
        experts, top_k = config.integer("n_routed_experts", 256), config.integer("num_experts_per_tok", 6)
        choice = Router(0, 0, 0, "sigmoid", has_choice_bias=True)
        if (shared := config.integer("n_shared_experts", 1, minimum=0)) != 1:
            raise config.error(f"'n_shared_experts' is {shared}; expected 1")
        return [
            *routed_mlp(config, shape.hidden, shape.ffn, experts, top_k, choice),
            *gated_mlp(
                "mlp.shared_experts", shape.hidden, shape.ffn, shape.act,
                bias=config.boolean("mlp_bias", False),
            ),
        ]  # fmt: skip
