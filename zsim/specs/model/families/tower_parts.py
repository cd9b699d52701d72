"""Parts that vision towers are built from: their blocks, patch embeddings and projectors.

Products stay in 16 bits under fp8 training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from zsim.operations.image_features import ImageFeatures
from zsim.operations.operation import Parameter
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import (
    activation,
    attention,
    layer_norm,
    linear,
    plain_mlp,
    replace_op_fields,
    residual,
    separate_qkv,
    set_registration,
)
from zsim.specs.model.spec import Block, Linear, Module
from zsim.specs.strategy.images import SampleRows

_CHANNELS = 3


def on_rows(module: Module, rows: SampleRows) -> Module:
    """The module on rows of images, in 16 bits."""
    return replace(module, op_spec=module.op_spec.keep_in_bf16(), sample_rows=rows)


def tower_block(
    kind: str, modules: Sequence[Module], rows: SampleRows, others: SampleRows = "patches"
) -> Block:
    """A block whose attention sees `rows` that see each other, and whose `others` see all rows."""
    return Block(
        kind, tuple(on_rows(module, rows if module.name.endswith(".core") else others) for module in modules)
    )


def tower_core(
    name: str,
    heads: int,
    hidden: int,
    *,
    rotary: bool = True,
    splits_fused_qkv: bool = False,
    groups: int | None = None,
    head_dim: int | None = None,
) -> Module:
    """Attention that sees all patches, by default with `hidden / heads` features a head and no groups."""
    core = attention(
        name, heads, groups or heads, head_dim or hidden // heads, rotary=rotary,
        splits_fused_qkv=splits_fused_qkv,
    )  # fmt: skip
    return replace_op_fields(core, is_causal=False)


def clip_block(
    config: ConfigReader,
    kind: str,
    hidden: int,
    inner: int,
    act: str,
    *,
    heads: int,
    rotary: bool = False,
    norms: tuple[str, str] = ("layer_norm1", "layer_norm2"),
    registers_norms: Literal["behind", "before", "last"] = "behind",
    products: Sequence[str] = ("k_proj", "v_proj", "q_proj", "out_proj"),
    scales: Sequence[str] = (),
    scale_width: int = 0,
    bias: bool = True,
) -> Block:
    """CLIP's block: norms before attention and a plain MLP, with biases everywhere.

    `products` are those of attention as they are registered, the output's last. Norms are registered behind
    what reads them, before it, or last. With `scales` branches are multiplied by vectors of these names.
    Without `bias` attention has none.
    """
    branches = [[learned_scale(name, hidden, scale_width)] for name in scales] or [[], []]
    modules = [
        layer_norm(norms[0], hidden),
        *separate_qkv("self_attn", hidden, bias=bias),
        tower_core("self_attn.core", config.integer("num_attention_heads", heads), hidden, rotary=rotary),
        linear(f"self_attn.{products[-1]}", hidden, hidden, bias=bias),
        *branches[0],
        residual("self_attn.residual", hidden),
        layer_norm(norms[1], hidden),
        *plain_mlp(("mlp.fc1", "mlp.activation_fn", "mlp.fc2"), hidden, inner, act),
        *branches[1],
        residual("mlp.residual", hidden),
    ]
    attention, mlp = [f"self_attn.{name}" for name in products], ["mlp.fc1", "mlp.fc2"]
    orders = {
        "behind": (*attention, norms[0], *mlp, norms[1]),
        "before": (norms[0], *attention, norms[1], *mlp),
        "last": (*attention, *mlp, *norms),
    }
    return set_registration(tower_block(kind, modules, "patches"), *scales, *orders[registers_norms])


def patch_embedding(
    name: str, kernel: tuple[int, ...], hidden: int, *, bias: bool = True, is_flat: bool = False
) -> Module:
    """A convolution whose windows do not overlap: a product of each patch. Pixels need no gradient."""
    features = _CHANNELS
    for side in kernel:
        features *= side
    shape = (hidden, features) if is_flat else (hidden, _CHANNELS, *kernel)
    parameters = [Parameter("weight", shape)]
    if bias:
        parameters.append(Parameter("bias", (hidden,)))
    return on_rows(Module(name, Linear(features, hidden), tuple(parameters), input_gradient=False), "patches")


def clipped_linear(
    name: str, inputs: int, outputs: int, *, is_clipped: bool, shares_input: bool = False
) -> list[Module]:
    """A product of Gemma 4's towers, whose input and output are clamped where the file says so."""
    module = linear(f"{name}.linear", inputs, outputs, shares_input=shares_input and not is_clipped)
    if not is_clipped:
        return [module]
    first, last = (
        activation(f"{name}.clamp_{which}", features, "clamp")
        for which, features in (("input", inputs), ("output", outputs))
    )
    return [first, module, last]


def product_names(root: str) -> tuple[str, str, str]:
    """The names that most projectors give two products and the activation between them."""
    return f"{root}linear_1", f"{root}act", f"{root}linear_2"


def two_products(
    names: tuple[str, str, str],
    inputs: int,
    inner: int,
    outputs: int,
    *,
    act: str = "gelu",
    bias: bool = True,
) -> list[Module]:
    return [
        linear(names[0], inputs, inner, bias=bias),
        activation(names[1], inner, act),
        linear(names[2], inner, outputs, bias=bias),
    ]


def projector_modules(modules: Sequence[Module], width: int, on_patches: Sequence[str]) -> tuple[Module, ...]:
    """The projector's modules, all but those `on_patches` on merged rows, and the scatter among the
    tokens.
    """
    projected = [on_rows(module, "patches" if module.name in on_patches else "merged") for module in modules]
    return (*projected, Module("image_features", ImageFeatures(width)))


def learned_scale(name: str, width: int, numel: int = 0) -> Module:
    """A branch times a learned vector, or so many numbers, which is a parameter of the block."""
    scale = activation(name, width, "learned_scale")
    return replace(scale, parameters=(Parameter(name, (numel or width,)),), parameter_owner="")


def check_feature_layer(config: ConfigReader) -> None:
    if not isinstance(layer := config.values.get("vision_feature_layer", -1), int):
        raise config.error(f"'vision_feature_layer' is {layer!r}; expected one layer")
