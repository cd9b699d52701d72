"""NeMo-RL's loop: GRPO on Megatron or DTensor trainers, with vLLM."""

from zsim.cost.inference.iteration import HostRates
from zsim.workflows.rl.framework import (
    COMMON_SYNCS,
    ControllerRates,
    Offloads,
    RlFramework,
    SyncRates,
    TrainerDefaults,
)

WORKFLOW = RlFramework(
    name="NeMo-RL",
    engine="vllm",
    memory_utilization={"colocated": 0.6, "split": 0.8, "async": 0.8},
    max_num_seqs=1024,
    max_num_batched_tokens=16384,
    transports={"colocated": "ipc", "split": "broadcast", "async": "broadcast"},
    syncs={
        "ipc": SyncRates(20e9, 0.5e-3, 30e9, 1.0),
        "broadcast": SyncRates(1.6e9, 0.05e-3, 90e9, 0.5),
        **COMMON_SYNCS,
    },
    offloads=Offloads(parameters=True, optimizer=True, sleep_level=1),
    hosts={
        "colocated": HostRates(3e-3, 25e-6, False, 0.09e-3),
        "split": HostRates(3e-3, 30e-6, False, 0.09e-3),
        "async": HostRates(3e-3, 30e-6, False, 0.09e-3),
    },
    trainer={
        "megatron": TrainerDefaults(
            strategy={
                "distributed_optimizer": True,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
                "grad_reduce_dtype": "bf16",
                "average_in_collective": True,
                "precision_aware_optimizer": True,
            },
            expert_strategy={"moe_grouped_gemm": True, "moe_router_dtype": "fp64"},
            expert_parallelism={"dispatcher": "all-to-all", "expert_tensor": 1},
        ),
    },
    algorithms=("grpo", "dapo", "rloo"),
    placements=("colocated", "split", "async"),
    controllers={
        "colocated": ControllerRates(5.0, 2.0),
        "split": ControllerRates(5.0, 2.0),
        "async": ControllerRates(1.0, 0.5),
    },
)
