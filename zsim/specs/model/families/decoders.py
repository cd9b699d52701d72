"""Decoders that are a table of facts: attention, an MLP or experts, and norms around them.

A family is a table of `presets/decoders.toml`, whose keys are the fields of `Decoder` and `DecoderExperts`.
Keys of its `config.json` stand for what the file says of a bias or a count.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

from zsim.files import PRESETS
from zsim.operations.operation import Operation
from zsim.operations.router import Router, ScoreFunction
from zsim.specs.model.config_reader import ConfigReader
from zsim.specs.model.families.builders import (
    activation,
    embedding,
    fused_mlp,
    language_model,
    layer_norm,
    linear,
    plain_mlp,
    rename_modules,
    replace_op_fields,
    residual,
    rms_norm,
    set_registration,
)
from zsim.specs.model.families.latent import count_prediction_modules, latent_attention
from zsim.specs.model.families.llama import (
    QkNorm,
    Shape,
    attention_modules,
    build_unique_blocks,
    gated_mlp,
    layer_windows,
    partial_rotary,
    rotary_layers,
)
from zsim.specs.model.families.moe import dense_layers, routed_mlp
from zsim.specs.model.spec import Block, ModelSpec, Module, Norm, Parameter

_PARTS = ("attention", "mlp", "norms")


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DecoderExperts(_Table):
    """The routed experts of a family."""

    count: tuple[str, int]
    """The key of their number, and its default. 0 without one."""
    top_k: tuple[str, int] = ("num_experts_per_tok", 0)
    width: tuple[str, int]
    gate: str = "mlp.gate"
    """The name of the router's product."""
    score: ScoreFunction = "softmax"
    score_key: str = ""
    """The key of its name."""
    normalizes: bool | str = True
    """Whether the chosen scores are divided by their sum, or the key that says it."""
    in_fp32: bool = False
    has_groups: bool = False
    choice_bias: str = ""
    """A bias of the choice: "buffer", or its full name as a parameter without a gradient."""
    choice_bias_shape: tuple[int, ...] = ()
    """Dimensions of that parameter before the number of experts."""
    shared: str = ""
    """The name of the shared experts' MLP."""
    shared_gate: str = ""
    """The name of a product that gates the shared experts, which then run first."""
    shared_names: tuple[str, str, str] | None = None
    """Its modules, if gate and up are one product. None for three products."""
    num_shared: tuple[str, int] | None = None
    """The key of their number. None for one MLP."""
    min_shared: int = 0
    shared_width: tuple[str, int] | None = None
    """The key of the shared MLP's width, where it is not the routed experts'."""
    norm: str = ""
    """The name of a norm over the sum of what the experts make."""
    dense_width: str = ""
    """The key of the width of MLPs in layers without experts. Empty for `intermediate_size`."""
    name: str = "mlp.experts"
    registers: tuple[str, ...] = ("experts", "gate", "shared", "bias")
    """The order in which the layer registers its parts."""
    num_dense: tuple[str, int] = ("first_k_dense_replace", 0)
    """The key of the number of leading dense layers, where no `mlp_layer_types` say it."""
    listed: str = ""
    """The key of a list of the layers with experts, or of a text with commas."""
    dense: str = ""
    """The key of a list of layers without experts."""
    step: str = ""
    """The key of an interval, of which the last layer has experts."""
    last: str = ""
    """The key of the number of the last layer with experts. -1 for the model's last."""


class WindowedLayers(_Table):
    """The traits of attention in layers with a window, where they are not those of the others."""

    heads: tuple[str, ...] = ()
    """Keys of their number of heads, of which one is in an object of the file: "object.key"."""
    kv_factor: int = 1
    """Their key/value heads over those of other layers."""
    has_sinks: bool = False
    """Each head has a learned sink."""


