"""OpenRLHF's loop: PPO and its kin by Ray actors on DeepSpeed, with vLLM."""

from math import inf

from zsim.workflows.rl.framework import (
    SINGLE_TENSOR_SECONDS,
    ControllerRates,
    Offloads,
    RlFramework,
    SyncRates,
    TrainerDefaults,
)

SOURCES = {
    "engines": "OpenRLHF 3c3be623 openrlhf/trainer/ray/vllm_engine.py, `distributed_executor_backend`",
    "defaults": "OpenRLHF 3c3be623 openrlhf/cli/train_ppo_ray.py",
    "reference": "`ref.offload` is off by default (openrlhf/cli/train_ppo_ray.py)",
    "log-probabilities": "asked for with is_correction_enable, which is False by default "
    "(openrlhf/trainer/ppo_utils/samples_generator.py, openrlhf/cli/train_ppo_ray.py)",
    "syncs": "every parameter gathered and sent by itself (openrlhf/trainer/ray/ppo_actor.py), as "
    "verl's old path did",
    "loop": "openrlhf/trainer/ppo_trainer.py; samples are padded to the longest of a micro-batch unless "
    "packing_samples is on (openrlhf/models/actor.py)",
    "controllers": "assumed as verl's before its workers fetched data themselves",
}

WORKFLOW = RlFramework(
    name="OpenRLHF",
    engines={"vllm": (256, 8192)},
    memory_utilization={"colocated": 0.5, "split": 0.95, "async": 0.95},
    transports={"colocated": "ipc", "split": "broadcast", "async": "broadcast"},
    syncs={
        "ipc": SyncRates(1e9, SINGLE_TENSOR_SECONDS, 20e9, 0.5),
        "broadcast": SyncRates(1e9, SINGLE_TENSOR_SECONDS, inf, 0.5),
    },
    offloads=Offloads(parameters=True, optimizer=True, sleep_level=1),
    algorithms=("ppo", "grpo", "dapo", "rloo"),
    controllers={placement: ControllerRates(3.0, 1.0) for placement in ("colocated", "split", "async")},
    trainer={"deepspeed": TrainerDefaults(training={"activation_checkpointing": "full"})},
    continues_rollouts=True,
    runs_engines_by_ray=True,
    returns_logprobs=False,
    keeps_reference=True,
    batching="padded",
    sources=SOURCES,
)
