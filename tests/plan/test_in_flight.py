"""Two micro-batches between forward and backward at once, as in a pipeline: 0F0 0F1 0B0 0B1 on one stage.

The toy transformer of conftest.py in fp32 on eight ranks: four blocks of 3,072 elements, embedding and head
of 1,600 each and a norm of 32 (with its bias), which FSDP2's root holds: 3,232 elements, 3,360 when every
dim 0 is padded to a multiple of 8.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.megatron.test_megatron import SHARDED
from zsim.errors import InputError
from zsim.frameworks.ddp.settings import DdpConfig
from zsim.frameworks.fsdp1.settings import Fsdp1Config
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.plan.actions import Action, no_pipeline
from zsim.plan.builder import PlanBuilder
from zsim.plan.framework_hooks import hooks_of
from zsim.plan.memory.tensors import tensor_changes
from zsim.plan.ops import Collective, Group, Plan, Program
from zsim.plan.passes.repeated_step import repeat_program
from zsim.plan.passes.single_thread import serialize_operators
from zsim.plan.pipeline.run_actions import run_actions
from zsim.plan.stage import DataParallel, Stage
from zsim.plan.workload.workload import make_workload
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

RANKS = 8
ROOT, BLOCK = 4 * 3360, 4 * 3072
Call = tuple[str, str, int]


def actions_of(text: str) -> list[Action]:
    """ "UNSHARD F0 B0" -> actions of stage 0."""
    found = []
    for word in text.split():
        kind: Any = word.rstrip("0123456789")
        number = word[len(kind) :]
        found.append(Action(kind, 0, int(number) if number else None))
    return found


IN_TURN = no_pipeline(2)[0]
IN_FLIGHT = actions_of("F0 F1 B0 B1")
TOLD = actions_of("UNSHARD F0 F1 B0 B1 REDUCE_GRAD RESHARD")


class Step:
    """A step of the toy under `strategy`, in the order of `actions`."""

    def __init__(self, toys: Any, strategy: Any, actions: list[Action], **training: Any) -> None:
        settings = toys.training(
            precision="fp32", gradient_accumulation_steps=2, optimizer="adamw", **training
        )
        builder = PlanBuilder([])
        stage = Stage(builder, make_workload(toys.transformer(), settings), DataParallel.regular(RANKS))
        owner = hooks_of(strategy).make(stage, strategy)
        run_actions(builder, {0: owner}, actions)
        self.program: Program = builder.program(owner.resident())
        begins = [begin for begin, _ in self.program.actions]
        self.begins = {str(action): begin for begin, action in self.program.actions}
        self.calls: list[Call] = []
        for number, op in enumerate(self.program.ops):
            if isinstance(op.work, Collective) and op.phase != "optimizer":
                place = max(at for at, begin in enumerate(begins) if begin <= number)
                self.calls.append((str(actions[place]), op.work.kind, op.work.bytes))

    def activations(self) -> Iterator[tuple[int, int]]:
        """(op, bytes held from then on) of each change."""
        held = 0
        for change in self.program.memory:
            if change.category == "activations" and change.device == "gpu":
                held += change.bytes
                yield change.op, held

    @property
    def peak(self) -> int:
        return max(held for _, held in self.activations())


def zero(stage: int, **zero_optimization: Any) -> Any:
    """DeepSpeed's strategy on the eight ranks."""
    config = {"zero_optimization": {"stage": stage, **zero_optimization}}
    job = resolve(
        Experiment(
            model="llama-3.2-1b",
            cluster="dgx-h100",
            gpus=RANKS,
            training={"sequence_length": 1024, "micro_batch_size": 1, "precision": "fp32"},
            strategy={"kind": "deepspeed", "config": config},
        )
    )
    return job.strategy


def fsdp2(reshards: bool = True, **changes: Any) -> Fsdp2Config:
    return Fsdp2Config(reshards, 1, "huggingface", "fp32", "fp32", no_sync=True, **changes)


FSDP1 = Fsdp1Config(
    "FULL_SHARD", 1, "huggingface", "BACKWARD_PRE", forward_prefetch=False, limit_all_gathers=True,
    param_dtype="fp32", reduce_dtype="fp32", no_sync=True,
)  # fmt: skip
DDP = DdpConfig(bucket_cap_bytes=10_485, first_bucket_cap_bytes=10_485)
MEGATRON = replace(SHARDED, param_dtype="fp32", checks_nan=False, bucket_size=4000)
OVERLAPPING = replace(MEGATRON, overlap_grad_reduce=True)


