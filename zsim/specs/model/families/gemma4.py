"""Gemma 4: heads that are wider in layers without a window, experts beside a dense MLP, embeddings per layer.

Names, shapes and defaults as in transformers 5.24 (`modeling_gemma4.py`, `configuration_gemma4.py`). Image
tokens that see one another both ways are counted as causal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.operations.operation import Role
from zsim.operations.router import Router
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import (
    activation,
    attention,
    embedding,
    linear,
    replace_op_fields,
    residual,
    rms_norm,
    set_registration,
)
from zsim.specs.model.families.llama import Shape, build_unique_blocks, decoder, gated_mlp
from zsim.specs.model.families.mixers import layer_kinds
from zsim.specs.model.families.moe import routed_mlp
from zsim.specs.model.spec import Block, ModelSpec, Module, Norm, Parameter

NORM = "gemma_rms"
_SLIDING, _FULL = "sliding_attention", "full_attention"
_NORMS = tuple(
    f"{name}_layernorm" for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
)
_ORDER = (
    *(f"self_attn.{name}" for name in ("q_proj", "q_norm", "k_norm", "k_proj", "v_proj", "o_proj")),
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", *_NORMS, "per_layer_input_gate", "per_layer_projection",
    "post_per_layer_input_norm", "router.norm", "router.proj", "experts", "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Layer:
    """The traits by which layers of one model differ."""

    has_window: bool
    reads_keys: bool
    """Keys and values are those of an earlier layer."""
    head_dim: int
    kv_heads: int


def gemma4(config: ConfigReader) -> ModelSpec:
    """The text models of Gemma 4."""
    config = config.add_defaults(
        vocab_size=262_144, hidden_size=2304, intermediate_size=9216, num_hidden_layers=30,
        num_attention_heads=8,
    )  # fmt: skip
    shape = Shape.read(config, kv_default=4, head_dim=256)
    default = [_FULL if (index + 1) % 6 == 0 else _SLIDING for index in range(shape.layers)]
    kinds = layer_kinds(config, shape.layers, default, _SLIDING, _FULL)
    kinds[-1] = _FULL  # whatever the file says
    shared = min(config.integer("num_kv_shared_layers", 0, minimum=0), shape.layers)
    first_shared = shape.layers - shared
    if shared and not set(kinds[first_shared:]) <= set(kinds[:first_shared]):
        raise config.error(
            f"'num_kv_shared_layers' is {shared}; expected fewer, so that a layer of each of 'layer_types' "
            "makes keys and values"
        )
    layers = [
        _Layer(kind == _SLIDING, index >= first_shared, *_heads(config, shape, index, kind))
        for index, kind in enumerate(kinds)
    ]
    model = decoder(
        config, shape, build_unique_blocks(layers, _Gemma4(config, shape).block), is_tied=True,
        max_positions=131_072, norm=NORM,
        softcaps_logits=config.values.get("final_logit_softcapping") is not None,
    )  # fmt: skip
    width = _per_layer_width(config)
    return _add_embeddings_per_layer(config, model, width, shape.layers) if width else model


def _heads(config: ConfigReader, shape: Shape, index: int, kind: str) -> tuple[int, int]:
    """(width of a head, number of key/value heads) of a layer, by `per_layer_config` in files that
    transformers 5.24 writes, else by the keys of heads without a window.
    """
    head, groups = shape.head_dim, shape.kv_heads
    if config.values.get("per_layer_config") is not None:
        layers = config.nested("per_layer_config")
        spelling = next((key for key in layers.values if str(key).zfill(5) == f"{index:05}"), str(index))
        layer = layers.nested(spelling)
        head, groups = layer.integer("head_dim", head), layer.integer("num_key_value_heads", groups)
    elif kind == _FULL:
        head = config.integer("global_head_dim", 512)
        if config.boolean("attention_k_eq_v", False):
            groups = config.integer("num_global_key_value_heads", groups)
    config.check_kv_heads(shape.heads, groups)
    return head, groups


class _Gemma4:
    """Builds the blocks of one model."""

    def __init__(self, config: ConfigReader, shape: Shape) -> None:
        self.config, self.shape = config, shape
        self.act = config.string("hidden_activation", "gelu_pytorch_tanh")
        self.is_causal = config.string("use_bidirectional_attention", "") != "all"
        self.has_wide_mlp = config.boolean("use_double_wide_mlp", False)

    def block(self, layer: _Layer) -> Block:
        hidden, norms = self.shape.hidden, [self._norm(name) for name in _NORMS]
        ffn = self.shape.ffn * (2 if self.has_wide_mlp and layer.reads_keys else 1)
        modules = (
            norms[0],
            *self._attention(layer),
            norms[1],
            residual("self_attn.residual", hidden),
            norms[2],
            *gated_mlp("mlp", hidden, ffn, self.act),
            *(self._routed() if self.config.boolean("enable_moe_block", False) else []),
            norms[3],
            residual("mlp.residual", hidden),
            *self._per_layer_input(),
            activation("layer_scalar", hidden, "scale"),
        )
        return set_registration(Block("Gemma4TextDecoderLayer", modules), *_ORDER)

    def _attention(self, layer: _Layer) -> list[Module]:
        """Attention. Where `attention_k_eq_v` says so, the key's product makes values too in layers without a
        window. Values have a norm without a weight.
        """
        config, shape = self.config, self.shape
        has_bias = config.boolean("attention_bias", False)
        head, groups = layer.head_dim, layer.kv_heads
        one_projection = config.boolean("attention_k_eq_v", False) and not layer.has_window
        window = config.integer("sliding_window", 512)
        window = window if self.is_causal else window // 2 + 1
        core = replace_op_fields(
            attention(
                "self_attn.core", shape.heads, groups, head, dropout=shape.dropout,
                window=window if layer.has_window else None,
            ),
            is_causal=self.is_causal, reads_keys=layer.reads_keys,
        )  # fmt: skip
        modules = [
            linear("self_attn.q_proj", shape.hidden, shape.heads * head, bias=has_bias),
            rms_norm("self_attn.q_norm", head, rows_per_token=shape.heads, kind=NORM),
        ]
        if not layer.reads_keys:
            keys = groups * head
            modules += [
                linear("self_attn.k_proj", shape.hidden, keys, bias=has_bias, shares_input=True),
                rms_norm("self_attn.k_norm", head, rows_per_token=groups, kind=NORM),
            ]
            if not one_projection:
                modules.append(
                    linear("self_attn.v_proj", shape.hidden, keys, bias=has_bias, shares_input=True)
                )
            modules.append(Module("self_attn.v_norm", Norm(keys, "l2")))
        return [
            *modules, core, linear("self_attn.o_proj", shape.heads * head, shape.hidden, bias=has_bias),
        ]  # fmt: skip

    def _routed(self) -> list[Module]:
        """Experts that read the stream as the dense MLP does, and the norms of both branches."""
        config, hidden = self.config, self.shape.hidden
        experts, top_k = config.integer("num_experts"), config.integer("top_k_experts")
        router, routed = routed_mlp(
            config, hidden, config.integer("moe_intermediate_size"), experts, top_k, Router(0, 0, 0),
            act=self.act,
        )  # fmt: skip
        scales = Parameter("scale", (hidden,)), Parameter("per_expert_scale", (experts,))
        return [
            self._norm("post_feedforward_layernorm_1"),
            self._norm("pre_feedforward_layernorm_2"),
            Module("router.norm", Norm(hidden), scales, parameter_owner="router"),
            activation("router.root_size", hidden, "scale"),
            replace(router, name="router.proj"),
            replace(routed, name="experts"),
            self._norm("post_feedforward_layernorm_2"),
            residual("mlp.branches", hidden),
        ]

    def _per_layer_input(self) -> list[Module]:
        """The features of the layer that come from its own embedding of the token."""
        hidden, width = self.shape.hidden, _per_layer_width(self.config)
        if not width:
            return []
        return [
            linear("per_layer_input_gate", hidden, width),
            activation("per_layer_input_gate.act_fn", width, self.act, gated=True),
            linear("per_layer_projection", width, hidden),
            self._norm("post_per_layer_input_norm"),
            residual("per_layer_input.residual", hidden),
        ]

    def _norm(self, name: str) -> Module:
        return rms_norm(name, self.shape.hidden, kind=NORM)


def _per_layer_width(config: ConfigReader) -> int:
    return config.integer("hidden_size_per_layer_input", 256, minimum=0)


def _add_embeddings_per_layer(config: ConfigReader, model: ModelSpec, width: int, layers: int) -> ModelSpec:
    """The model with a row of `width` features for each token and layer: a table's, and a product of the
    token's own embedding.
    """
    rows, root = config.integer("vocab_size_per_layer_input", 262_144), "model"
    modules = [
        embedding(f"{root}.embed_tokens_per_layer", rows, layers * width),
        linear(f"{root}.per_layer_model_projection", model.hidden_size, layers * width),
        activation(f"{root}.per_layer_model_projection_scale", layers * width, "scale"),
        rms_norm(f"{root}.per_layer_projection_norm", width, rows_per_token=layers, kind=NORM),
        residual(f"{root}.per_layer_inputs", layers * width, scales=True),
    ]
    names = [module.name for module in modules if module.role is not Role.RESIDUAL and module.parameters]
    return replace(
        model,
        before=(*model.before, *modules),
        registered_before_blocks=tuple(module.name for module in model.before),
        registered_after_blocks=(*(module.name for module in model.after), *names),
    )
