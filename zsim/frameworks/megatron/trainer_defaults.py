"""Megatron's keys that loops of reinforcement learning set."""

from zsim.workflows.rl.framework import TrainerDefaults

DISTRIBUTED_OPTIMIZER = TrainerDefaults(
    strategy={"distributed_optimizer": True},
    expert_strategy={"moe_grouped_gemm": True},
    expert_parallelism={"dispatcher": "all-to-all"},
)
"""Those of loops whose other keys are left to the user."""