def strategies() -> dict[str, tuple[Any, list[Action]]]:
    return {
        "fsdp2": (fsdp2(), TOLD),
        "fsdp2 in host memory": (fsdp2(cpu_offload=True), TOLD),
        "fsdp2, not resharded": (fsdp2(reshards=False), TOLD),
        "fsdp1": (FSDP1, IN_FLIGHT),
        "ddp": (DDP, TOLD),
        "megatron": (OVERLAPPING, TOLD),
        "zero-1": (zero(1), TOLD),
        "zero-1 in host memory": (zero(1, offload_optimizer={"device": "cpu"}), TOLD),
        "deepspeed without zero": (zero(0), TOLD),
    }


@pytest.mark.parametrize("name", strategies())
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_memory_balances_whatever_the_order(toys: Any, name: str, checkpointing: str) -> None:
    """By category, device, owner, part and micro-batch: all that a step takes it gives back."""
    strategy, actions = strategies()[name]
    for order in (IN_TURN, actions):
        held: Counter[tuple[str, ...]] = Counter()
        sums: Counter[tuple[str, ...]] = Counter()
        for change in Step(toys, strategy, order, activation_checkpointing=checkpointing).program.memory:
            sums[change.category, change.device] += change.bytes
            if change.category == "activations":
                held[change.owner, str(change.micro_batch), change.device] += change.bytes
        assert not any(held.values())
        assert not any(sums.values()), sums


@pytest.mark.parametrize("name", strategies())
def test_activations_of_two_micro_batches_are_alive_at_once(toys: Any, name: str) -> None:
    """When B0 begins both forwards hold what they saved, twice what one holds when its backward begins."""
    strategy, actions = strategies()[name]
    one, two = Step(toys, strategy, IN_TURN), Step(toys, strategy, actions)

    def saved(step: Step) -> int:
        """By forwards that are done when the first backward begins; what is freed at that op is theirs."""
        begin = step.begins["0B0"]
        return sum(
            change.bytes
            for change in step.program.memory
            if change.category == "activations" and change.device == "gpu"
            if change.op < begin or (change.op == begin and change.bytes < 0)
        )

    assert saved(two) == 2 * saved(one) > 0
    assert two.peak == one.peak + saved(one)


def test_the_oldest_micro_batch_is_freed_first(toys: Any) -> None:
    """What attention saves in F0 goes in B0 and what it saves in F1 in B1: first made, first given back;
    "the newest of its owner" would take F1's in B0."""
    program = Step(toys, DDP, IN_FLIGHT).program
    backwards = [number for number, op in enumerate(program.ops) if op.name == "loss backward"]
    firsts = [number for number, op in enumerate(program.ops) if op.name == "loss"]
    made: dict[int, int] = {}
    freed: dict[int, int] = {}
    for change in tensor_changes(program):
        (made if change.bytes else freed)[change.tensor] = change.op
    lasting = [tensor for tensor, op in made.items() if op <= firsts[1] and freed[tensor] > backwards[0]]
    of_first = [tensor for tensor in lasting if made[tensor] <= firsts[0]]
    assert len(of_first) * 2 == len(lasting)
    assert all(freed[tensor] <= backwards[1] for tensor in of_first)
    assert all(freed[tensor] >= backwards[1] for tensor in set(lasting) - set(of_first))


def test_fsdp2_is_told_when_to_gather_and_reduce(toys: Any) -> None:
    """As torch's stage does it. UNSHARD gathers all; forward lets the blocks go, so F1 gathers them again,
    and so does B0, which keeps them for B1; REDUCE_GRAD reduces root and blocks in the order of modules."""
    gathers = [("0UNSHARD", "all_gather", ROOT), *[("0UNSHARD", "all_gather", BLOCK)] * 4]
    reductions = [("0REDUCE_GRAD", "reduce_scatter", size) for size in (ROOT, *[BLOCK] * 4)]
    again = [(action, "all_gather", BLOCK) for action in ("0F1", "0B0") for _ in range(4)]
    assert Step(toys, fsdp2(), TOLD).calls == gathers + again + reductions
    assert Step(toys, fsdp2(reshards=False), TOLD).calls == gathers + reductions


def test_ddp_reduces_in_the_last_backward(toys: Any) -> None:
    calls = Step(toys, DDP, IN_FLIGHT).calls
    assert {(action, kind) for action, kind, _ in calls} == {("0B1", "all_reduce")}
    assert [size for *_, size in calls] == [10624, 12288, 12288, 12288, 14592]
    assert Step(toys, DDP, TOLD).calls == calls


