"""A model as Megatron's flags of the network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zsim.specs.model.experts import Experts, Router
from zsim.specs.model.spec import Activation, Attention, Block, Embedding, Linear, ModelSpec, Module, Norm

_NORMS = {"layer": "LayerNorm", "rms": "RMSNorm"}
_GELUS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python")
_BIASES = ((True, True), (True, False), (False, False))
_FLAGS = {"relu2": "--squared-relu"}


class _Parts:
    """The modules of a model that Megatron has flags for."""

    def __init__(self, model: ModelSpec) -> None:
        self.block = model.blocks[0]
        modules = self.block.modules
        self.cores = [module.work for module in modules if isinstance(module.work, Attention)]
        self.acts = [module.work for module in modules if isinstance(module.work, Activation)]
        self.experts = next((module.work for module in modules if isinstance(module.work, Experts)), None)
        self.router = next((module.work for module in modules if isinstance(module.work, Router)), None)
        self.shared_width = self.acts[0].width if self.experts and self.acts else 0
        self.has_shared_gate = any(_is_gate(module) for module in modules)
        if self.experts is not None:
            own = Activation(self.experts.expert_features, self.experts.is_gated, self.experts.act)
            self.acts = [own]
        self.norms = [module for module in modules if isinstance(module.work, Norm)]
        self.places = [
            module
            for module in model.before
            if isinstance(module.work, Embedding) and module.work.rows != model.vocab_size
        ]

    @property
    def products(self) -> list[Module]:
        return [module for module in self.block.modules if isinstance(module.work, Linear)]

    @property
    def heads_with_norm(self) -> list[Module]:
        """The norms of queries and keys, which stand between their products and the core of attention."""
        modules = list(self.block.modules)
        first, core = modules.index(self.products[0]), self.core_at
        return [module for module in modules[first:core] if isinstance(module.work, Norm)]

    @property
    def core_at(self) -> int:
        modules = self.block.modules
        return next(at for at, module in enumerate(modules) if isinstance(module.work, Attention))

    @property
    def biases(self) -> tuple[bool | None, bool | None]:
        """Whether the products before attention have biases, and whether those after it do. None means that
        only some of them do.
        """
        modules, core = self.block.modules, self.core_at
        return _bias_of(modules[:core]), _bias_of(modules[core:])

    @property
    def dropout(self) -> float:
        found = (getattr(module.work, "dropout", 0.0) for module in reversed(self.block.modules))
        return next(found, 0.0)


def _is_gate(module: Module) -> bool:
    """Whether a module is the gate of shared experts, which gives one number per token."""
    return isinstance(module.work, Linear) and module.work.out_features == 1


def _bias_of(modules: Sequence[Module]) -> bool | None:
    found = {
        any(one.name == "bias" for one in module.parameters)
        for module in modules
        if isinstance(module.work, Linear)
    }
    return found.pop() if len(found) == 1 else None


def why_not_network(model: ModelSpec) -> str | None:
    """The reason why Megatron's flags cannot express a model, or None if they can."""
    if any(block is not model.blocks[0] and block != model.blocks[0] for block in model.blocks):
        return "its layers are all alike, this model's are not"
    parts = _Parts(model)
    if len(parts.cores) != 1 or len(parts.acts) != 1 or len(parts.products) not in range(3, 9):
        return f"it has no layer like {parts.block.kind}"
    if parts.cores[0].qk_head_dim != parts.cores[0].v_head_dim:
        return "its heads are as wide for values as for keys"
    if any(norm.work.kind not in _NORMS for norm in parts.norms if isinstance(norm.work, Norm)):
        return f"it has no norm like those of {parts.block.kind}"
    if len(parts.norms) - len(parts.heads_with_norm) != 2 or _is_parallel(parts.block):
        return "it has two norms in a layer, one after the other"
    if any(
        norm.work.kind == "layer" and len(norm.parameters) < 2
        for norm in parts.norms
        if isinstance(norm.work, Norm)
    ):
        return "its LayerNorm has a weight and a bias"
    if parts.biases not in _BIASES:
        return "it has biases on all products, on those of attention's input, or on none"
    if any(isinstance(module.work, Norm) for module in model.before):
        return "it has no norm behind the embedding"
    if any(
        one.name == "bias" for module in model.after if module.name == "lm_head" for one in module.parameters
    ):
        return "its head has no bias"
    act = parts.acts[0]
    known = ("silu",) if act.gated else (*_GELUS, *_FLAGS)
    if act.name not in known:
        return f"it has no activation '{act.name}'{' with a gate' if act.gated else ''}"
    return None


def _is_parallel(block: Block) -> bool:
    return any(module.shares_input for module in block.modules if isinstance(module.work, Norm))


def network_flags(model: ModelSpec, vocabulary: int, longest: int) -> Iterator[str]:
    """The flags of a model.

    `vocabulary` is the size of the vocabulary before padding. The model gets at least `min_positions`
    positions.
    """
    parts = _Parts(model)
    core, act = parts.cores[0], parts.acts[0]
    yield f"--num-layers {len(model.blocks)}"
    yield f"--hidden-size {model.hidden_size}"
    yield f"--ffn-hidden-size {act.width}"
    yield f"--num-attention-heads {core.num_heads}"
    yield f"--kv-channels {core.qk_head_dim}"
    if core.num_kv_heads != core.num_heads:
        yield f"--group-query-attention --num-query-groups {core.num_kv_heads}"
    yield f"--max-position-embeddings {max(model.max_positions or 0, longest)}"
    yield f"--position-embedding-type {_positions(parts, rotary=core.rotary)}"
    norm = parts.norms[0].work
    assert isinstance(norm, Norm)
    yield f"--normalization {_NORMS[norm.kind]}"
    if act.gated:
        yield "--swiglu"
    elif act.name in _FLAGS:
        yield _FLAGS[act.name]
    yield from _biases(parts)
    yield from _experts(parts)
    if parts.heads_with_norm:
        yield "--qk-layernorm"
    if not model.is_tied:
        yield "--untie-embeddings-and-output-weights"
    if core.window is not None:
        yield f"--window-size {core.window - 1},0"
    yield f"--attention-dropout {core.dropout:g} --hidden-dropout {parts.dropout:g}"
    # NullTokenizer adds the end of a document.
    yield f"--tokenizer-type NullTokenizer --vocab-size {vocabulary - 1}"


def _experts(parts: _Parts) -> Iterator[str]:
    """The routed experts of every layer, and their router."""
    experts, router = parts.experts, parts.router
    if experts is None or router is None:
        return
    yield f"--num-experts {experts.num_experts} --moe-router-topk {experts.top_k}"
    yield f"--moe-ffn-hidden-size {experts.expert_features}"
    if router.score == "sigmoid":
        yield "--moe-router-score-function sigmoid"
    if router.num_groups > 1:
        yield f"--moe-router-num-groups {router.num_groups} --moe-router-group-topk {router.top_groups}"
    if router.has_choice_bias:
        yield "--moe-router-enable-expert-bias"
    if parts.shared_width:
        yield f"--moe-shared-expert-intermediate-size {parts.shared_width}"
    if parts.has_shared_gate:
        yield "--moe-shared-expert-gate"


def _positions(parts: _Parts, *, rotary: bool) -> str:
    return "rope" if rotary else "learned_absolute" if parts.places else "none"


def _biases(parts: _Parts) -> Iterator[str]:
    of_input, of_rest = parts.biases
    if not of_rest:
        yield "--disable-bias-linear"
        if of_input:
            yield "--add-qkv-bias"
