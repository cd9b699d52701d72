"""The walk through a step: which hook is called where, and what activations cost meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.steps import walk_step
from zsim.plan.builder import PlanBuilder
from zsim.plan.hooks import Hooks
from zsim.plan.make import make_plan
from zsim.plan.ops import Kernels
from zsim.plan.stage import Stage
from zsim.plan.walk import RESIDUAL
from zsim.plan.workload.workload import ModuleCall, Segment, Workload, make_workload
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.model.huggingface import load_model


class Recorder(Hooks):
    """Writes down every hook, and in which phase it was called."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(Stage(PlanBuilder([]), workload))
        self.calls: list[str] = []

    def _note(self, text: str) -> None:
        self.calls.append(text)

    def begin_step(self) -> None:
        self._note("begin_step")

    def begin_forward(self, micro_batch: int) -> None:
        self._note(f"begin_forward {micro_batch} {self.builder.phase}")

    def pre_forward(self, segment: Segment) -> None:
        self._note(f"before_forward {segment.name}")

    def post_forward(self, segment: Segment) -> None:
        self._note(f"after_forward {segment.name}")

    def end_forward(self) -> None:
        self._note("end_forward")

    def begin_backward(self, micro_batch: int, *, is_last: bool, schedule_manages_sharding: bool) -> None:
        self._note(f"begin_backward {micro_batch} {is_last} {schedule_manages_sharding} {self.builder.phase}")

    def pre_backward(self, segment: Segment) -> None:
        self._note(f"before_backward {segment.name}")

    def post_backward(self, segment: Segment) -> None:
        self._note(f"after_backward {segment.name}")

    def pre_module(self, call: ModuleCall) -> None:
        self._note(f"> {call.name} {self.builder.phase}")

    def post_module(self, call: ModuleCall) -> None:
        self._note(f"< {call.name} {self.builder.phase}")

    def gradient_ready(self, call: ModuleCall) -> None:
        self._note(f"gradient {call.name}")

    def end_backward(self) -> None:
        self._note("end_backward")

    def optimizer_step(self) -> None:
        self._note(f"optimizer {self.builder.phase}")


def walk(workload: Workload, num_micro_batches: int = 1) -> Recorder:
    recorder = Recorder(workload)
    walk_step(recorder, num_micro_batches)
    return recorder


def toy(toys: Any, checkpointing: str = "none", num_blocks: int = 1) -> Workload:
    return make_workload(toys.transformer(num_blocks), toys.training(activation_checkpointing=checkpointing))


def test_hooks_are_called_where_pytorch_calls_them(toys: Any) -> None:
    """One block of one Linear: forward through the segments, backward in reverse, gradients after their
    module's backward."""
    workload = make_workload(toys.linear_blocks([(8, 8)]), toys.training())
    expected = """
        begin_step
        begin_forward 0 forward
        before_forward before
        after_forward before
        before_forward layers.0
        > layers.0.linear forward
        < layers.0.linear forward
        after_forward layers.0
        before_forward after
        > loss forward
        < loss forward
        after_forward after
        end_forward
        begin_backward 0 True False backward
        before_backward after
        > loss backward
        gradient loss
        < loss backward
        after_backward after
        before_backward layers.0
        > layers.0.linear backward
        gradient layers.0.linear
        < layers.0.linear backward
        after_backward layers.0
        before_backward before
        after_backward before
        end_backward
        optimizer optimizer
    """
    assert walk(workload).calls == [line.strip() for line in expected.strip().splitlines()]


def test_without_a_pipeline_backward_follows_forward_and_one_is_the_last(toys: Any) -> None:
    calls = walk(toy(toys), 3).calls
    begins = [call for call in calls if call.startswith(("begin_forward", "begin_backward"))]
    assert begins == [
        "begin_forward 0 forward",
        "begin_backward 0 False False backward",
        "begin_forward 1 forward",
        "begin_backward 1 False False backward",
        "begin_forward 2 forward",
        "begin_backward 2 True False backward",
    ]
    assert calls.count("optimizer optimizer") == 1


def test_a_checkpointed_block_is_recomputed_before_its_backward(toys: Any) -> None:
    """All of it but the last product and the add behind it: their inputs are all that backward needs. The
    last linear's hooks run all the same, since recomputation enters it."""
    calls = walk(toy(toys, "full")).calls
    recomputed = [call.split()[1] for call in calls if call.endswith(" recompute") and call.startswith(">")]
    prefix = "model.layers.0."
    assert recomputed == [
        prefix + name
        for name in ("attn.qkv", "attn.core", "attn.o", "attn_residual", "mlp.up", "mlp.act", "mlp.down")
    ]
    entered = calls.index("> model.layers.0.mlp.down recompute")
    assert "< model.layers.0.mlp.down recompute" not in calls
    assert calls.index("before_backward model.layers.0") < entered
    assert entered < calls.index("> model.layers.0.residual backward")


