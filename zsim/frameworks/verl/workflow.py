"""verl's loop: PPO and its kin on FSDP or Megatron trainers, with vLLM or SGLang."""

from zsim.cost.inference.iteration import HostRates
from zsim.workflows.rl.framework import (
    COMMON_SYNCS,
    ControllerRates,
    Offloads,
    RlFramework,
    SyncRates,
    TrainerDefaults,
)

PHASES = {"training": 6.5, "old_logprobs": 2.3, "reference": 0.8}
"""Seconds of the trainer's phases besides its passes: medians of relative residuals of seven runs, 7 to 72
billion parameters (eric-haibin-lin/verl-data math, of the summer of 2025, on 8 GPUs)."""

WORKFLOW = RlFramework(
    name="verl",
    engine="vllm",
    memory_utilization={"colocated": 0.5, "split": 0.5, "async": 0.5},
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    transports={"colocated": "ipc", "split": "broadcast", "async": "broadcast"},
    syncs={
        "ipc": SyncRates(2048e6, 0.05e-3, 11e9, 1.0),
        "broadcast": SyncRates(2048e6, 0.05e-3, 18e9, 0.3),
        **COMMON_SYNCS,
    },
    offloads=Offloads(parameters=False, optimizer=False, sleep_level=1),
    hosts={
        "colocated": HostRates(3e-3, 15e-6, False),
        "split": HostRates(3e-3, 40e-6, False),
        "async": HostRates(3e-3, 40e-6, False),
    },
    trainer={
        "fsdp1": TrainerDefaults(training={"activation_checkpointing": "full"}),
        "fsdp2": TrainerDefaults(training={"activation_checkpointing": "full"}),
        "megatron": TrainerDefaults(
            strategy={"distributed_optimizer": True},
            expert_strategy={"moe_grouped_gemm": True},
            expert_parallelism={"dispatcher": "all-to-all"},
        ),
    },
    algorithms=("grpo", "ppo", "dapo", "rloo"),
    placements=("colocated", "split", "async"),
    controllers={
        placement: ControllerRates(1.0, 0.5, PHASES) for placement in ("colocated", "split", "async")
    },
    has_reference=False,
)
