"""Megatron's flags of mixtures of experts: of the network, and of how its experts run.

Read in Megatron-Core 0.16.1: `_add_moe_args`, `validate_args` of `training/arguments.py`,
`core/transformer/transformer_config.py`.
"""

from __future__ import annotations

import ast
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.specs.formats.megatron.arguments import Arguments, refuse

_DISPATCHERS = ("allgather", "alltoall", "alltoall_seq", "flex")
DISPATCHERS = {"allgather": "all-gather", "alltoall": "all-to-all", "alltoall_seq": "all-to-all"}
_BACKENDS = ("deepep", "hybridep")
_MOST_LAYERS = 10_000
_REFUSED = {
    "moe-latent-size": "experts of a narrower input",
    "moe-use-upcycling": "upcycled experts",
}
# Flags that a step does not feel, or that it feels too little.
_LEFT_OUT = (
    "moe-router-fusion", "moe-router-bias-update-rate",
    "moe-z-loss-coeff", "moe-input-jitter-eps", "moe-router-topk-scaling-factor", "moe-per-layer-logging",
    "moe-token-drop-policy",
    "moe-use-legacy-grouped-gemm",
    "moe-deepep-num-sms", "moe-hybridep-num-sms", "moe-token-dropping", "moe-router-pre-softmax",
    "moe-apply-probs-on-input",
)  # fmt: skip


def read_experts(found: Arguments) -> dict[str, Any]:
    """The keys of `[parallelism]` and `[strategy]` that the flags give, by their full names.

    Raises InputError for what Megatron refuses, NotSimulatedError for what zsim lacks.
    """
    for flag, what in _REFUSED.items():
        refuse(found, flag, what)
    degree, tensor = found.count("expert-model-parallel-size"), found.integer("expert-tensor-parallel-size")
    if degree > 1 and found.has("num-layers") and not found.has("num-experts"):
        raise InputError(
            f"{found.where}: --expert-model-parallel-size: found {degree} without --num-experts, which "
            "Megatron refuses; expected 1"
        )
    keys: dict[str, Any] = {}
    if degree > 1:
        keys["parallelism.expert"] = degree
    if tensor is not None and (degree > 1 or found.has("num-experts")):
        keys["parallelism.expert_tensor"] = tensor
    kind = found.text("moe-token-dispatcher-type", None, _DISPATCHERS)
    backend = found.text("moe-flex-dispatcher-backend", "deepep", _BACKENDS)
    if kind is not None:
        keys["parallelism.dispatcher"] = DISPATCHERS.get(kind, backend)
    capacity = found.number("moe-expert-capacity-factor", 0.0)
    if capacity:
        keys["parallelism.capacity_factor"] = capacity
    if found.has("moe-router-force-load-balancing"):
        keys["parallelism.expert_imbalance"] = 1.0
    for flag, key in (
        ("moe-grouped-gemm", "moe_grouped_gemm"),
        ("moe-permute-fusion", "moe_permute_fusion"),
        ("enable-experimental", "enable_experimental"),
        ("moe-pad-expert-input-to-capacity", "moe_pad_to_capacity"),
        ("moe-shared-expert-overlap", "overlap_shared_experts"),
        ("moe-router-padding-for-fp8", "moe_router_padding"),
        ("moe-router-padding-for-quantization", "moe_router_padding"),
        ("overlap-moe-expert-parallel-comm", "overlap_expert_parallel"),
    ):
        if found.has(flag):
            keys[f"strategy.{key}"] = True
    if found.has("delay-wgrad-compute") and "strategy.overlap_expert_parallel" in keys:
        keys["strategy.delay_wgrad_compute"] = True
    predicted = found.integer("mtp-num-layers", 0)
    found.text("mtp-loss-scaling-factor", None)
    if predicted:
        keys["strategy.mtp_layers"] = predicted
    dtype = found.text("moe-router-dtype", None, ("fp32", "fp64"))
    if dtype is not None:
        keys["strategy.moe_router_dtype"] = dtype
    balancing = found.texts("moe-router-load-balancing-type") or ["aux_loss"]
    coefficients = [float(one) for one in found.texts("moe-aux-loss-coeff")]
    if any(coefficients) and balancing != ["none"]:
        keys["strategy.moe_aux_loss"] = True
    found.has(*_LEFT_OUT)
    return keys


def expert_architecture(found: Arguments, layers: int, ffn: int) -> dict[str, Any]:
    """The keys of a config.json for routed experts. The mapping is empty without `--num-experts`."""
    experts = found.integer("num-experts")
    if experts is None:
        return {}
    groups = found.integer("moe-router-num-groups", 1)
    keys: dict[str, Any] = {
        "num_moe_experts": experts,
        "moe_router_topk": found.count("moe-router-topk", 2),
        "moe_ffn_hidden_size": found.integer("moe-ffn-hidden-size", ffn),
        "moe_layer_pattern": _pattern(found, layers),
        "moe_router_score_function": found.text(
            "moe-router-score-function", "softmax", ("softmax", "sigmoid")
        ),
        "moe_router_num_groups": groups,
        "moe_router_group_topk": found.integer("moe-router-group-topk", groups),
        "moe_router_enable_expert_bias": found.has("moe-router-enable-expert-bias"),
        "moe_shared_expert_gate": found.has("moe-shared-expert-gate"),
    }
    shared = found.integer("moe-shared-expert-intermediate-size")
    return keys if shared is None else {**keys, "moe_shared_expert_intermediate_size": shared}


def _pattern(found: Arguments, layers: int) -> list[int]:
    """1 for each layer with experts and 0 for each dense one. The flag is a period, or a list as Python
    writes it.
    """
    text = found.text("moe-layer-freq", "1") or "1"
    if text.isdigit() and int(text) > 0:
        return [int(number % int(text) == 0) for number in range(layers)]
    try:
        bits = _listed(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError):
        raise NotSimulatedError(
            f"{found.where}: --moe-layer-freq: found '{text}'; zsim reads a number, or lists of 0 and 1 "
            "joined by + and repeated by *, as in ([0]*3+[1]*58) and ([0]+[1]*3)*4"
        ) from None
    if len(bits) != layers:
        raise InputError(
            f"{found.where}: --moe-layer-freq: found {len(bits)} layers in '{text}', expected --num-layers, "
            f"{layers}"
        )
    return bits


def _listed(node: ast.expr) -> list[int]:
    """The list of 0 and 1 that an expression of lists, sums and repetitions describes. Raises ValueError for
    any other.
    """
    match node:
        case ast.List(elts=elements):
            bits = [one.value for one in elements if isinstance(one, ast.Constant)]
            if len(bits) == len(elements) and all(type(bit) is int and bit in (0, 1) for bit in bits):
                return [int(str(bit)) for bit in bits]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _listed(left) + _listed(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(count))):
            if 0 <= count <= _MOST_LAYERS:
                return _listed(left) * count
    raise ValueError