def test_selective_checkpointing_recomputes_attention_alone(toys: Any) -> None:
    ops = walk(toy(toys, "selective")).builder.ops
    assert [op.name for op in ops if op.phase == "recompute"] == ["model.layers.0.attn.core recompute"]


def activation_levels(recorder: Recorder) -> list[int]:
    levels, now = [], 0
    for change in recorder.builder.memory:
        now += change.bytes
        levels.append(now)
    return levels


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_activations_are_all_freed_at_the_end(toys: Any, checkpointing: str) -> None:
    levels = activation_levels(walk(toy(toys, checkpointing, 3), 2))
    assert levels[-1] == 0
    assert min(levels) >= 0


def test_without_checkpointing_every_block_adds_what_it_saves(toys: Any) -> None:
    """The level at the end of forward grows by the same number with each block."""

    def at_end_of_forward(num_blocks: int, checkpointing: str) -> int:
        workload = toy(toys, checkpointing, num_blocks)
        builder = walk(workload).builder
        first = next(i for i, op in enumerate(builder.ops) if op.phase == "backward")
        return sum(c.bytes for c in builder.memory if c.op <= first)

    saved = sum(call.work.saved_bytes for call in toy(toys).segments[1].calls)
    assert at_end_of_forward(3, "none") - at_end_of_forward(2, "none") == saved
    # with full checkpointing a block keeps its input: 6 tokens x 16 x 2 bytes
    assert at_end_of_forward(3, "full") - at_end_of_forward(2, "full") == 6 * 16 * 2


def test_the_residual_streams_gradient_comes_after_the_heads(toys: Any) -> None:
    """Head and loss go first, without it: what they need for themselves is not beside it."""
    workload = toy(toys)
    builder = walk(workload).builder
    made, freed = [change for change in builder.memory if change.owner == RESIDUAL]
    assert (made.bytes, freed.bytes) == (workload.residual_bytes, -workload.residual_bytes)
    assert builder.ops[made.op].name == "model.norm backward"
    assert builder.ops[made.op - 1].name == "lm_head backward"
    gemma = make_workload(load_model("gemma2-9b"), toys.training())  # its logits are capped behind the head
    builder = walk(gemma).builder
    made = next(change for change in builder.memory if change.owner == RESIDUAL)
    assert builder.ops[made.op - 1].name == "lm_head backward"
    blocks = make_workload(toys.linear_blocks([(8, 8)]), toys.training())  # no norm before the loss
    builder = walk(blocks).builder
    made = next(change for change in builder.memory if change.owner == RESIDUAL)
    assert builder.ops[made.op].name == "layers.0.linear backward"


def test_op_phases_name_where_the_work_belongs(toys: Any) -> None:
    ops = walk(toy(toys, "full")).builder.ops
    forward = [op.name for op in ops if op.phase == "forward" and op.work]
    backward = [op.name for op in ops if op.phase == "backward" and op.work]
    assert (forward[0], forward[-1]) == ("model.emb", "loss")
    assert (backward[0], backward[-1]) == ("loss backward", "model.emb backward")


@pytest.mark.parametrize(
    ("training", "parallelism"),
    [
        ({"attention": "flash"}, {"context": 2}),
        ({"activation_checkpointing": "selective"}, {}),
    ],
)
def test_every_launch_of_a_layer_in_eager_mode_pays_its_dispatch(
    training: dict[str, Any], parallelism: dict[str, Any]
) -> None:
    """Those behind a layer's collectives and those that are recomputed by themselves, too; the layer's own
    time is paid once in a direction."""
    layers = {"sequence_length": 512, "compile": False, **training}
    job = resolve(
        Experiment(model="llama-3.2-1b", cluster="dgx-h100", gpus=8, training=layers, parallelism=parallelism)
    )
    ops = [op for op in make_plan(job).programs[0].ops if op.module.startswith("model.layers.3.")]
    launched = [op for op in ops if isinstance(op.work, Kernels) and op.launches]
    assert {op.overhead for op in launched} == {"eager_call", "eager_node"}
    assert any(op.events == 0 for op in launched)
    of_one = [op for op in launched if op.module.endswith("self_attn.q_proj") and op.phase == "forward"]
    assert sum(op.events for op in of_one) == 1
