"""NeMo-RL's loop: GRPO on Megatron or DTensor trainers, with vLLM."""

from math import inf

from zsim.workflows.rl.framework import (
    COMMON_SYNCS,
    ControllerRates,
    Offloads,
    RlFramework,
    SyncRates,
    TrainerDefaults,
)

SOURCES = {
    "defaults": "NVIDIA-NeMo/RL 7ea279ab examples/configs/grpo_math_1B.yaml",
    "controllers": "fitted to six steps of NeMo-RL v0.5 (docs/about/performance-summary.md at 9dbd9adc9)",
    "syncs": "assumed: verl's fitted rates, as both export Megatron's parameters one by one into buckets "
    "that vLLM loads, and no sync of NeMo-RL's by either way is there to fit to. By handles verl's sender "
    "waits until a bucket is loaded (v0.8.0 verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py), "
    "while NeMo-RL's fills another (v0.4.0 and v0.5.0 nemo_rl/models/policy/utils.py, "
    "`stream_weights_via_ipc_zmq_impl`): half of the time, as if both took as long. Buckets of 0.3 of the "
    "free memory by shared handles (nemo_rl/algorithms/grpo.py), of 0.02 of the memory by broadcasts, whose "
    "group has all ranks of the trainer (nemo_rl/utils/packed_tensor.py and "
    "nemo_rl/weight_sync/collective_weight_synchronizer.py)",
    "engines": "v0.5.0 nemo_rl/models/generation/vllm/vllm_worker.py, `distributed_executor_backend`",
    "adapters": "docs/guides/lora.md, the merge-weight approach of GRPO",
    "loop": "nemo_rl/algorithms/grpo.py; prompts in flight: the semaphore of AsyncTrajectoryCollector "
    "(nemo_rl/algorithms/async_utils.py at 0a27b1f4)",
    "packing": "v0.4.0 c751f811 nemo_rl/models/policy/megatron_policy_worker.py `pad_full_seq_to`, v0.5.0 "
    "6c708930 nemo_rl/models/megatron/common.py `_get_pack_sequence_parameters_for_megatron`",
}

WORKFLOW = RlFramework(
    name="NeMo-RL",
    engines={"vllm": (1024, 16384), "sglang": (1024, 16384), "trtllm": (1024, 16384)},
    memory_utilization={"colocated": 0.6, "split": 0.8, "async": 0.8},
    transports={"colocated": "ipc", "split": "broadcast", "async": "broadcast"},
    syncs={
        "ipc": SyncRates(20e9, 0.05e-3, 22e9, 1.0),
        "broadcast": SyncRates(1.6e9, 0.05e-3, inf, 0.3, trainer_joins=True),
        **COMMON_SYNCS,
    },
    offloads=Offloads(parameters=True, optimizer=True, sleep_level=1),
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
    algorithms=("grpo", "ppo", "dapo", "rloo"),
    merges_adapters=True,
    in_flight="staleness",
    runs_engines_by_ray=True,
    pads_for_stages=True,
    padding="rollout",
    controllers={
        "colocated": ControllerRates(5.0, 2.0),
        "split": ControllerRates(5.0, 2.0),
        "async": ControllerRates(1.0, 0.5),
    },
    sources=SOURCES,
)
