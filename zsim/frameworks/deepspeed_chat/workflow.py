"""DeepSpeed-Chat's PPO, whose hybrid engine generates with the trainer's own weights."""

from zsim.workflows.rl.framework import ControllerRates, Offloads, RlFramework, SyncRates, TrainerDefaults

SOURCES = {
    "defaults": "DeepSpeed edaa7221 deepspeed/runtime/hybrid_engine.py and config.py, DeepSpeedExamples "
    "45b4b715",
    "syncs": "all layers are gathered before each batch of answers (pin_parameters), adapters added to them, "
    "and no copy is handed over (deepspeed/runtime/hybrid_engine.py `generate`)",
    "models": "all four stay on the GPUs unless offload_reference_model says otherwise "
    "(applications/DeepSpeed-Chat/dschat/rlhf/rlhf_engine.py)",
    "controllers": "assumed: one process a GPU, without a controller",
}

WORKFLOW = RlFramework(
    name="DeepSpeed-Chat",
    engines={"generate": None},
    memory_utilization={},
    merges_adapters=True,
    keeps_reference=True,
    transports={"colocated": "ipc"},
    syncs={"ipc": SyncRates(1e9, 0.0, 1e12, 0.1)},
    offloads=Offloads(parameters=False, optimizer=False, sleep_level=0),
    algorithms=("ppo",),
    controllers={"colocated": ControllerRates(0.5, 0.0)},
    trainer={"deepspeed": TrainerDefaults(training={"activation_checkpointing": "full"})},
    enforces_eager=True,
    batching="padded",
    padding="cap",
    sources=SOURCES,
)
