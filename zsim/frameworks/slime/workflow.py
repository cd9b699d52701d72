"""slime's loop: Megatron trainers with SGLang."""

from math import inf

from zsim.workflows.rl.framework import (
    DISTRIBUTED_OPTIMIZER,
    SGLANG_SEQUENCES,
    ControllerRates,
    Offloads,
    RlFramework,
    SyncRates,
)

SOURCES = {
    "defaults": "slime 624b824a slime/utils/arguments.py, train.py, train_async.py",
    "syncs": "buckets of 512 MiB; by shared handles 355 billion parameters in 48 s of an early release (blog "
    "of v0.1.0), 15 GB/s; broadcasts are assumed as verl's",
    "controllers": "assumed as verl's",
}

WORKFLOW = RlFramework(
    name="slime",
    engines=("sglang",),
    memory_utilization={"colocated": 0.7, "split": 0.85, "async": 0.85},
    max_num_seqs=SGLANG_SEQUENCES,
    max_num_batched_tokens=8192,
    transports={"colocated": "ipc", "split": "broadcast", "async": "broadcast"},
    syncs={
        "ipc": SyncRates(512 * 2**20, 0.05e-3, 15e9, 1.0),
        "broadcast": SyncRates(512 * 2**20, 0.05e-3, inf, 0.5),
    },
    offloads=Offloads(parameters=True, optimizer=True, sleep_level=1),
    algorithms=("grpo", "ppo", "dapo", "rloo"),
    controllers={placement: ControllerRates(2.0, 1.0) for placement in ("colocated", "split", "async")},
    trainer={
        "megatron": DISTRIBUTED_OPTIMIZER,
    },
    has_reference=False,
    static_balance=False,
    sources=SOURCES,
)
