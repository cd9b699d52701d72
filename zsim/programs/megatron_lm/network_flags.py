"""A model as Megatron's flags of the network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zsim.operations import Embedding
from zsim.operations.experts import Experts
from zsim.operations.operation import Role, operations_of
from zsim.operations.router import Router
from zsim.specs.model.spec import Activation, Attention, Block, ModelSpec, Module, Norm

_NORMS = {"layer": "LayerNorm", "rms": "RMSNorm"}
_GELUS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python")
_BIASES = ((True, True), (True, False), (False, False))
_FLAGS = {"relu2": "--squared-relu"}


class _Network:
    """The modules of a model that Megatron has flags for."""

    def __init__(self, model: ModelSpec) -> None:
        self.block = model.blocks[0]
        modules = self.block.modules
        self.cores = operations_of(modules, Attention)
        self.activations = operations_of(modules, Activation)
        self.experts = next(iter(operations_of(modules, Experts)), None)
        self.router = next(iter(operations_of(modules, Router)), None)
        self.shared_width = self.activations[0].width if self.experts and self.activations else 0
        self.has_shared_gate = any(module.op_spec.is_gate for module in modules)
        if self.experts is not None:
            expert_activation = Activation(
                self.experts.expert_features, self.experts.is_gated, self.experts.act
            )
            self.activations = [expert_activation]
        self.norms = [module for module in modules if module.role is Role.NORM]
        self.position_tables = [
            module
            for module in model.before
            if isinstance(module.op_spec, Embedding) and module.op_spec.rows != model.vocab_size
        ]

    @property
    def products(self) -> list[Module]:
        return [module for module in self.block.modules if module.role is Role.PRODUCT]

    @property
    def head_norms(self) -> list[Module]:
        """The norms of queries and keys, which stand between their products and the core of attention."""
        modules = list(self.block.modules)
        first, core = modules.index(self.products[0]), self.core_index
        return [module for module in modules[first:core] if module.role is Role.NORM]

    @property
    def core_index(self) -> int:
        modules = self.block.modules
        return next(index for index, module in enumerate(modules) if module.role is Role.MIXER)

    @property
    def biases(self) -> tuple[bool | None, bool | None]:
        """Whether the products before attention have biases, and whether those after it do. None means that
        only some of them do.
        """
        modules, core = self.block.modules, self.core_index
        return _has_bias(modules[:core]), _has_bias(modules[core:])

    @property
    def dropout(self) -> float:
        dropouts = (getattr(module.op_spec, "dropout", 0.0) for module in reversed(self.block.modules))
        return next(dropouts, 0.0)


def _has_bias(modules: Sequence[Module]) -> bool | None:
    biases = {module.has_bias for module in modules if module.role is Role.PRODUCT}
    return biases.pop() if len(biases) == 1 else None


def why_not_network(model: ModelSpec) -> str | None:
    """The reason why Megatron's flags cannot express a model, or None if they can."""
    if model.towers:
        return "it has no towers"
    if any(block is not model.blocks[0] and block != model.blocks[0] for block in model.blocks):
        return "its layers are all alike, this model's are not"
    network = _Network(model)
    if len(network.cores) != 1 or len(network.activations) != 1 or len(network.products) not in range(3, 9):
        return f"it has no layer like {network.block.kind}"
    if network.cores[0].qk_head_dim != network.cores[0].v_head_dim:
        return "its heads are as wide for values as for keys"
    if any(norm.kind not in _NORMS for norm in operations_of(network.norms, Norm)):
        return f"it has no norm like those of {network.block.kind}"
    if len(network.norms) - len(network.head_norms) != 2 or _is_parallel(network.block):
        return "it has two norms in a layer, one after the other"
    if any(
        isinstance(norm.op_spec, Norm) and norm.op_spec.kind == "layer" and len(norm.parameters) < 2
        for norm in network.norms
    ):
        return "its LayerNorm has a weight and a bias"
    if network.biases not in _BIASES:
        return "it has biases on all products, on those of attention's input, or on none"
    if any(module.role is Role.NORM for module in model.before):
        return "it has no norm behind the embedding"
    if any(
        parameter.name == "bias"
        for module in model.after
        if module.name == "lm_head"
        for parameter in module.parameters
    ):
        return "its head has no bias"
    activation = network.activations[0]
    activation_names = ("silu",) if activation.gated else (*_GELUS, *_FLAGS)
    if activation.name not in activation_names:
        return f"it has no activation '{activation.name}'{' with a gate' if activation.gated else ''}"
    return None


def _is_parallel(block: Block) -> bool:
    return any(module.shares_input for module in block.modules if module.role is Role.NORM)


def network_flags(model: ModelSpec, vocabulary: int, min_positions: int) -> Iterator[str]:
    """The flags of a model.

    `vocabulary` is the size of the vocabulary before padding. The model gets at least `min_positions`
    positions.
    """
    network = _Network(model)
    core, activation = network.cores[0], network.activations[0]
    yield f"--num-layers {len(model.blocks)}"
    yield f"--hidden-size {model.hidden_size}"
    yield f"--ffn-hidden-size {activation.width}"
    yield f"--num-attention-heads {core.num_heads}"
    yield f"--kv-channels {core.qk_head_dim}"
    if core.num_kv_heads != core.num_heads:
        yield f"--group-query-attention --num-query-groups {core.num_kv_heads}"
    yield f"--max-position-embeddings {max(model.max_positions or 0, min_positions)}"
    yield f"--position-embedding-type {_positions(network, rotary=core.rotary)}"
    norm = network.norms[0].op_spec
    assert isinstance(norm, Norm)
    yield f"--normalization {_NORMS[norm.kind]}"
    if activation.gated:
        yield "--swiglu"
    elif activation.name in _FLAGS:
        yield _FLAGS[activation.name]
    yield from _biases(network)
    yield from _experts(network)
    if network.head_norms:
        yield "--qk-layernorm"
    if not model.is_tied:
        yield "--untie-embeddings-and-output-weights"
    if core.window is not None:
        yield f"--window-size {core.window - 1},0"
    yield f"--attention-dropout {core.dropout:g} --hidden-dropout {network.dropout:g}"
    # NullTokenizer adds the end of a document.
    yield f"--tokenizer-type NullTokenizer --vocab-size {vocabulary - 1}"


def _experts(network: _Network) -> Iterator[str]:
    """The routed experts of every layer, and their router."""
    experts, router = network.experts, network.router
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
    if network.shared_width:
        yield f"--moe-shared-expert-intermediate-size {network.shared_width}"
    if network.has_shared_gate:
        yield "--moe-shared-expert-gate"


def _positions(network: _Network, *, rotary: bool) -> str:
    return "rope" if rotary else "learned_absolute" if network.position_tables else "none"


def _biases(network: _Network) -> Iterator[str]:
    input_bias, other_bias = network.biases
    if not other_bias:
        yield "--disable-bias-linear"
        if input_bias:
            yield "--add-qkv-bias"
