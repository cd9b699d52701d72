"""Gemma 4: heads that are wider in layers without a window, experts beside a dense MLP, embeddings per layer.
Gemma 3n: embeddings per layer, and a residual of several streams.

Names, shapes and defaults as in transformers 5.24 (`modeling_gemma4.py`, `modeling_gemma3n.py` and their
`configuration_*.py`). Image tokens that see one another both ways are counted as causal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zsim.operations.hyper_connection import AlternatingUpdate
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
from zsim.specs.model.spec import Block, ModelSpec, Module, Norm, Parameter, Residual

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
    ffn: int = 0
    """The MLP's width, where layers differ."""
    is_sparse: bool = False
    """The MLP's gates below a cutoff are zero."""


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
    first_shared = _first_sharing_layer(config, kinds, 0)
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


def gemma4_unified(config: ConfigReader) -> ModelSpec:
    """The text model of Gemma 4 12B, which has neither experts nor embeddings per layer."""
    defaults = {"sliding_window": 1024, "max_position_embeddings": 262_144}
    return gemma4(
        config.add_defaults(**defaults).override(hidden_size_per_layer_input=0, enable_moe_block=False)
    )


def _first_sharing_layer(config: ConfigReader, kinds: Sequence[str], default: int) -> int:
    """The number of the first layer that reads keys and values of an earlier one of its kind."""
    shared = min(config.integer("num_kv_shared_layers", default, minimum=0), len(kinds))
    first = len(kinds) - shared
    if shared and not set(kinds[first:]) <= set(kinds[:first]):
        raise config.error(
            f"'num_kv_shared_layers' is {shared}; expected fewer, so that a layer of each of 'layer_types' "
            "makes keys and values"
        )
    return first


def gemma3n(config: ConfigReader) -> ModelSpec:
    """The text models of Gemma 3n: alternating updates of several streams, of which one goes through the
    layer, and a low-rank branch beside attention.
    """
    widths = config.integers("intermediate_size") if isinstance(
        config.values.get("intermediate_size"), list) else ()  # fmt: skip
    if widths:
        config = config.override(intermediate_size=widths[0])
    config = config.add_defaults(
        vocab_size=262_400, hidden_size=2048, intermediate_size=16_384, num_hidden_layers=35,
        num_attention_heads=8,
    )  # fmt: skip
    shape = Shape.read(config, kv_default=2, head_dim=256)
    default = [_SLIDING if (index + 1) % 5 else _FULL for index in range(shape.layers)]
    kinds = layer_kinds(config, shape.layers, default, _SLIDING, _FULL)
    first_shared = _first_sharing_layer(config, kinds, 15)
    sparsity = config.values.get("activation_sparsity_pattern")
    if sparsity is None:
        sparsity = [0.95 if shape.layers > 10 and index < 10 else 0.0 for index in range(shape.layers)]
    for key, numbers in (("intermediate_size", widths), ("activation_sparsity_pattern", sparsity)):
        if numbers and len(numbers) != shape.layers:
            raise config.error(f"'{key}' has {len(numbers)} numbers; expected {shape.layers}")
    layers = [
        _Layer(
            kind == _SLIDING, index >= first_shared, shape.head_dim, shape.kv_heads,
            widths[index] if widths else shape.ffn, bool(sparsity[index]),
        )
        for index, kind in enumerate(kinds)
    ]  # fmt: skip
    model = decoder(
        config, shape, build_unique_blocks(layers, _Gemma3n(config, shape).block), is_tied=True,
        max_positions=32_768, norm=NORM,
        softcaps_logits=config.values.get("final_logit_softcapping", 30.0) is not None,
    )  # fmt: skip
    model = _add_embeddings_per_layer(config, model, _per_layer_width(config), shape.layers)
    streams = range(config.integer("altup_num_inputs", 4) - 1)
    first, last = ([
        module
        for number in streams
        for module in (
            linear(f"model.{name}.{number}", shape.hidden, shape.hidden, shares_input=number > 0),
            Module(f"model.{name}.{number}.size", Norm(shape.hidden, "l2")),
        )
    ] for name in ("altup_projections", "altup_unembed_projections"))  # fmt: skip
    mean = Module("model.mean_stream", Residual(shape.hidden))
    names = (module.name for module in (*first, *last) if module.parameters)
    return replace(
        model,
        before=(*model.before, *first),
        after=(*last, mean, *model.after),
        registered_after_blocks=(*(model.registered_after_blocks or ()), *names),
    )


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
        self.act = config.activation("hidden_activation", "gelu_pytorch_tanh")
        self.is_causal = config.string("use_bidirectional_attention", "") != "all"
        self.has_wide_mlp = config.boolean("use_double_wide_mlp", False)

    def block(self, layer: _Layer) -> Block:
        hidden, norms = self.shape.hidden, [self._norm(name) for name in _NORMS]
        modules = (
            norms[0],
            *self._attention(layer),
            norms[1],
            residual("self_attn.residual", hidden),
            norms[2],
            *self._mlp(layer),
            *(self._routed() if self.config.boolean("enable_moe_block", False) else []),
            norms[3],
            residual("mlp.residual", hidden),
            *self._per_layer_input(),
            activation("layer_scalar", hidden, "scale"),
        )
        unified = "Unified" if self.config.family == "gemma4_unified_text" else ""
        return set_registration(Block(f"Gemma4{unified}TextDecoderLayer", modules), *_ORDER)

    def _mlp(self, layer: _Layer) -> list[Module]:
        ffn = layer.ffn or self.shape.ffn * (2 if self.has_wide_mlp and layer.reads_keys else 1)
        return gated_mlp("mlp", self.shape.hidden, ffn, self.act)

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


