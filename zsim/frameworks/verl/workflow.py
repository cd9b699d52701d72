"""verl's loop: PPO and its kin on FSDP or Megatron trainers, with vLLM or SGLang."""

from math import inf

from zsim.frameworks.megatron.trainer_defaults import DISTRIBUTED_OPTIMIZER
from zsim.workflows.rl.framework import (
    COMMON_SYNCS,
    ControllerRates,
    Offloads,
    RlFramework,
    SyncRates,
    TrainerDefaults,
)

PHASES = {"training": 3.0}
"""Seconds of the trainer's phases besides its passes: the median of what six runs took more than those
passes and reloads, 7 to 72 billion parameters with states offloaded to the host (eric-haibin-lin/verl-data
gsm8k and math, of the summer of 2025, on 8 GPUs), as `python -m validation.rl.calibration` prints it. That of
old log-probabilities is below 0."""
RELOAD_BANDWIDTH = 24e9
"""Of a GPU's shard in fp32, there and back: by least squares of what the references of the same runs took
more than their passes, which have no other time, as printed there too."""

SOURCES = {
    "defaults": "verl-project/verl 1dda039b verl/trainer/config",
    "syncs": "seventeen syncs of 7 to 671 billion parameters (verl-project/verl pull requests 2418, 4280, "
    "7005, 7291, 7348 and docs/advance/fully_async.md): twelve are within a factor of 1.6. The others are "
    "one of a release that plans its exports anew (3 times as long), two of FSDP2 with states on the host "
    "(3 to 7 times), one by SGLang (4 times), and one that was timed without waiting for it",
    "reloads": "parameters come and go in every call of a worker (281ecd4c verl/workers/fsdp_workers.py "
    "`compute_log_prob`, `update_actor`; `compute_ref_log_prob` with adapters, whose reference is the actor)",
    "loss": "counted in zsim.frameworks.verl.kernels",
    "adapters": "the actor is loaded in fp32 (281ecd4c verl/workers/fsdp_workers.py, `model_dtype`)",
    "packing": "as many micro-batches as the tokens of the rank with most fill, cut evenly by their work "
    "(verl/utils/seqlen_balancing.py `rearrange_micro_batches`)",
    "loop": "verl/trainer/ppo/v1/trainer_base.py, verl/workers/engine_workers.py",
}

_FSDP = TrainerDefaults(
    training={"activation_checkpointing": "full", "cross_entropy": "verl"},
    adapter_training={"frozen_dtype": "fp32"},
)
WORKFLOW = RlFramework(
    name="verl",
    engines={"vllm": (256, 8192), "sglang": (256, 8192), "trtllm": (256, 8192)},
    memory_utilization={"colocated": 0.5, "split": 0.5, "async": 0.5},
    transports={"colocated": "ipc", "split": "broadcast", "async": "broadcast"},
    syncs={
        "ipc": SyncRates(2048e6, 0.05e-3, 11e9, 1.0),
        "broadcast": SyncRates(2048e6, 0.05e-3, inf, 0.3),
        **COMMON_SYNCS,
    },
    offloads=Offloads(parameters=False, optimizer=False, sleep_level=1),
    trainer={
        "fsdp1": _FSDP,
        "fsdp2": _FSDP,
        "megatron": DISTRIBUTED_OPTIMIZER,
    },
    algorithms=("grpo", "ppo", "dapo", "rloo"),
    controllers={
        placement: ControllerRates(1.0, 0.5, PHASES) for placement in ("colocated", "split", "async")
    },
    has_reference=False,
    reload_bandwidth=RELOAD_BANDWIDTH,
    streamed_prompts=16,
    recomputes_caches=True,
    fill="even",
    padding="cap",
    tensor=2,
    sources=SOURCES,
)
