"""prime-rl's loop: an FSDP2 trainer and vLLM servers, asynchronous."""

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
    "defaults": "prime-rl 559b4477 packages/prime-rl-configs/src/prime_rl/configs",
    "syncs": "by a shared file system unless told otherwise; 3 GB/s is assumed, and broadcasts as verl's",
    "loop": "groups that get older than max_off_policy_steps are cancelled, the others go on over updates; "
    "at most 1,024 rollouts run, and none starts while more than one batch has ended that the next weights "
    "are not from (configs/orchestrator.py `ConcurrencyConfig`, orchestrator/orchestrator.py `TARGET_LAG`). "
    "Engines alone keep their caches from overflowing. Before 0630b7bf as many ran as a step has. A batch is "
    "of the groups that end first, each with what is left of it (004274ec orchestrator/train_sink.py `add`, "
    "`process_group`; dispatcher.py `on_version_pending`)",
    "adapters": "all weights are of `optimization_dtype`, fp32 (src/prime_rl/trainer/model.py)",
    "controllers": "assumed: an orchestrator beside the trainer",
}

WORKFLOW = RlFramework(
    name="prime-rl",
    engines={"vllm": (1024, 8192)},
    memory_utilization={"async": 0.9},
    transports={"async": "filesystem"},
    syncs={"broadcast": SyncRates(2e9, 0.05e-3, inf, 0.5), "filesystem": COMMON_SYNCS["filesystem"]},
    offloads=Offloads(parameters=False, optimizer=False, sleep_level=0),
    algorithms=("grpo", "rloo", "dapo"),
    controllers={"async": ControllerRates(1.0, 0.5)},
    trainer={
        "fsdp2": TrainerDefaults(
            training={"activation_checkpointing": "full", "compile": True},
            adapter_training={"frozen_dtype": "fp32"},
        )
    },
    has_reference=False,
    recomputes_logprobs=False,
    continues_rollouts=True,
    in_flight=1024,
    max_staleness=8,
    trains_finished_first=True,
    max_batches_ahead=1,
    sources=SOURCES,
)
