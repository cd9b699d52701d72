"""NeMo-RL's loop: GRPO on Megatron or DTensor trainers, with vLLM."""

from zsim.workflows.rl.framework import (
    COMMON_SYNCS,
    VLLM_IN_LOOP,
    VLLM_SERVED,
    ControllerRates,
    Offloads,
    RlFramework,
    SyncRates,
    TrainerDefaults,
)

SOURCES = {
    "defaults": "NVIDIA-NeMo/RL 7ea279ab examples/configs/grpo_math_1B.yaml",
    "controllers": "fitted to six steps of NeMo-RL v0.5 (docs/about/performance-summary.md at 9dbd9adc9)",
    "syncs": "orders of magnitude of pull requests 449, 638 and 1379: 30 GB/s through shared handles "
    "after metadata "
    "of every tensor, 90 GB/s by packed broadcasts",
    "loop": "nemo_rl/algorithms/grpo.py",
}

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
    hosts={"colocated": VLLM_IN_LOOP, "split": VLLM_SERVED, "async": VLLM_SERVED},
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
    sources=SOURCES,
)