class Decoder(_Table):
    """The facts of a family."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    block: str
    """The class of its blocks."""
    max_positions: int
    source: str
    """Where the facts were read."""
    defaults: dict[str, Any] = {}
    """What its configuration class takes where the file says nothing."""
    aliases: dict[str, list[str]] = {}
    """Other spellings of keys."""
    is_latent: bool = False
    """Attention is multi-head latent attention (`latent.py`)."""
    kv_heads: int | None = None
    head_dim: int = 0
    """The width of a head's default. 0 divides the model's width by its heads."""
    value_dim: int = 0
    """The default width of a value's head (`v_head_dim`). 0 for that of a key's, or in latent attention for
    the model's width by its heads.
    """
    act: str = "silu"
    act_key: str = "hidden_act"
    act_parameters: tuple[str, ...] = ()
    """Names of numbers that the activation learns."""
    is_tied: bool = False
    norm: str = "rms"
    """The kind of norm. "layer" has a bias too, "plain_layer" and "l2" no weight."""
    rms_key: str = ""
    """The key with which norms are RMSNorms, whatever their kind without it."""
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    """Names of the norms before and after attention, before and after the MLP. Empty for none."""
    final_norm: str = "model.norm"
    norms_embeddings: bool = False
    """The final norm, which has no weight, is before the first block too."""
    registers_norms: tuple[str, ...] = ()
    """The order in which they are registered, where that is not the order in which they run."""
    post_norm_key: str = ""
    """The key that leaves out the norms after attention and MLP where it is false."""
    is_parallel: bool = False
    """Attention and MLP read one norm's output."""
    qkv_bias: bool | str = False
    """Whether projections have a bias, or the key that says it."""
    qkv_name: str = ""
    """The name of one product to queries, keys and values. Empty for three."""
    out_name: str = "self_attn.o_proj"
    out_bias: bool | str = False
    is_square: bool = False
    """The product behind attention has as many inputs as outputs."""
    mlp_bias: bool | str = False
    head_bias: bool | str = False
    qk_norm: QkNorm = "none"
    qk_norm_key: str = ""
    """The key without which, or with false, there are no such norms. Empty for norms always."""
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    rotary_fraction: float = 1.0
    """The part of a head that is rotated, by default."""
    rotary_dim: int = 0
    """The features of a head that are rotated (`rotary_dim`), by default. 0 for the fraction."""
    softcaps: tuple[bool, bool] | None = None
    """Whether scores and logits are capped where the file says nothing of it. None for never."""
    has_output_gate: bool = False
    """Whether each feature of attention's output is multiplied by a gate."""
    gates_heads: bool = False
    """All features of a head have one gate."""
    gate_name: str = "gate_proj"
    has_gate_bias: bool = False
    """The gates of a head's features have a bias of that head (`gate_bias`)."""
    heads_key: str = ""
    """The key of a list of the layers' numbers of heads."""
    has_sinks: bool = False
    """Each head has a learned sink in all layers."""
    window: int = 0
    """The window's default. 0 for none unless the file says one."""
    window_interval: int = 0
    """Without `layer_types` every so many-th layer is without a window. 0: none has one. 1: all have it."""
    window_key: str = ""
    """The key without which, or with false, there are no windows."""
    first_window: tuple[str, int] | None = None
    """The key of the first layer with a window, and its default."""
    bidirectional_key: str = ""
    """The key of attention without a mask, whose window is half on each side."""
    interval_key: str = ""
    global_offset: int = -1
    """The first layer of an interval is global (0), or the last (-1)."""
    global_layers: tuple[int, ...] = ()
    """Numbers of further layers without a window, the negative ones from the last."""
    window_offset_key: str = ""
    """The key of a number of first layers, all without a window, behind which the intervals begin."""
    windowed: WindowedLayers = WindowedLayers()
    rotates: Literal["all", "windowed", "listed"] = "all"
    """Where a model has windows, only layers with one may have rotary positions. "listed": those that
    `no_rope_layers` says, and the others have windows.
    """
    mlp: Literal["gated", "plain", "fused"] = "gated"
    """Gate and up, one product and an activation, or gate and up in one product."""
    mlp_names: tuple[str, str, str] = ("mlp.up_proj", "mlp.act_fn", "mlp.down_proj")
    dropout: str = ""
    """The key of the dropout before the adds."""
    scales: bool = False
    """Branches are multiplied by a number."""
    scales_logits: bool = False
    registers: tuple[str, ...] = _PARTS
    """The order in which the block registers its parts."""
    experts: DecoderExperts | None = None
    expects: dict[str, Any] = {}
    """Values that keys have, if the file has them."""
    prediction: str = ""
    """The key of the number of modules for multi-token prediction."""


