"""Layers of mixers other than attention, as families' blocks have them: products, convolution, recurrence,
norm, product.

Names and shapes as in transformers 5.24.
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.operations.mixers.convolution import Convolution
from zsim.operations.mixers.gated_delta import GatedDelta
from zsim.operations.mixers.gated_norm import GatedNorm
from zsim.operations.mixers.kimi_delta import KimiDelta
from zsim.operations.mixers.mamba2 import StateSpace
from zsim.operations.operation import Role
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import activation, linear, replace_op_fields
from zsim.specs.model.families.llama import Shape, attention_modules
from zsim.specs.model.spec import Module, Parameter

LINEAR, FULL = "linear_attention", "full_attention"


def layer_kinds(config: ConfigReader, layers: int, default: list[str], *accepted: str) -> list[str]:
    """The kind of each layer: `layer_types` where the file has it, else `default`.

    Raises InputError for another number of layers, and for kinds that are none of `accepted`.
    """
    kinds = list(config.strings("layer_types")) or default
    if len(kinds) != layers:
        raise config.error(
            f"'layer_types' names {len(kinds)} layers; expected {layers}, the number of layers"
        )
    unknown = next((kind for kind in kinds if kind not in accepted), None)
    if unknown is not None:
        raise config.error(f"'layer_types' has '{unknown}'; expected {', '.join(accepted)}")
    return kinds


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The dimensions of a layer of Gated DeltaNet."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4

    @classmethod
    def read(
        cls,
        config: ConfigReader,
        key_heads: int = 16,
        value_heads: int = 32,
        dims: tuple[int, int] = (128, 128),
    ) -> DeltaShape:
        """The dimensions in a file, with the family's defaults."""
        shape = cls(
            config.integer("linear_num_key_heads", key_heads),
            config.integer("linear_num_value_heads", value_heads),
            config.integer("linear_key_head_dim", dims[0]),
            config.integer("linear_value_head_dim", dims[1]),
            config.integer("linear_conv_kernel_dim", 4),
        )
        if shape.value_heads % shape.key_heads:
            raise config.error(
                f"'linear_num_value_heads' is {shape.value_heads}; expected a multiple of the "
                f"{shape.key_heads} key heads"
            )
        return shape

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels that are convolved: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def rule(self) -> GatedDelta:
        return GatedDelta(self.key_heads, self.value_heads, self.key_dim, self.value_dim)


def convolution(
    name: str, channels: int, taps: int, *, bias: bool = False, is_recomputed: bool = False
) -> Module:
    """`nn.Conv1d` with a filter per channel."""
    parameters = [Parameter("weight", (channels, 1, taps))]
    if bias:
        parameters.append(Parameter("bias", (channels,)))
    return Module(name, Convolution(channels, taps, is_recomputed), tuple(parameters))


def gated_norm(
    name: str, width: int, weights: int, *, is_gated: bool = True, is_in_scan: bool = False
) -> Module:
    """A norm over parts of `width` channels, with `weights` weights, and its gate."""
    return Module(name, GatedNorm(width, is_gated, is_in_scan), (Parameter("weight", (weights,)),))


def delta_layer(hidden: int, shape: DeltaShape, *, is_fused: bool) -> list[Module]:
    """Gated DeltaNet of Qwen, whose projections are two or, not `is_fused`, four products of one input."""
    root, heads = "linear_attn", shape.value_heads
    products = [("in_proj_qkvz", shape.channels + shape.values), ("in_proj_ba", 2 * heads)]
    if not is_fused:
        products = [
            ("in_proj_qkv", shape.channels), ("in_proj_z", shape.values),
            ("in_proj_b", heads), ("in_proj_a", heads),
        ]  # fmt: skip
    states = (Parameter("dt_bias", (heads,)), Parameter("A_log", (heads,)))
    return [
        *(
            linear(f"{root}.{name}", hidden, width, shares_input=number > 0)
            for number, (name, width) in enumerate(products)
        ),
        convolution(f"{root}.conv1d", shape.channels, shape.taps),
        Module(root, shape.rule, states),
        gated_norm(f"{root}.norm", shape.values, shape.value_dim),
        linear(f"{root}.out_proj", shape.values, hidden),
    ]


def separate_delta_layer(hidden: int, shape: DeltaShape) -> list[Module]:
    """Gated DeltaNet of Olmo Hybrid, with a product each for queries, keys, values, gates and decays."""
    root, heads = "linear_attn", shape.value_heads
    widths = {
        "q": shape.keys, "k": shape.keys, "v": shape.values, "a": heads, "b": heads, "g": shape.values,
    }  # fmt: skip
    return [
        *(
            linear(f"{root}.{name}_proj", hidden, width, shares_input=name != "q")
            for name, width in widths.items()
        ),
        convolution(f"{root}.conv1d", shape.channels, shape.taps),
        Module(root, shape.rule, (Parameter("A_log", (heads,)), Parameter("dt_bias", (heads,)))),
        gated_norm(f"{root}.o_norm", shape.values, shape.value_dim),
        linear(f"{root}.o_proj", shape.values, hidden),
    ]


