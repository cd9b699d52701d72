"""Megatron's flags of mixtures of experts: of the network, and of how its experts run.

Read in Megatron-Core 0.16.1: `_add_moe_args`, `validate_args` of `training/arguments.py`,
`core/transformer/transformer_config.py`.
"""

from __future__ import annotations

import ast
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.programs.megatron_lm.arguments import Arguments, refuse
from zsim.programs.megatron_lm.flags import NOT_SIMULATED_EXPERTS

_DISPATCHERS = ("allgather", "alltoall", "alltoall_seq", "flex")
DISPATCHERS = {"allgather": "all-gather", "alltoall": "all-to-all", "alltoall_seq": "all-to-all"}
_BACKENDS = ("deepep", "hybridep")
_MAX_LAYERS = 10_000
# Flags that a step does not feel, or that it feels too little.
_READ_WITHOUT_EFFECT = (
    "moe-router-fusion", "moe-router-bias-update-rate",
    "moe-z-loss-coeff", "moe-input-jitter-eps", "moe-router-topk-scaling-factor", "moe-per-layer-logging",
    "moe-token-drop-policy",
    "moe-use-legacy-grouped-gemm",
    "moe-deepep-num-sms", "moe-hybridep-num-sms", "moe-token-dropping", "moe-router-pre-softmax",
    "moe-apply-probs-on-input",
)  # fmt: skip


def read_experts(arguments: Arguments) -> dict[str, Any]:
    """The keys of `[parallelism]` and `[strategy]` that the flags give, by their full names.

    Raises InputError for what Megatron refuses, NotSimulatedError for what zsim lacks.
    """
    for flag, feature in NOT_SIMULATED_EXPERTS.items():
        refuse(arguments, flag, feature)
    degree = arguments.count("expert-model-parallel-size")
    tensor = arguments.integer("expert-tensor-parallel-size")
    if degree > 1 and arguments.has("num-layers") and not arguments.has("num-experts"):
        raise InputError(
            f"{arguments.where}: --expert-model-parallel-size: found {degree} without --num-experts, which "
            "Megatron refuses; expected 1"
        )
    keys: dict[str, Any] = {}
    if degree > 1:
        keys["parallelism.expert"] = degree
    if tensor is not None and (degree > 1 or arguments.has("num-experts")):
        keys["parallelism.expert_tensor"] = tensor
    kind = arguments.text("moe-token-dispatcher-type", None, _DISPATCHERS)
    backend = arguments.text("moe-flex-dispatcher-backend", "deepep", _BACKENDS)
    if kind is not None:
        keys["parallelism.dispatcher"] = DISPATCHERS.get(kind, backend)
    capacity = arguments.number("moe-expert-capacity-factor", 0.0)
    if capacity:
        keys["parallelism.capacity_factor"] = capacity
    if arguments.has("moe-router-force-load-balancing"):
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
        if arguments.has(flag):
            keys[f"strategy.{key}"] = True
    if arguments.has("delay-wgrad-compute") and "strategy.overlap_expert_parallel" in keys:
        keys["strategy.delay_wgrad_compute"] = True
    mtp_layers = arguments.integer("mtp-num-layers", 0, minimum=0)
    arguments.text("mtp-loss-scaling-factor", None)
    if mtp_layers:
        keys["strategy.mtp_layers"] = mtp_layers
    dtype = arguments.text("moe-router-dtype", None, ("fp32", "fp64"))
    if dtype is not None:
        keys["strategy.moe_router_dtype"] = dtype
    balancing = arguments.texts("moe-router-load-balancing-type") or ["aux_loss"]
    coefficients = [float(coefficient) for coefficient in arguments.texts("moe-aux-loss-coeff")]
    if any(coefficients) and balancing != ["none"]:
        keys["strategy.moe_aux_loss"] = True
    arguments.has(*_READ_WITHOUT_EFFECT)
    return keys


def expert_architecture(arguments: Arguments, layers: int, ffn: int) -> dict[str, Any]:
    """The keys of a config.json for routed experts. The mapping is empty without `--num-experts`."""
    experts = arguments.integer("num-experts")
    if experts is None:
        return {}
    groups = arguments.integer("moe-router-num-groups", 1)
    keys: dict[str, Any] = {
        "num_moe_experts": experts,
        "moe_router_topk": arguments.count("moe-router-topk", 2),
        "moe_ffn_hidden_size": arguments.integer("moe-ffn-hidden-size", ffn),
        "moe_layer_pattern": _expert_layers(arguments, layers),
        "moe_router_score_function": arguments.text(
            "moe-router-score-function", "softmax", ("softmax", "sigmoid")
        ),
        "moe_router_num_groups": groups,
        "moe_router_group_topk": arguments.integer("moe-router-group-topk", groups),
        "moe_router_enable_expert_bias": arguments.has("moe-router-enable-expert-bias"),
        "moe_shared_expert_gate": arguments.has("moe-shared-expert-gate"),
    }
    shared = arguments.integer("moe-shared-expert-intermediate-size")
    return keys if shared is None else {**keys, "moe_shared_expert_intermediate_size": shared}


def _expert_layers(arguments: Arguments, layers: int) -> list[int]:
    """1 for each layer with experts and 0 for each dense one. A period counts from its first layer."""
    text = arguments.text("moe-layer-freq", "1") or "1"
    if text.isdigit() and int(text) > 0:
        return [int(number % int(text) == 0) for number in range(layers)]
    return layer_pattern(arguments, "moe-layer-freq", text, layers)


def layer_pattern(arguments: Arguments, flag: str, text: str, layers: int) -> list[int]:
    """1 or 0 for each layer. The flag is a period, whose last layer has 0, or a list as Python writes it."""
    if text.isdigit() and int(text) > 0:
        return [int((number + 1) % int(text) != 0) for number in range(layers)]
    try:
        bits = _parse_pattern(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError):
        raise NotSimulatedError(
            f"{arguments.where}: --{flag}: found '{text}'; zsim reads a number, or lists of 0 and 1 "
            "joined by + and repeated by *, as in ([0]*3+[1]*58) and ([0]+[1]*3)*4"
        ) from None
    if len(bits) != layers:
        raise InputError(
            f"{arguments.where}: --{flag}: found {len(bits)} layers in '{text}', expected --num-layers, "
            f"{layers}"
        )
    return bits


def _parse_pattern(node: ast.expr) -> list[int]:
    """The list of 0 and 1 that an expression of lists, sums and repetitions describes. Raises ValueError for
    any other.
    """
    match node:
        case ast.List(elts=elements):
            bits = [element.value for element in elements if isinstance(element, ast.Constant)]
            if len(bits) == len(elements) and all(type(bit) is int and bit in (0, 1) for bit in bits):
                return [int(str(bit)) for bit in bits]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _parse_pattern(left) + _parse_pattern(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(count))):
            if 0 <= count <= _MAX_LAYERS:
                return _parse_pattern(left) * count
    raise ValueError