@cache
def _texts() -> Mapping[str, str]:
    """The part of the file of each family. To parse all takes longer than all else that a model needs."""
    texts: dict[str, str] = {}
    for text in re.split(r"^(?=\[)", (PRESETS / "decoders.toml").read_text(encoding="utf-8"), flags=re.M)[1:]:
        name = re.split(r"[].]", text[1:], maxsplit=1)[0]
        texts[name] = texts.get(name, "") + text
    return texts


def names() -> Collection[str]:
    """The `model_type` of each family of the table."""
    return _texts().keys()


@cache
def decoder(name: str) -> Decoder:
    """The family of a `model_type` of the table."""
    return Decoder.model_validate(_whole_table(name))


def _whole_table(name: str) -> dict[str, Any]:
    """A family's table over that of the family which it extends."""
    table = tomllib.loads(_texts()[name])[name]
    base = _whole_table(table.pop("extends")) if "extends" in table else {}
    experts = {**base.get("experts", {}), **table.get("experts", {})}
    return {**base, **table, **({"experts": experts} if experts else {})}


def builder_of(facts: Decoder) -> Callable[[ConfigReader], ModelSpec]:
    """A function that builds the model of a `config.json` by the facts of its family."""
    return lambda config: _Builder(facts, config).model()


def _trim_lists(config: ConfigReader, prediction: str) -> ConfigReader:
    """The file, whose lists by layer may end with entries of the layers for multi-token prediction."""
    if not prediction:
        return config
    layers, extra = config.num_blocks("num_hidden_layers"), config.integer(prediction, 0, minimum=0)
    lists = {
        key: list(config.strings(key)[:layers])
        for key in ("layer_types", "mlp_layer_types")
        if extra and len(config.strings(key)) == layers + extra
    }
    return config.override(**lists)


