"""verl's loop: PPO and its kin on FSDP or Megatron trainers, with vLLM or SGLang."""

from zsim.cost.inference.iteration import HostRates
from zsim.workflows.rl.framework import ControllerRates, Offloads, RlFramework, SyncRates

WORKFLOW = RlFramework(
    name="verl",
    engine="vllm",
    memory_utilization={"colocated": 0.5, "split": 0.5, "async": 0.5},
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    syncs={
        "colocated": SyncRates("ipc", 2048e6, 1e-3, 10e9, 1.0),
        "split": SyncRates("broadcast", 2048e6, 0.3e-3, 15e9, 1.0),
        "async": SyncRates("broadcast", 2048e6, 0.3e-3, 15e9, 1.0),
    },
    offloads=Offloads(parameters=False, optimizer=False, sleep_level=1),
    hosts={
        "colocated": HostRates(3e-3, 15e-6, False),
        "split": HostRates(3e-3, 40e-6, False),
        "async": HostRates(3e-3, 40e-6, False),
    },
    algorithms=("grpo", "ppo", "dapo", "rloo"),
    placements=("colocated", "split", "async"),
    controllers={
        "colocated": ControllerRates(5.0, 2.0),
        "split": ControllerRates(5.0, 2.0),
        "async": ControllerRates(1.0, 0.5),
    },
    has_reference=False,
)