def test_megatron_starts_reductions_in_the_last_backward_and_finishes_at_the_end(toys: Any) -> None:
    """`is_last_microbatch` lets buckets go as they fill, unless the schedule says when;
    finalize_model_grads waits, and reduces them all where nothing overlaps."""
    overlapping = Step(toys, OVERLAPPING, IN_TURN).calls
    assert {(action, kind) for action, kind, _ in overlapping} == {("0B1", "reduce_scatter")}
    at_the_end = Step(toys, OVERLAPPING, TOLD).calls
    assert {action for action, *_ in at_the_end} == {"0REDUCE_GRAD"}
    assert [call[1:] for call in at_the_end] == [call[1:] for call in overlapping]
    assert [call[1:] for call in Step(toys, MEGATRON, IN_TURN).calls] == [call[1:] for call in at_the_end]


@pytest.mark.parametrize("stage", [0, 1])
def test_deepspeed_reduces_when_its_pipeline_engine_says(toys: Any, stage: int) -> None:
    """`_exec_reduce_grads` after the last backward: the calls of a last micro-batch, none before."""
    told, in_turn = (Step(toys, zero(stage), order).calls for order in (TOLD, IN_TURN))
    assert {action for action, *_ in told} == {"0REDUCE_GRAD"}
    assert [call[1:] for call in told] == [call[1:] for call in in_turn]


def test_zero_1_makes_its_bucket_when_it_reduces(toys: Any) -> None:
    """reduce_gradients(pipeline_parallel=True) makes one; without a pipeline backward does."""
    size = 4 * zero(1).zero.reduce_bucket_size

    def phase_of_bucket(order: list[Action]) -> list[int]:
        program = Step(toys, zero(1), order).program
        last = max(number for number, op in enumerate(program.ops) if op.name.endswith("emb backward"))
        return [int(change.op > last) for change in program.memory if change.bytes == size]

    assert phase_of_bucket(TOLD) == [1]
    assert phase_of_bucket(IN_TURN) == [0]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (zero(2), "stage: found 2 under a pipeline, expected 0 or 1"),
        (zero(1, overlap_comm=True), "overlap_comm: expected false under a pipeline"),
        (zero(3), "stage: found 3 under a pipeline, expected 0 or 1"),
    ],
)
def test_what_deepspeed_does_not_run_in_a_pipeline_is_refused(toys: Any, strategy: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Step(toys, strategy, actions_of("F0 B0 REDUCE_GRAD"))


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torch_makes_the_same_calls_in_the_same_actions(toys: Any) -> None:
    """run_torch_pipeline.py: the lowered actions, and FSDP2's and DDP's collectives in each of them."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.plan.run_torch_pipeline"],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert [str(action) for action in TOLD] == answer["actions"]
    for reshards in (True, False):
        calls = Step(toys, fsdp2(reshards), TOLD).calls
        assert [list(call) for call in calls] == answer["fsdp2"][str(reshards)]
    assert [list(call) for call in Step(toys, DDP, IN_FLIGHT).calls] == answer["ddp"]


def test_a_program_says_at_which_op_each_action_begins(toys: Any) -> None:
    """Forwards and backwards in their order, the first after "begin step"; a second step has them
    again, later by the first's ops."""
    program = Step(toys, DdpConfig(), IN_TURN).program
    assert [str(action) for _, action in program.actions] == ["0F0", "0B0", "0F1", "0B1"]
    phases = [program.ops[first].phase for first, _ in program.actions]
    assert phases == ["forward", "backward", "forward", "backward"]
    repeated, count = repeat_program(program), len(program.ops)
    assert repeated.actions[4:] == tuple((first + count, action) for first, action in program.actions)
    assert [repeated.ops[first].phase for first, _ in repeated.actions] == phases * 2


def test_copies_around_reduce_scatters_put_actions_off(toys: Any) -> None:
    """REDUCE_GRAD reduces FSDP2's four blocks and the root, on CPUs with a copy before each and one after."""
    program = Step(toys, fsdp2(), TOLD).program
    plan = Plan.uniform("by hand", RANKS, program, {"shard": Group.regular("shard", RANKS)})
    copied = serialize_operators(plan, (), copies_scatters=True).program
    shifts = [new - old for (new, _), (old, _) in zip(copied.actions, program.actions, strict=True)]
    assert shifts == [0, 0, 0, 0, 0, 0, 10]
