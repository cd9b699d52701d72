"""Megatron's flags that change a step in ways that zsim refuses, or leaves out.

Every other flag that the reader does not look up has no effect on a step in its steady state: data, logging,
checkpoints, schedules of the learning rate, inference, and the like.
"""

from __future__ import annotations

from collections.abc import Mapping

NOT_SIMULATED: Mapping[str, str] = {
    "use-torch-fsdp2": "torch's FSDP2 inside Megatron",
    "overlap-param-gather-with-optimizer-step": "gathers between parts of the optimizer step",
    "optimizer-cpu-offload": "an optimizer on the CPU under Megatron",
    "optimizer-cuda-graph": "a CUDA graph of the optimizer",
    "cpu-offloading-num-layers": "activations on the CPU under Megatron",
    "fine-grained-activation-offloading": "activations on the CPU under Megatron",
    "distribute-saved-activations": "checkpoints that tensor ranks share",
    "ddp-num-buckets": "a number of buckets (--ddp-bucket-size gives their size)",
    "ddp-reduce-scatter-with-fp32-accumulation": "gradients exchanged all-to-all and summed in fp32",
    "perform-rl-step": "steps of reinforcement learning",
    "symmetric-ar-type": "all-reduces of symmetric memory",
    "yaml-cfg": "flags in another file (give that file instead)",
    "spec": "layers of one's own",
    "kitchen-config-file": "quantisation by Kitchen",
    "kitchen-recipe-number": "quantisation by Kitchen",
    "te-precision-config-file": "a precision that differs by layer",
    "freeze-all-layers": "frozen layers",
    "skip-train": "runs that do not train",
    "moe-layer-recompute": "recomputation of a layer's experts alone",
}

_FUSED = "simulated as fused kernels all the same"
_HOST = "a small cost that is left out"
LEFT_OUT: Mapping[str, str] = {
    "no-masked-softmax-fusion": _FUSED,
    "no-bias-gelu-fusion": _FUSED,
    "no-bias-swiglu-fusion": _FUSED,
    "no-bias-dropout-fusion": _FUSED,
    "no-rope-fusion": _FUSED,
    "no-persist-layer-norm": _FUSED,
    "disable-jit-fuser": _FUSED,
    "log-params-norm": _HOST,
    "log-num-zeros-in-grad": _HOST,
    "log-max-attention-logit": _HOST,
    "check-for-large-grads": _HOST,
    "check-for-spiky-loss": _HOST,
    "calculate-per-token-loss": _HOST,
    "check-weight-hash-across-dp-replicas-interval": _HOST,
    "empty-unused-memory-level": "the allocator is simulated as without it",
    "deterministic-mode": "kernels but attention's before Hopper are simulated as without it",
    "batch-invariant-mode": "kernels are simulated as without it",
    "use-nccl-ub": "collectives are simulated as without it",
    "use-sharp": "collectives are simulated as without it",
    "ddp-pad-buckets-for-high-nccl-busbw": "buckets are simulated without its padding",
    "high-priority-stream-groups": "streams are simulated with one priority",
    "fp16-lm-cross-entropy": "the loss is simulated in fp32",
    "apply-query-key-layer-scaling": _FUSED,
    "no-scatter-gather-tensors-in-pipeline": "Megatron-Core sends whole activations in any case",
    "hierarchical-context-parallel-sizes": "the sizes of its two levels are zsim's own",
}

IDLE_WITHOUT_EXPERTS = ("moe-", "expert-", "num-experts")
