"""gpt-oss, Llama 4 and LongCat-Flash: routed experts in other blocks.

Names, shapes and defaults as in transformers 5.24 (`modeling_gpt_oss.py`,
`modeling_llama4.py`, `modeling_longcat_flash.py` and their `configuration_*.py`).
"""

from __future__ import annotations

from dataclasses import replace

from zsim.operations.experts import Experts
from zsim.operations.operation import Role
from zsim.operations.router import Router
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import (
    language_model,
    rename_modules,
    replace_op_fields,
    residual,
    rms_norm,
    set_registration,
    word_embedding,
)
from zsim.specs.model.families.latent import latent_attention
from zsim.specs.model.families.llama import (
    REGISTRATION,
    Shape,
    attention_modules,
    build_unique_blocks,
    decoder,
    gated_mlp,
    layer_windows,
    pre_norm_block,
    rotary_layers,
)
from zsim.specs.model.families.moe import registration_order, routed_mlp
from zsim.specs.model.spec import Block, ModelSpec, Module, Norm, Parameter


def gpt_oss(config: ConfigReader) -> ModelSpec:
    """gpt-oss has biases everywhere, a learned sink per head, and a window in every other layer.

    The router's softmax is over the chosen experts alone.
    """
    shape = Shape.read(config, kv_default=8, head_dim=64)
    has_bias = config.boolean("attention_bias", True)
    window = config.integer("sliding_window", 128)
    local = [index % 2 == 0 for index in range(shape.layers)]
    windows = layer_windows(config, shape.layers, window, local)
    num_experts, top_k = config.integer("num_local_experts", 128), config.integer("num_experts_per_tok", 4)
    mlp = routed_mlp(
        config, shape.hidden, shape.ffn, num_experts, top_k, gate="mlp.router", act="swiglu_oai",
        bias=True, is_transposed=True,
    )  # fmt: skip
    sinks = (Parameter("sinks", (shape.heads,)),)
    scales = _has_yarn(config)
    order = ("self_attn", *registration_order(("mlp.router", "mlp.experts")))

    def block(layer_window: int | None) -> Block:
        core = [
            replace(
                replace_op_fields(module, has_sinks=True, upcasts_softmax=False, scales_rotary=scales),
                name="self_attn",
                parameters=sinks,
            )
            if module.role is Role.MIXER
            else module
            for module in attention_modules(shape, qkv_bias=has_bias, o_bias=has_bias, window=layer_window)
        ]
        return pre_norm_block("GptOssDecoderLayer", shape, core, mlp, registration=order)

    return decoder(config, shape, build_unique_blocks(windows, block), max_positions=131_072)


def _has_yarn(config: ConfigReader) -> bool:
    """Whether positions are YaRN's, as where the file says nothing (`configuration_gpt_oss.py`)."""
    rope = config.values.get("rope_parameters") or config.values.get("rope_scaling")
    if not isinstance(rope, dict):
        return True
    return bool(rope.get("rope_type", rope.get("type", "yarn")) == "yarn")


def llama4(config: ConfigReader) -> ModelSpec:
    """The text models of Llama 4.

    Layers with rotary positions attend within chunks, the others to all tokens. Every
    `interleave_moe_layer_step`-th layer has one expert of many and a shared one. A multimodal file leaves out
    what is as in the class.
    """
    config = config.add_defaults(
        vocab_size=202_048, hidden_size=5120, intermediate_size=8192, num_hidden_layers=48,
        num_attention_heads=40,
    )  # fmt: skip
    shape = Shape.read(config, kv_default=8, head_dim=128)
    rotary = rotary_layers(config, shape.layers)
    step = config.integer("interleave_moe_layer_step", 1)
    listed = set(config.integers("moe_layers")) or set(range(step - 1, shape.layers, step))
    build = _Llama4(config, shape)
    kinds = [(has_rotary, index in listed) for index, has_rotary in enumerate(rotary)]
    return decoder(config, shape, build_unique_blocks(kinds, build.block), max_positions=4096 * 32)


