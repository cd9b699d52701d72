"""NeMo-RL's loop: GRPO on Megatron or DTensor trainers, with vLLM."""

from zsim.cost.inference.iteration import HostRates
from zsim.workflows.rl.framework import ControllerRates, Offloads, RlFramework, SyncRates

WORKFLOW = RlFramework(
    name="NeMo-RL",
    engine="vllm",
    memory_utilization={"colocated": 0.6, "split": 0.8, "async": 0.8},
    max_num_seqs=1024,
    max_num_batched_tokens=16384,
    syncs={
        "colocated": SyncRates("ipc", 20e9, 1e-3, 10e9, 1.0),
        "split": SyncRates("broadcast", 1.6e9, 0.1e-3, 90e9, 1.0),
        "async": SyncRates("broadcast", 1.6e9, 0.1e-3, 90e9, 1.0),
    },
    offloads=Offloads(parameters=True, optimizer=True, sleep_level=1),
    hosts={
        "colocated": HostRates(3e-3, 15e-6, False),
        "split": HostRates(3e-3, 40e-6, False),
        "async": HostRates(3e-3, 40e-6, False),
    },
    algorithms=("grpo", "dapo", "rloo"),
    placements=("colocated", "split", "async"),
    controllers={
        "colocated": ControllerRates(5.0, 2.0),
        "split": ControllerRates(5.0, 2.0),
        "async": ControllerRates(1.0, 0.5),
    },
)