def state_space_layer(
    root: str,
    hidden: int,
    work: StateSpace,
    *,
    taps: int = 4,
    conv_bias: bool = True,
    bias: bool = False,
    out_bias: bool | None = None,
    has_norm: bool = True,
) -> list[Module]:
    """Mamba-2: one product for gate, inputs, B, C and time steps, the scan, its norm, and a product."""
    width, groups = work.output_elements, work.num_groups * work.state
    states = tuple(Parameter(name, (work.num_heads,)) for name in ("dt_bias", "A_log", "D"))
    norm = [gated_norm(f"{root}.norm", width, width, is_gated=False, is_in_scan=True)] if has_norm else []
    return [
        linear(f"{root}.in_proj", hidden, work.input_elements, bias=bias),
        convolution(f"{root}.conv1d", width + 2 * groups, taps, bias=conv_bias, is_recomputed=True),
        Module(root, work, states),
        *norm,
        linear(f"{root}.out_proj", width, hidden, bias=bias if out_bias is None else out_bias),
    ]


def state_space(config: ConfigReader, hidden: int, width: int = 0) -> StateSpace:
    """Mamba-2 by the keys that Bamba brought (`mamba_n_heads` ...), of `width` channels, by default
    `mamba_expand` times the model's.
    """
    heads = config.integer("mamba_n_heads", 128)
    width = width or config.integer("mamba_expand", 2) * hidden
    if width % heads:
        raise config.error(f"'mamba_n_heads' is {heads}; expected a divisor of the {width:,} channels")
    head_dim = width // heads
    stated = config.values.get("mamba_d_head", "auto")
    if stated not in ("auto", None, head_dim):
        raise config.error(f"'mamba_d_head' is {stated!r}; expected {head_dim}, {width:,} / {heads}")
    return StateSpace(
        heads, head_dim, config.integer("mamba_d_state", 256), config.integer("mamba_n_groups", 1),
        config.integer("mamba_chunk_size", 256),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class KimiShape:
    """The dimensions of a layer of Kimi delta attention."""

    heads: int
    head_dim: int
    taps: int = 4
    has_low_rank_gates: bool = True
    """The decay and the output's gate come from `head_dim` numbers per token."""


def kimi_layer(hidden: int, shape: KimiShape) -> list[Module]:
    """Kimi delta attention, and Ling's with products of full rank."""
    root, width = "self_attn", shape.heads * shape.head_dim
    modules = [linear(f"{root}.{name}_proj", hidden, width, shares_input=name != "q") for name in "qkv"]
    decay: tuple[int, ...] = (1, 1, shape.heads, 1)
    states = [Parameter("dt_bias", (width,)), Parameter("A_log", decay)]
    if not shape.has_low_rank_gates:
        states = [Parameter("A_log", (shape.heads,)), Parameter("dt_bias", (width,))]
    gates: list[Module] = []
    if shape.has_low_rank_gates:
        for first, second in (("forget_gate.f_a", "forget_gate.f_b"), ("g_a", "g_b")):
            gates += [
                linear(f"{root}.{first}_proj", hidden, shape.head_dim, shares_input=True),
                linear(f"{root}.{second}_proj", shape.head_dim, width),
            ]
    else:
        gates += [
            linear(f"{root}.{name}_proj", hidden, width, shares_input=True) for name in ("forget_gate.f", "g")
        ]
    return [
        *modules,
        linear(f"{root}.b_proj", hidden, shape.heads, shares_input=True),
        *gates,
        convolution(f"{root}.conv1d", 3 * width, shape.taps),
        Module(f"{root}.forget_gate", KimiDelta(shape.heads, shape.head_dim), tuple(states)),
        gated_norm(f"{root}.o_norm", width, shape.head_dim),
        linear(f"{root}.o_proj", width, hidden),
    ]


def kimi_registration(shape: KimiShape) -> tuple[str, ...]:
    """The order of its modules in `named_parameters()`."""
    names: tuple[str, ...] = ("forget_gate.f_proj", "b_proj", "o_norm", "o_proj", "g_proj")
    if shape.has_low_rank_gates:
        names = (
            "forget_gate.f_a_proj", "forget_gate.f_b_proj", "b_proj", "g_a_proj", "g_b_proj", "o_norm",
            "o_proj",
        )  # fmt: skip
    first = ("q_proj", "k_proj", "v_proj", "conv1d", "forget_gate")
    return tuple(f"self_attn.{name}" for name in (*first, *names))


def gated_attention(
    shape: Shape, *, bias: bool = False, norm: str = "rms", rotary_width: int | None = None
) -> list[Module]:
    """Attention whose output is multiplied by the sigmoid of a gate, which `q_proj` makes beside queries."""
    queries = shape.heads * shape.head_dim
    modules: list[Module] = []
    for module in attention_modules(shape, qkv_bias=bias, o_bias=bias, qk_norm="each head", norm=norm):
        if module.name == "self_attn.q_proj":
            module = linear(module.name, shape.hidden, 2 * queries, bias=bias)
        elif module.role is Role.MIXER:
            module = replace_op_fields(module, rotary_width=rotary_width)
        modules.append(module)
        if module.role is Role.MIXER:
            modules.append(activation("self_attn.gate", queries, "sigmoid", gated=True))
    return modules