class _Gemma3n(_Gemma4):
    """Builds the blocks of one model."""

    def block(self, layer: _Layer) -> Block:
        config, hidden = self.config, self.shape.hidden
        streams, rank = config.integer("altup_num_inputs", 4), config.integer("laurel_rank", 64)
        norms, scale = [self._norm(name) for name in _NORMS], (Parameter("correct_output_scale", (hidden,)),)
        first, *attention = self._attention(layer)
        modules = (
            *self._router("prediction", streams**2),
            Module("altup.predict", AlternatingUpdate(hidden, streams, is_prediction=True)),
            norms[0],
            linear("laurel.linear_left", hidden, rank),
            linear("laurel.linear_right", rank, hidden),
            self._norm("laurel.post_laurel_norm"),
            residual("laurel.residual", hidden),
            replace(first, shares_input=True),
            *attention,
            norms[1],
            residual("self_attn.residual", hidden),
            residual("laurel.sum", hidden, scales=True),
            norms[2],
            *self._mlp(layer),
            norms[3],
            residual("mlp.residual", hidden),
            *self._router("correction", streams),
            Module("altup.correct", AlternatingUpdate(hidden, streams, is_prediction=False)),
            replace(activation("altup", hidden, "learned_scale"), parameters=scale),
            *self._per_layer_input(),
        )
        owned = [f"self_attn.{name}" for name in ("q_proj", "q_norm", "k_proj", "v_proj", "k_norm", "o_proj")]
        coefficients = ("correction_coefs", "prediction_coefs", "modality_router", "router_norm")
        laurel = ("linear_left", "linear_right", "post_laurel_norm")
        order = (
            *owned, *_ORDER[6:9], *_NORMS, "altup", *(f"altup.{name}" for name in coefficients),
            *(f"laurel.{name}" for name in laurel), *_ORDER[13:16],
        )  # fmt: skip
        return set_registration(Block("Gemma3nTextDecoderLayer", modules), *order)

    def _router(self, name: str, weights: int) -> list[Module]:
        """The norm, the products and the tanh that make a token's `weights`. Both uses have one router, which
        is counted with the first, on two rows for each token.
        """
        hidden, streams = self.shape.hidden, self.config.integer("altup_num_inputs", 4)
        router = [self._norm("altup.router_norm"), linear("altup.modality_router", hidden, streams)]
        return [
            *(replace(module, rows_per_token=2.0) for module in router if name == "prediction"),
            activation(f"altup.{name}_tanh", streams, "tanh"),
            linear(f"altup.{name}_coefs", streams, weights),
        ]

    def _mlp(self, layer: _Layer) -> list[Module]:
        modules = super()._mlp(layer)
        if layer.is_sparse:
            modules[2] = replace_op_fields(modules[2], name="gaussian_topk_gelu")
        return modules


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