class _Builder:
    """Builds one model."""

    def __init__(self, facts: Decoder, config: ConfigReader) -> None:
        self.facts, self.config = facts, _trim_lists(config.add_defaults(**facts.defaults), facts.prediction)
        head_dim = (facts.value_dim if facts.is_latent else facts.head_dim) or None
        self.shape = Shape.read(
            self.config, kv_default=facts.kv_heads, head_dim=head_dim, act=facts.act, act_key=facts.act_key
        )
        for key, expected in facts.expects.items():
            allowed = [None, False] if expected is False else [expected]
            if (value := config.values.get(key, expected)) not in allowed:
                words = " or ".join(json.dumps(entry) for entry in allowed)
                raise config.error(f"'{key}' is {json.dumps(value)}; expected {words}")
        self.dropout = self.config.fraction(facts.dropout, 0.0) if facts.dropout else 0.0

    def model(self) -> ModelSpec:
        config, facts, shape = self.config, self.facts, self.shape
        windows, dense = self._windows(), self._dense_layers()
        heads = (config.integers(facts.heads_key) if facts.heads_key else ()) or [shape.heads] * shape.layers
        if len(heads) != shape.layers:
            raise config.error(f"'{facts.heads_key}' has {len(heads)} numbers; expected {shape.layers}")
        rotates_all = facts.rotates == "all" or self._window is None
        rotary = [rotates_all or window is not None for window in windows]
        if facts.rotates == "listed":
            rotary = rotary_layers(config, shape.layers)
        is_dense = [index in dense for index in range(shape.layers)]
        kinds = list(zip(windows, is_dense, heads, rotary, strict=True))
        model = language_model(
            config,
            shape.hidden,
            [
                embedding("model.embed_tokens", shape.vocab, shape.hidden),
                *([self._norm("model.embed_tokens.norm")] if facts.norms_embeddings else []),
            ],
            build_unique_blocks(kinds, self._block),
            config.integer("max_position_embeddings", facts.max_positions),
            root="model.layers",
            final=[self._norm(facts.final_norm)],
            is_tied=facts.is_tied,
            head_bias=self._says(facts.head_bias),
            softcaps=self._caps("final_logit_softcapping", 1),
            scales=facts.scales_logits,
        )
        if facts.prediction:
            return count_prediction_modules(config, model, model.blocks[-1], facts.prediction)
        return model

    def _says(self, fact: bool | str) -> bool:
        return self.config.boolean(fact, False) if isinstance(fact, str) and fact else bool(fact)

    def _caps(self, key: str, which: int) -> bool:
        """Whether the file caps scores (0) or logits (1)."""
        caps = self.facts.softcaps
        return caps is not None and self.config.values.get(key, caps[which] or None) is not None

    def _optional_number(self, path: str) -> int | None:
        owner, _, key = path.rpartition(".")
        return (self.config.nested(owner) if owner else self.config).optional_integer(key)

    def _number(self, fact: tuple[str, int], minimum: int = 1) -> int:
        """A count of the file, which may list the same one for every layer."""
        key, default = fact
        value = self.config.find(key)[1]
        if isinstance(value, list) and len(set(map(repr, value))) == 1 and type(value[0]) is int:
            return value[0]
        return self.config.integer(key, default or None, minimum=minimum)

    @property
    def _window(self) -> int | None:
        """The window of layers that have one. None where no layer has."""
        facts, config = self.facts, self.config
        if facts.window_key and not config.boolean(facts.window_key, False):
            return None
        window = config.optional_integer("sliding_window")
        if facts.window and "sliding_window" not in config.values:
            window = facts.window
        return window // 2 if window and self._is_bidirectional else window

    @property
    def _is_bidirectional(self) -> bool:
        key = self.facts.bidirectional_key
        return bool(key) and self.config.boolean(key, False)

    def _windows(self) -> list[int | None]:
        facts, config, layers = self.facts, self.config, self.shape.layers
        window = self._window
        interval = facts.window_interval
        if facts.interval_key:
            pattern = config.values.get(facts.interval_key)
            if isinstance(pattern, str):  # a letter for each layer of an interval
                interval = len(pattern)
            else:
                interval = config.integer(facts.interval_key, interval)
        last = facts.global_offset % interval if interval > 1 else -1
        first = config.integer(facts.window_offset_key, 0, minimum=0) if facts.window_offset_key else 0
        local = [
            window is not None and index >= first and interval > 0 and (index - first) % interval != last
            for index in range(layers)
        ]
        for index in facts.global_layers:
            local[index] = False
        if facts.first_window is not None and window is not None:
            first = config.integer(*facts.first_window, minimum=0)
            local = [index >= first for index in range(layers)]
        elif facts.window_key and window is None:
            return [None] * layers
        elif facts.rotates == "listed":
            local = [not has_rotary for has_rotary in rotary_layers(config, layers)]
        return layer_windows(config, layers, window, local)

    def _dense_layers(self) -> frozenset[int]:
        """Numbers of the layers without experts."""
        layers, experts = self.shape.layers, self.facts.experts
        if experts is None:
            return frozenset(range(layers))
        if experts.listed and (listed := self.config.values.get(experts.listed)) is not None:
            numbers = str(listed).strip("[]").split(",")
            routed = {int(number) for number in numbers if number.strip().isdecimal()}
            return frozenset(range(layers)) - routed
        if experts.dense:
            listed_dense = set(self.config.integers(experts.dense))
            step = self.config.integer(experts.step, 1)
            return frozenset(index for index in range(layers) if index in listed_dense or (index + 1) % step)
        first = self.config.integer(*experts.num_dense, minimum=0)
        last = self.config.integer(experts.last, -1, minimum=-1) if experts.last else -1
        return dense_layers(self.config, layers, first, layers if last == -1 else last + 1)

    def _block(self, kind: tuple[int | None, bool, int, bool]) -> Block:
        window, is_dense, heads, rotary = kind
        facts, hidden = self.facts, self.shape.hidden
        attention = self._attention(window, heads, rotary=rotary)
        mlp = self._mlp() if is_dense or facts.experts is None else self._experts(facts.experts)
        if facts.is_parallel:
            mlp[0] = replace(mlp[0], shares_input=True)
        names = facts.norms
        if facts.post_norm_key and not self.config.boolean(facts.post_norm_key, True):
            names = (names[0], "", names[2], "")
        norms = [[self._norm(name)] if name else [] for name in names]
        modules = (
            *norms[0], *attention, *norms[1],
            residual("self_attn.residual", hidden, self.dropout, scales=facts.scales),
            *norms[2], *mlp, *norms[3],
            residual("mlp.residual", hidden, self.dropout, scales=facts.scales),
        )  # fmt: skip
        order = {
            "attention": self._registered_attention(attention),
            "mlp": self._registered_mlp(mlp),
            "norms": [
                name
                for name in facts.registers_norms or names
                if name in names and self._norm(name).parameters
            ],
        }
        registered = (name for part in facts.registers for name in order[part])
        return set_registration(Block(facts.block, modules), *registered)

    def _registered_attention(self, attention: Sequence[Module]) -> list[str]:
        """Sinks, products of queries, keys, values and output, then norms and a gate. Latent attention's
        modules as they run.
        """
        names = [module.name for module in attention if module.parameters]
        late = () if self.facts.is_latent else ("norm", self.facts.gate_name, "qkv_proj")
        return sorted(names, key=lambda name: (name != "self_attn", name.endswith(late)))

    def _registered_mlp(self, mlp: Sequence[Module]) -> list[str]:
        """An MLP as it runs, its activation last, or the parts of a layer with experts in their order."""
        names, experts = [module.name for module in mlp if module.parameters], self.facts.experts
        if experts is None or experts.name not in names:
            return sorted(names, key=lambda name: name == self.facts.mlp_names[1])
        kinds = {experts.name: "experts", experts.gate: "gate"}
        kinds |= {name: "shared" for name in names if name.startswith(f"{experts.shared}.")}
        kinds[experts.norm] = "norm"
        return sorted(names, key=lambda name: experts.registers.index(kinds.get(name, "bias")))

    def _norm(self, name: str) -> Module:
        width, kind = self.shape.hidden, self.facts.norm
        if self.facts.rms_key and self.config.values.get(self.facts.rms_key) is not None:
            kind = "rms"
        if kind in ("layer", "plain_layer"):
            return layer_norm(name, width, affine=kind == "layer")
        if kind == "cohere_layer":
            return Module(name, Norm(width, kind), (Parameter("weight", (width,)),))
        return rms_norm(name, width, kind=kind)

    def _attention(self, window: int | None, heads: int, *, rotary: bool) -> list[Module]:
        facts, shape = self.facts, replace(self.shape, heads=heads)
        if facts.is_latent:
            values = facts.value_dim or shape.hidden // shape.heads
            config = self.config.override(v_head_dim=self.config.integer("v_head_dim", values))
            return latent_attention(config, shape.hidden, shape.heads, shape.dropout)
        if window is not None:
            heads = next(filter(None, map(self._optional_number, facts.windowed.heads)), shape.heads)
            shape = replace(shape, heads=heads, kv_heads=shape.kv_heads * facts.windowed.kv_factor)
        has_norm = not facts.qk_norm_key or self._says(facts.qk_norm_key)
        modules = attention_modules(
            shape,
            qkv_bias=self._says(facts.qkv_bias),
            o_bias=self._says(facts.out_bias),
            qk_norm=facts.qk_norm if has_norm else "none",
            norm=facts.norm,
            window=window,
            rotary=rotary,
        )
        values = self.config.integer("v_head_dim", facts.value_dim) if facts.value_dim else shape.head_dim
        if facts.is_square and shape.heads * values != shape.hidden:
            raise self.config.error(
                f"{shape.heads} heads of {values} features; expected {shape.hidden} features in all"
            )
        *_, value, core, _ = modules
        modules[-3:] = [
            linear(value.name, shape.hidden, shape.kv_heads * values, bias=self._says(facts.qkv_bias),
                   shares_input=True),
            replace_op_fields(core, v_head_dim=values),
            linear(facts.out_name, shape.heads * values, shape.hidden, bias=self._says(facts.out_bias)),
        ]  # fmt: skip
        if facts.qkv_name:
            features = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
            product = linear(facts.qkv_name, shape.hidden, features, bias=self._says(facts.qkv_bias))
            modules = [product, replace_op_fields(modules[-2], splits_fused_qkv=True), modules[-1]]
        for old, new in zip(("q_norm", "k_norm"), facts.qk_norm_names, strict=True):
            modules = rename_modules(modules, old, new)
        width = (
            self.config.integer("rotary_dim", facts.rotary_dim)
            if facts.rotary_dim
            else partial_rotary(self.config, shape.head_dim, facts.rotary_fraction)
        )
        modules[-2] = replace_op_fields(
            modules[-2],
            softcaps=self._caps("attn_logit_softcapping", 0),
            is_causal=not self._is_bidirectional,
        )
        if width is not None:
            modules[-2] = replace_op_fields(modules[-2], rotary_width=width)
        if facts.has_sinks or (window is not None and facts.windowed.has_sinks):
            core = replace_op_fields(modules[-2], has_sinks=True)
            modules[-2] = replace(core, name="self_attn", parameters=(Parameter("sinks", (shape.heads,)),))
        if facts.has_gate_bias:
            bias = Parameter("gate_bias", (shape.heads,))
            modules[-2] = replace(modules[-2], name="self_attn", parameters=(bias,))
        if facts.has_output_gate:
            modules[-2:-1] = self._gated(modules[-2], shape.heads, shape.heads * values)
        return modules

    def _gated(self, core: Module, heads: int, features: int) -> list[Module]:
        """The core of attention, whose output is multiplied by a gate."""
        outputs = heads if self.facts.gates_heads else features
        gate = linear(f"self_attn.{self.facts.gate_name}", self.shape.hidden, outputs, shares_input=True)
        return [gate, core, activation("self_attn.gate", features, "sigmoid", gated=True)]

    def _mlp(self) -> list[Module]:
        facts, shape, bias = self.facts, self.shape, self._says(self.facts.mlp_bias)
        key = facts.experts.dense_width if facts.experts else ""
        width = self.config.integer(key, shape.ffn) if key else shape.ffn
        if facts.mlp == "gated":
            return gated_mlp("mlp", shape.hidden, width, shape.act, bias=bias)
        if facts.mlp == "fused":
            return fused_mlp(facts.mlp_names, shape.hidden, shape.ffn, shape.act, bias=bias)
        modules = plain_mlp(facts.mlp_names, shape.hidden, shape.ffn, shape.act, bias=bias)
        learned = tuple(Parameter(name, (1,)) for name in facts.act_parameters)
        modules[1] = replace(modules[1], parameters=learned)
        return modules

    def _score(self, experts: DecoderExperts) -> ScoreFunction:
        names: tuple[ScoreFunction, ...] = get_args(ScoreFunction)
        name = self.config.string(experts.score_key, experts.score) if experts.score_key else experts.score
        if name not in names:
            raise self.config.error(f"'{experts.score_key}' is '{name}'; expected {' or '.join(names)}")
        return names[names.index(name)]

    def _experts(self, experts: DecoderExperts) -> list[Module]:
        config, shape = self.config, self.shape
        count, width = self._number(experts.count), self._number(experts.width)
        groups = (
            (config.integer("n_group", 1), config.integer("topk_group", 1)) if experts.has_groups else (1, 1)
        )
        normalizes = experts.normalizes
        choice = Router(
            0, 0, 0, self._score(experts), *groups, in_fp32=experts.in_fp32,
            has_choice_bias=bool(experts.choice_bias),
            normalizes=normalizes if isinstance(normalizes, bool) else config.boolean(normalizes, True),
        )  # fmt: skip
        gate, routed = routed_mlp(
            config, shape.hidden, width, count, self._number(experts.top_k), choice, gate=experts.gate,
            act=shape.act,
        )  # fmt: skip
        routed = replace(routed, name=experts.name)
        modules = [gate, routed]
        owner, _, name = experts.choice_bias.rpartition(".")
        bias = (Parameter(name, (*experts.choice_bias_shape, count), trainable=False),)
        if owner == gate.name:
            modules[0] = replace(gate, parameters=(*gate.parameters, *bias))
        elif owner:
            modules.insert(0, Module(owner, Operation(), bias))
        shared_width = width
        if experts.shared_width is not None:
            shared_width = self._number(experts.shared_width, 0)
        if experts.num_shared is not None:
            shared_width *= self._number(experts.num_shared, experts.min_shared)
        has_bias = self._says(self.facts.mlp_bias)
        if experts.shared_names and shared_width:
            modules += fused_mlp(experts.shared_names, shape.hidden, shared_width, shape.act, bias=has_bias)
        elif experts.shared and shared_width:
            shared = gated_mlp(experts.shared, shape.hidden, shared_width, shape.act, bias=has_bias)
            modules += shared
            if experts.shared_gate:
                modules = [
                    *shared,
                    gate,
                    routed,
                    linear(experts.shared_gate, shape.hidden, 1, shares_input=True),
                ]
        if experts.norm:
            modules.append(self._norm(experts.norm))
        return modules
