"""AReaL's loop: interruptible rollouts by SGLang beside Megatron or FSDP2 trainers."""

from math import inf

from zsim.frameworks.megatron.trainer_defaults import DISTRIBUTED_OPTIMIZER
from zsim.workflows.rl.framework import (
    COMMON_SYNCS,
    ControllerRates,
    Offloads,
    RlFramework,
    SyncRates,
    TrainerDefaults,
)
from zsim.workflows.rollout.engine import SGLANG_SEQUENCES

SOURCES = {
    "defaults": "AReaL 4aef98d8 areal/api/cli_args.py and io_struct.py; it leaves the tokens of an iteration "
    "to vLLM, whose servers take 8,192 on GPUs of 70 GiB but A100 (0.11 vllm/engine/arg_utils.py)",
    "loop": "areal/infra/staleness_manager.py; running requests stop for new weights and compute their "
    "caches again",
    "syncs": "assumed as verl's broadcasts",
    "controllers": "assumed: no controller that data goes through",
}

WORKFLOW = RlFramework(
    name="AReaL",
    engines={"sglang": (SGLANG_SEQUENCES, 32768), "vllm": (256, 8192)},
    memory_utilization={"split": 0.9, "async": 0.9},
    transports={"split": "broadcast", "async": "broadcast"},
    syncs={"broadcast": SyncRates(2**30, 0.05e-3, inf, 0.5), "filesystem": COMMON_SYNCS["filesystem"]},
    offloads=Offloads(parameters=False, optimizer=False, sleep_level=0),
    algorithms=("grpo", "ppo", "dapo", "rloo"),
    controllers={placement: ControllerRates(1.0, 0.5) for placement in ("split", "async")},
    trainer={
        "fsdp2": TrainerDefaults(training={"activation_checkpointing": "full"}),
        "megatron": DISTRIBUTED_OPTIMIZER,
    },
    has_reference=False,
    recomputes_logprobs=False,
    static_balance=False,
    continues_rollouts=True,
    recomputes_caches=True,
    sources=SOURCES,
)