class _Llama4:
    """Builds the blocks of one model."""

    def __init__(self, config: ConfigReader, shape: Shape) -> None:
        self.config, self.shape = config, shape
        self.chunk = config.optional_integer("attention_chunk_size")
        if "attention_chunk_size" not in config.values:
            self.chunk = 8192
        self.has_norms = config.boolean("use_qk_norm", True)
        self.has_bias = config.boolean("attention_bias", False)

    def block(self, kind: tuple[bool, bool]) -> Block:
        """The block of a layer, with rotary positions or not, with experts or not."""
        has_rotary, is_routed = kind
        root, shape = "feed_forward", self.shape
        shared = tuple(f"{root}.shared_expert.{name}_proj" for name in ("gate", "up", "down"))
        dense = tuple(f"{root}.{name}_proj" for name in ("gate", "up", "down"))
        mlp = self._routed(root) if is_routed else self._dense(root)
        order = (*REGISTRATION[:4], f"{root}.experts", f"{root}.router", *shared, *dense, *REGISTRATION[9:])
        core = self._attention(has_rotary=has_rotary)
        return pre_norm_block("Llama4TextDecoderLayer", shape, core, mlp, registration=order)

    def _attention(self, *, has_rotary: bool) -> list[Module]:
        shape = self.shape
        modules = attention_modules(shape, qkv_bias=self.has_bias, o_bias=self.has_bias, rotary=has_rotary)
        attention_layer: list[Module] = []
        for module in modules:
            if module.role is Role.MIXER:
                chunk = self.chunk if has_rotary else None
                module = replace_op_fields(module, chunk=chunk, upcasts_softmax=False)
                if has_rotary and self.has_norms:
                    attention_layer += [self._norm("q", shape.heads), self._norm("k", shape.kv_heads)]
            attention_layer.append(module)
        return attention_layer

    def _norm(self, name: str, heads: int) -> Module:
        """A norm of each head without weights. The model runs it after the rotary embedding."""
        return Module(f"self_attn.qk_norm.{name}", Norm(heads * self.shape.head_dim, "l2"))

    def _dense(self, root: str) -> list[Module]:
        ffn = self.config.integer("intermediate_size_mlp", 16384)
        return gated_mlp(root, self.shape.hidden, ffn, self.shape.act)

    def _routed(self, root: str) -> list[Module]:
        config, shape = self.config, self.shape
        num_experts, top_k = config.integer("num_local_experts", 16), config.integer("num_experts_per_tok", 1)
        choice = Router(0, 0, 0, "sigmoid", normalizes=False)
        return [
            *routed_mlp(
                config, shape.hidden, shape.ffn, num_experts, top_k, choice, gate=f"{root}.router",
                is_transposed=True,
            ),
            *gated_mlp(f"{root}.shared_expert", shape.hidden, shape.ffn, shape.act),
        ]  # fmt: skip


def longcat_flash(config: ConfigReader) -> ModelSpec:
    """LongCat-Flash has two branches of latent attention and two MLPs in each block. Its experts read what
    the first MLP reads, and their output is added behind the second.

    Some of the experts that the router chooses among give back their input, without a product. With equal
    loads, the others have `moe_topk` times their part of all. transformers' class has weights of gate and up
    for those too, which the published checkpoint has not.
    """
    config = config.add_defaults(
        vocab_size=131_072, hidden_size=6144, ffn_hidden_size=12_288, num_layers=28, num_attention_heads=64,
    )  # fmt: skip
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    ffn, act = config.integer("ffn_hidden_size"), config.activation("hidden_act", "silu")
    count, zeros = config.integer("n_routed_experts", 512), config.integer("zero_expert_num", 256, minimum=0)
    top_k = config.integer("moe_topk", 12)
    width = config.integer("expert_ffn_hidden_size", 2048)
    choice = Router(0, 0, 0, in_fp32=True, has_choice_bias=True, normalizes=False)
    router, experts = routed_mlp(
        config, hidden, width, count + zeros, top_k, choice, gate="mlp.router.classifier", act=act,
        bias=config.boolean("router_bias", False),
    )  # fmt: skip
    work = Experts(count, max(1, round(top_k * count / (count + zeros))), hidden, width, act)
    stacked = tuple(
        Parameter(parameter.name, (count, *parameter.shape[1:]))
        for parameter in experts.parameters
        if not parameter.name.endswith("bias")
    )
    attention = latent_attention(config, hidden, heads, config.fraction("attention_dropout", 0.0))
    halves: list[list[Module]] = []
    for half in "01":
        branches = [
            rms_norm(f"input_layernorm.{half}", hidden),
            *rename_modules(attention, "self_attn", f"self_attn.{half}"),
            residual(f"self_attn.{half}.residual", hidden),
            rms_norm(f"post_attention_layernorm.{half}", hidden),
            *gated_mlp(f"mlps.{half}", hidden, ffn, act),
            residual(f"mlps.{half}.residual", hidden),
        ]
        halves.append(branches)
    first, second = halves
    branch = [router, Module("mlp.experts", work, stacked)]
    position = next(index for index, module in enumerate(first) if module.name.startswith("mlps."))
    first[position] = replace(first[position], shares_input=True)
    modules = (*first[:position], *branch, *first[position:], *second, residual("mlp.residual", hidden))
    names = [module.name for module in modules if module.parameters]
    order = ("mlp.experts", "mlp.router", "self_attn", "mlps", "input_layernorm", "post_attention_layernorm")
    registered = (name for prefix in order for name in names if f"{name}.".startswith(f"{prefix}."))
    block = set_registration(Block("LongcatFlashDecoderLayer", modules), *registered)
    return language_model(
        config, hidden, [word_embedding(config, hidden, "model.embed_tokens")],
        [block] * config.num_blocks("num_layers"), config.integer("max_position_embeddings", 131_072),
        root="model.layers", final=[rms_norm("model.norm", hidden)],
    )  # fmt: skip
