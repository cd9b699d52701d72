"""slime's loop: Megatron trainers with SGLang."""

from math import inf

from zsim.frameworks.megatron.trainer_defaults import DISTRIBUTED_OPTIMIZER
from zsim.workflows.rl.framework import (
    ControllerRates,
    Offloads,
    RlFramework,
    SyncRates,
)
from zsim.workflows.rollout.engine import SGLANG_SEQUENCES

SOURCES = {
    "defaults": "slime 624b824a slime/utils/arguments.py, train.py, train_async.py",
    "syncs": "buckets of 512 MiB; by shared handles 355 billion parameters in 48 s of an early release (blog "
    "of v0.1.0), 15 GB/s; broadcasts are assumed as verl's",
    "controllers": "assumed as verl's",
}

WORKFLOW = RlFramework(
    name="slime",
    engines={"sglang": (SGLANG_SEQUENCES, 8192)},
    memory_utilization={"colocated": 0.7, "split": 0.85, "async": 0.85},
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
