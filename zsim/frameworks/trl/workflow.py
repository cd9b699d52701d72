"""TRL's GRPOTrainer and its kin on transformers' Trainer, with vLLM."""

from math import inf

from zsim.workflows.rl.framework import (
    COMMON_SYNCS,
    SINGLE_TENSOR_SECONDS,
    ControllerRates,
    Offloads,
    RlFramework,
    SyncRates,
    TrainerDefaults,
)

SOURCES = {
    "defaults": "huggingface/trl f2cd5771 trl/trainer/grpo_config.py; max_num_batched_tokens: "
    "trl/generation/vllm_generation.py",
    "loop": "trl/trainer/grpo_trainer.py: prompts and completions of a generation are padded each to their "
    "longest, and with vLLM old log-probabilities are computed for the correction of its own",
    "syncs": "parameter by parameter with a gather each, in the trainer's own type "
    "(trl/generation/vllm_generation.py; counted in validation/rl/call_orders.json), as verl's old "
    "path did",
    "reference": "loaded as the policy is (trl/trainer/grpo_trainer.py `create_model_from_path`)",
    "adapters": "`merge_adapter` before a sync (trl/generation/vllm_generation.py `sync_weights`)",
    "controllers": "assumed: one process a GPU, without a controller",
}

WORKFLOW = RlFramework(
    name="TRL",
    engines={"vllm": (256, 4096)},
    memory_utilization={"colocated": 0.3, "split": 0.9},
    transports={"colocated": "ipc", "split": "broadcast"},
    syncs={
        "ipc": SyncRates(1e9, SINGLE_TENSOR_SECONDS, 20e9, 0.3),
        "broadcast": SyncRates(1e9, SINGLE_TENSOR_SECONDS, inf, 0.3),
        "filesystem": COMMON_SYNCS["filesystem"],
    },
    offloads=Offloads(parameters=False, optimizer=False, sleep_level=0),
    algorithms=("grpo", "dapo", "rloo", "online-dpo"),
    controllers={placement: ControllerRates(1.0, 0.5) for placement in ("colocated", "split")},
    trainer={
        kind: TrainerDefaults(training={"activation_checkpointing": "full"})
        for kind in ("ddp", "fsdp1", "fsdp2", "deepspeed")
    },
    has_reference=False,
    has_one_dtype=True,
    merges_adapters=True,
    batching="padded",
    padding="sides",
    sources=SOURCES,
)
