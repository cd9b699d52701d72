"""A model as an inference engine runs it: its weights, caches and kernels on one GPU of a replica.

Engines merge the products of one input (q, k and v; gate and up), keep a cache of keys and values, and cut
layers over `tensor` ranks as Megatron does: every layer ends in two all-reduces (vLLM 0.24
`model_executor/layers/linear.py`, `model_executor/models/llama.py`). Routed experts are cut over `expert`
ranks if it is more than 1, else every expert over the tensor ranks (`layers/fused_moe/layer.py`). Where the
expert ranks are several groups of tensor ranks, each group has sequences of its own, and all run every
iteration together. A latent cache is the same on all tensor ranks (`layers/mla.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from zsim.dtypes import DTYPE_BYTES
from zsim.errors import NotSimulatedError
from zsim.operations.experts import Experts
from zsim.operations.router import Router
from zsim.specs.model.spec import Attention, Linear, ModelSpec, Module

WEIGHT_BYTES = {"fp4": 0.5625, **DTYPE_BYTES}
"""Bytes of a weight. Blocks of 16 weights in fp4 share a scale of a byte (NVFP4)."""
LATENT_ROPE = 64  # features of a latent cache's key with positions, in all models that have one


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """The cut of a model over the GPUs of a replica, and the types of its weights and its cache."""

    tensor: int = 1
    expert: int = 1
    """Ranks that share a layer's experts. 1 if every expert is cut over the tensor ranks."""
    weight_dtype: str = "bf16"
    """That of experts, and of the other products of layers. The head is never of fewer than 16 bits."""
    cache_dtype: str = "bf16"
    dense_dtype: str | None = None
    """That of the products outside the experts, where only the experts are of fewer bits."""

    @property
    def gpus(self) -> int:
        """GPUs of a replica."""
        return max(self.tensor, self.expert)

    @property
    def product_dtype(self) -> str:
        """The type of the weights of products outside the experts."""
        return self.dense_dtype or self.weight_dtype

    @property
    def data(self) -> int:
        """Groups of tensor ranks that each have sequences of their own, under experts that they share."""
        return max(1, self.expert // self.tensor)


@dataclass(frozen=True, slots=True)
class WeightProduct:
    """A product of rows with a weight of `in_features` x `out_features`, as one GPU has it."""

    in_features: int
    out_features: int

    @property
    def numel(self) -> int:
        """Elements of the weight."""
        return self.in_features * self.out_features


@dataclass(frozen=True, slots=True)
class ExpertsLayer:
    """The experts of a layer on one GPU."""

    num_experts: int
    """Experts of the layer, on all ranks."""
    local_experts: int
    top_k: int
    in_features: int
    expert_features: int
    """Width of an expert on this rank."""
    matrices: int
    """Weights of an expert, three if it is gated."""

    @property
    def numel(self) -> int:
        """Elements of one expert on this rank."""
        return self.matrices * self.in_features * self.expert_features

    def touched_experts(self, rows: float) -> float:
        """Expected number of local experts that `rows` tokens choose, all alike likely."""
        untouched: float = (1.0 - self.top_k / self.num_experts) ** rows
        return self.local_experts * (1.0 - untouched)


@dataclass(frozen=True, slots=True)
class CachedAttention:
    """Attention over a cache, as one GPU has it."""

    num_heads: int
    head_dim: int
    cache_elements: int
    """Elements of the cache for one token of one sequence."""
    is_latent: bool
    window: int | None
    """Tokens that a query sees at most. None for all."""


@dataclass(frozen=True)
class ServedModel:
    """The kernels of one pass through the model on one GPU, each with how often it runs."""

    layout: EngineLayout
    products: Counter[WeightProduct]
    """Products of all layers, without the head."""
    experts: Counter[ExpertsLayer]
    attentions: Counter[CachedAttention]
    head: WeightProduct
    hidden_size: int
    num_layers: int
    small_kernels: int
    """Norms, activations, rotary embeddings and writes to the cache."""
    other_numel: int
    """Parameters that are read by row in a pass: embeddings, but for one that is the head's too."""

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the weights on this GPU."""
        products = sum(product.numel * count for product, count in self.products.items())
        experts = sum(layer.local_experts * layer.numel * count for layer, count in self.experts.items())
        streamed = products * WEIGHT_BYTES[self.layout.product_dtype]
        streamed += experts * WEIGHT_BYTES[self.layout.weight_dtype]
        return int(streamed) + (self.head.numel + self.other_numel) * DTYPE_BYTES["bf16"]

    @cached_property
    def cache_bytes_per_token(self) -> int:
        """Bytes of the cache on this GPU for a token of a sequence."""
        size = DTYPE_BYTES[self.layout.cache_dtype]
        return sum(attention.cache_elements * count * size for attention, count in self.attentions.items())


def served_model(model: ModelSpec, layout: EngineLayout) -> ServedModel:
    """The model on one GPU of a replica.

    Raises NotSimulatedError for a model with layers that no engine of text generation here has.
    """
    products: Counter[WeightProduct] = Counter()
    experts: Counter[ExpertsLayer] = Counter()
    attentions: Counter[CachedAttention] = Counter()
    small_kernels = 0
    layers = 0
    for block in model.blocks:
        layers += any(isinstance(module.op_spec, Attention) for module in block.modules)
        for product in merged_products(block.modules, layout):
            products[product] += 1
        latent = _latent_width(block.modules)
        for module in block.modules:
            spec = module.op_spec
            if isinstance(spec, Experts):
                experts[_experts_layer(spec, layout)] += 1
                small_kernels += 2  # the choice of experts, and the sum of their rows
            elif isinstance(spec, Attention):
                attentions[_cached_attention(spec, layout, latent, model.name)] += 1
                small_kernels += 2  # rotary embedding, and the write to the cache
            elif not isinstance(spec, Linear) and module.name and not _is_residual(module):
                small_kernels += 1
    head = next((module for module in model.after if isinstance(module.op_spec, Linear)), None)
    specs = [module.op_spec for block in model.unique_blocks for module in block.modules]
    is_causal = all(spec.is_causal for spec in specs if isinstance(spec, Attention))
    if head is None or not attentions or model.has_encoder or not is_causal:
        raise NotSimulatedError(
            f"model '{model.name}': zsim simulates rollouts of decoders with a language model's head alone"
        )
    if model.towers:
        raise NotSimulatedError(
            f"model '{model.name}': zsim simulates rollouts of text alone; --set model.text_only=true "
            "leaves its towers out"
        )
    assert isinstance(head.op_spec, Linear)
    tied_numel = head.op_spec.in_features * head.op_spec.out_features if model.is_tied else 0
    return ServedModel(
        layout,
        products,
        experts,
        attentions,
        WeightProduct(head.op_spec.in_features, -(-head.op_spec.out_features // layout.tensor)),
        model.hidden_size,
        layers,
        small_kernels + 1,
        (sum(module.numel for module in model.before) - tied_numel) // layout.tensor,
    )


def merged_products(modules: Iterable[Module], layout: EngineLayout) -> Iterator[WeightProduct]:
    """The dense products of a block on one rank. Those of one input are one product."""
    pending: WeightProduct | None = None
    for module in modules:
        spec = module.op_spec
        if isinstance(spec, Router):
            yield WeightProduct(spec.in_features, spec.num_experts)
        if not isinstance(spec, Linear):
            continue
        rows_cut = module.name.rsplit(".", 1)[-1] in _ROW_CUT
        is_whole = module.name.rsplit(".", 1)[-1] in _WHOLE
        tensor = 1 if is_whole else layout.tensor
        in_features = -(-spec.in_features // tensor) if rows_cut else spec.in_features
        out_features = spec.out_features if rows_cut else -(-spec.out_features // tensor)
        if module.shares_input and pending is not None:
            pending = WeightProduct(pending.in_features, pending.out_features + out_features)
            continue
        if pending is not None:
            yield pending
        pending = WeightProduct(in_features, out_features)
    if pending is not None:
        yield pending


# Products whose input features are cut over tensor ranks, by the names that models of transformers give them.
_ROW_CUT = {"o_proj", "down_proj", "dense", "dense_4h_to_h", "c_proj", "out_proj", "fc2", "wo", "w2"}
# Products to a latent, which every tensor rank has whole.
_WHOLE = {"q_a_proj", "kv_a_proj_with_mqa"}


def _is_residual(module: Module) -> bool:
    return module.name.endswith("residual")  # engines add it in the next norm


def _latent_width(modules: Iterable[Module]) -> int:
    for module in modules:
        if module.name.endswith("kv_a_layernorm"):
            return module.numel
    return 0


def _cached_attention(spec: Attention, layout: EngineLayout, latent: int, name: str) -> CachedAttention:
    heads = -(-spec.num_heads // layout.tensor)
    if spec.is_latent:
        if not latent:
            raise NotSimulatedError(f"model '{name}': latent attention without a norm of its latent")
        return CachedAttention(heads, latent + LATENT_ROPE, latent + LATENT_ROPE, True, spec.window)
    kv_heads = max(1, spec.num_kv_heads // layout.tensor)
    elements = kv_heads * (spec.qk_head_dim + spec.v_head_dim)
    return CachedAttention(heads, spec.qk_head_dim, elements, False, spec.window or spec.chunk)


def _experts_layer(spec: Experts, layout: EngineLayout) -> ExpertsLayer:
    cut = 1 if layout.expert > 1 else layout.tensor
    return ExpertsLayer(
        spec.num_experts,
        spec.num_experts // layout.expert,
        spec.top_k,
        spec.in_features,
        -(-spec.expert_features // cut),
        3 if spec.is_gated else 2,
    )
