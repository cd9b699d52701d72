"""DeepCompile: where its passes put gathers, what stays gathered, how gradients are reduced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import zsim
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.stage3.compiled_activations import (
    SavedTensor,
    moved_activations,
    trim_moves,
)
from zsim.frameworks.deepspeed.stage3.compiled_graph import (
    CompiledGraphs,
    gathers_ahead,
    kept_gathered,
    returns_of_states,
    states_that_leave,
)
from zsim.plan.checks import check_plan
from zsim.plan.make import plan_basis, plan_of
from zsim.plan.memory.tensors import tensor_changes
from zsim.plan.ops import Collective, Copy, Plan
from zsim.report.job_features import strategy_name
from zsim.specs.experiment.resolve import resolve

MODEL = {
    "model_type": "gpt2", "n_embd": 1024, "n_layer": 2, "n_head": 16, "n_positions": 128, "vocab_size": 4096,
}  # fmt: skip
NUMEL = 29_519_872  # two blocks of 12,596,224, the rest 4,327,424 with a tied head; all divide by four
GB = 10**9


def job(
    steps: int = 1, *, experiment: dict[str, Any] | None = None, training: dict[str, Any] | None = None,
    block: dict[str, Any] | None = None, optimizer: str | None = None, **zero: Any,
) -> Any:  # fmt: skip
    config = {
        "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": steps,
        "zero_optimization": {"stage": 3, "param_persistence_threshold": 0, **zero},
        "compile": {"deepcompile": True, **(block or {})},
    }  # fmt: skip
    if optimizer is not None:
        config["optimizer"] = {"type": optimizer, "params": {"lr": 1e-3}}
    given: dict[str, Any] = {"model": MODEL, "cluster": "dgx-h100", "gpus": 4, **(experiment or {})}
    strategy = {"kind": "deepspeed", "config": config, **given.pop("strategy", {})}
    table = {"sequence_length": 128, **(training or {})}
    return resolve(zsim.Experiment(**given, training=table, strategy=strategy))


def plan(steps: int = 1, tensor_bytes: int | None = None, **changes: Any) -> Plan:
    """The plan, on GPUs where tensors may take `tensor_bytes`."""
    resolved = job(steps, **changes)
    basis = plan_basis(resolved)
    config = resolved.strategy
    assert isinstance(config, DeepSpeedConfig)
    assert config.deep_compile is not None
    if tensor_bytes is not None:
        config = replace(config, deep_compile=replace(config.deep_compile, tensor_bytes=tensor_bytes))
    return plan_of(replace(basis, strategy=config))


def calls(
    found: Plan, kind: str, phases: tuple[str, ...] = ("forward", "recompute", "backward")
) -> list[int]:
    ops = found.programs[0].ops
    works = [op.work for op in ops if op.phase in phases and isinstance(op.work, Collective)]
    return [work.bytes for work in works if work.kind == kind]


def test_with_room_every_parameter_is_gathered_once_a_step() -> None:
    """80 GB hold all of 59 MB: forward of the first micro-batch gathers them in groups, nobody else does."""
    for steps in (1, 3):
        found = plan(steps)
        assert sum(calls(found, "all_gather")) == 2 * NUMEL
        assert calls(found, "all_gather", ("backward",)) == []
        check_plan(found)


def test_without_room_each_graph_gathers_what_it_reads() -> None:
    """Forward reads all. Backward reads neither the positions (128 x 1024) nor, but for the tied head, the
    embedding. Nothing is carried ahead of where it is needed, so every parameter has its own call.
    """
    found = plan(2, tensor_bytes=0)
    assert sum(calls(found, "all_gather")) == 2 * (2 * 2 * NUMEL - 2 * 128 * 1024)
    sizes = calls(found, "all_gather", ("forward",))
    assert max(sizes) == 2 * 4 * 1024 * 1024  # an MLP's matrix, by itself
    check_plan(found)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_no_memory_of_the_stream_that_copies_them(stage: int) -> None:
    """Backward makes them on the compute stream."""
    program = plan(tensor_bytes=0, stage=stage).program
    assert "gradient_copy" not in {change.stream for change in tensor_changes(program) if change.bytes}


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("tensor_bytes", [0, 400_000_000, None])
def test_a_step_gives_back_what_it_takes(tensor_bytes: int | None, checkpointing: str) -> None:
    found = plan(2, tensor_bytes, training={"activation_checkpointing": checkpointing})
    left: dict[str, int] = {}
    for change in found.programs[0].memory:
        left[change.category] = left.get(change.category, 0) + change.bytes
    assert {category: size for category, size in left.items() if size} == {}


def test_a_checkpointed_block_stays_gathered_from_recomputation_to_backward() -> None:
    """So that recomputation gathers a block's weights and backward has no gather of its own but the head's,
    which are in it before."""
    found = plan(1, tensor_bytes=0, training={"activation_checkpointing": "full"})
    ops = [op for op in found.programs[0].ops if isinstance(op.work, Collective)]
    names = [op.name for op in ops if op.phase == "backward" and op.work.kind == "all_gather"]  # type: ignore[union-attr]
    assert names
    assert not [name for name in names if ".h." in name and "mlp.c_fc" in name]


def test_gradients_take_turns_in_two_buckets_and_the_host_waits_once_a_backward() -> None:
    """Buckets of 13 million elements: the final norm (2,048), the second block (12,596,224) and the last bias
    of the first (1,024), then what is left of that block and the positions (131,072), then the embedding.
    """
    found = plan(2, reduce_bucket_size=13_000_000)
    scatters = calls(found, "reduce_scatter")
    assert scatters == 2 * [2 * 12_599_296, 2 * 12_726_272, 2 * 4_194_304]
    waits = [op for op in found.programs[0].ops if op.name == "end of backward"]
    assert len(waits) == 2
    assert all(op.host_waits for op in waits)
    buffers = [memory.bytes for memory in found.resident if memory.category == "buffers"]
    assert 2 * 2 * 13_000_000 in buffers
    single = plan(2, reduce_bucket_size=13_000_000, block={"double_buffer": False})
    assert 2 * 13_000_000 in [memory.bytes for memory in single.resident]


def test_a_gradient_larger_than_a_bucket_makes_it_as_large() -> None:
    buffers = [m.bytes for m in plan(reduce_bucket_size=1000).resident if m.category == "buffers"]
    assert 2 * 2 * 4096 * 1024 in buffers


FORWARD = tuple(("forward", name) for name in "abcd")


def graphs(gathers: tuple[tuple[int, ...], ...]) -> CompiledGraphs:
    return CompiledGraphs(FORWARD, 4, gathers, gathers)  # type: ignore[arg-type]


def test_gathers_go_to_the_start_of_a_graph_where_there_is_room() -> None:
    """Equal sizes are not cheaper in one call: 1.2 x 1 GB is below 2 GB. A tenth of the size joins the call
    of its reader, 1.2 x 1 above 1.1."""
    equal = graphs(((0,), (1,), (2,), ()))
    assert gathers_ahead(equal, [0] * 4, [GB // 2] * 3, 80 * GB) == {0: ((0,), (1,), (2,))}
    small = graphs(((0,), (1, 2), (), ()))
    assert gathers_ahead(small, [0] * 4, [GB // 2, GB // 20, GB // 2], 80 * GB) == {0: ((0,), (1, 2))}


def test_gathers_wait_where_memory_or_four_gigabytes_say_so() -> None:
    """Node b has 79 of 80 GB at most, so that the 2 and 1 GB of c and d stay behind it. Of three times 1.5 GB
    only two are carried to the start."""
    tight = graphs(((), (), (0,), (1,)))
    assert gathers_ahead(tight, [0, 79 * GB, 0, 0], [2 * GB, 1 * GB], 80 * GB) == {2: ((0,), (1,))}
    many = graphs(((), (0,), (1,), (2,)))
    found = gathers_ahead(many, [0] * 4, [3 * GB // 2] * 3, 80 * GB)
    assert found == {0: ((0,), (1,)), 1: ((2,),)}


def test_the_smallest_parameters_stay_gathered_until_one_does_not_fit() -> None:
    """In order of size 2 + 3 fit into 9, 5 does not, and nothing behind it is tried."""
    found = kept_gathered(graphs(((0, 1), (2,), (3,), ())), [5, 2, 3, 7], 9)
    assert found == {1, 2}


def test_states_leave_until_the_others_fit_and_return_as_memory_allows() -> None:
    """4 + 4 + 4 beside a peak of 5 do not fit into 10, 4 alone does: two leave. Behind the second node the
    peaks ahead are 6 and 3 of 10: there is room for less than 4 beside 6, and behind the third for one beside
    3 (7, and 11 with the second). The second returns at the end."""
    assert states_that_leave([4, 4, 4], 5, 10) == 2
    assert states_that_leave([4, 4, 4], 11, 10) == 3
    assert states_that_leave([4], 0, 10) == 0
    assert returns_of_states([4, 4], range(7, 10), [8, 6, 3], 10) == {9: (0, 1)}
    assert returns_of_states([4, 4], range(7, 11), [8, 6, 3, 2], 10) == {9: (0,), 10: (1,)}
    assert returns_of_states([3, 4], range(7, 10), [1, 1, 1], 20) == {7: (0, 1)}


def copies(found: Plan, direction: str, phase: str) -> list[int]:
    ops = [op for op in found.programs[0].ops if op.phase == phase]
    works = [op.work for op in ops if isinstance(op.work, Copy)]
    return [work.bytes for work in works if work.direction == direction]


@pytest.mark.parametrize("steps", [1, 2])
def test_without_room_all_states_leave_at_the_start_and_return_at_the_end(steps: int) -> None:
    """Two sub-groups, each with two moments and masters of 4 bytes an element, for every micro-batch again.
    No gather is issued ahead. With room nothing moves."""
    changes: dict[str, Any] = {"block": {"offload_opt_states": True}, "sub_group_size": 4_000_000}
    found = plan(steps, tensor_bytes=0, **changes)
    sizes = copies(found, "d2h", "forward")
    assert len(sizes) == 6 * steps
    assert sum(sizes) == 12 * NUMEL // 4 * steps
    assert copies(found, "h2d", "backward") == sizes
    names = [op.name for op in found.programs[0].ops]
    assert names.count("optimizer states are back") == steps
    assert max(calls(found, "all_gather", ("forward",))) == 2 * 4 * 1024 * 1024
    check_plan(found)
    host = [m.bytes for m in found.resident if m.device == "host" and m.category == "optimizer_states"]
    assert host == [12 * NUMEL // 4]
    roomy = plan(steps, **changes)
    assert copies(roomy, "d2h", "forward") == []
    check_plan(roomy)


ACTIVATIONS: dict[str, Any] = {
    "experiment": {"model": {**MODEL, "n_positions": 4096}}, "block": {"offload_activation": True},
}  # fmt: skip
MIB = 2**20


@pytest.mark.parametrize("steps", [1, 2])
def test_without_room_activations_leave_in_forward_and_return_in_backward(steps: int) -> None:
    """4,096 tokens of 1,024 channels are 8 MiB, the logits 32: with checkpoints two blocks' inputs, those of
    the last norm, of the head and of the loss. Kernels wait for each copy to the host. With room nothing
    moves, and a tensor below 5 MiB never does.
    """
    training = {"sequence_length": 4096, "activation_checkpointing": "full"}
    found = plan(steps, tensor_bytes=0, training=training, **ACTIVATIONS)
    assert copies(found, "d2h", "forward") == steps * [size * MIB for size in (8, 8, 8, 8, 32)]
    assert copies(found, "h2d", "backward") == steps * [size * MIB for size in (32, 8, 8)]
    assert copies(found, "h2d", "recompute") == steps * [8 * MIB, 8 * MIB]
    ops = found.programs[0].ops
    sent = next(n for n, op in enumerate(ops) if op.name == "transformer.ln_f to host")
    assert any(sent in op.after for op in ops[sent + 1 :] if op.stream == "compute")
    host = [m.bytes for m in found.resident if m.device == "host" and m.category == "activations"]
    assert host == [64 * MIB]
    left: dict[str, int] = {}
    for change in found.programs[0].memory:
        left[change.owner] = left.get(change.owner, 0) + change.bytes
    assert not any(left.values())
    check_plan(found)
    assert copies(plan(steps, training=training, **ACTIVATIONS), "d2h", "forward") == []
    short = {**training, "sequence_length": 512}
    assert copies(plan(steps, tensor_bytes=0, training=short, **ACTIVATIONS), "d2h", "forward") == []


def test_activations_stay_as_the_peak_without_them_allows() -> None:
    """A step that sends all away peaks at some bytes. With 8 to 16 MiB more one of 8 MiB stays, with 40 to 48
    the logits (32) and one of the others.
    """
    training = {"sequence_length": 4096, "activation_checkpointing": "full"}

    def sent(limit: int) -> list[int]:
        return copies(plan(1, tensor_bytes=limit, training=training, **ACTIVATIONS), "d2h", "forward")

    peak = next(limit for limit in range(0, 8000 * MIB, 8 * MIB) if len(sent(limit)) < 5)
    assert sent(peak + 32 * MIB) == [8 * MIB] * 3
    assert sent(peak + 2000 * MIB) == []


def test_copies_back_start_one_node_early_where_the_profile_has_room() -> None:
    """Nodes 7 to 9 take 60, 20 and 20 of 70 MB: a reader at 8 has no room before it, one at 9 has, but not
    beside what has come back (20 + 6 + 50). 4 MB are too few to leave.
    """
    first, second = SavedTensor("a", 0, 6 * MIB), SavedTensor("b", 0, 6 * MIB)
    large, small = SavedTensor("c", 0, 50 * MIB), SavedTensor("d", 0, 4 * MIB)
    peaks = [66 * MIB, 20 * MIB, 20 * MIB]
    moves = moved_activations({second: 9, first: 8, small: 9}, range(7, 10), peaks, 70 * MIB)
    assert moves.leaving == {first, second}
    assert moves.returns == {8: (first, second)}
    tight = moved_activations({first: 8, large: 9}, range(7, 10), peaks, 70 * MIB)
    assert tight.returns == {8: (first,), 9: (large,)}
    kept = trim_moves(tight, 55 * MIB)
    assert kept.leaving == {first}
    assert kept.returns == {8: (first,), 9: ()}


def test_shards_in_host_memory_come_at_the_head_of_a_graph_and_go_back_unchanged() -> None:
    """The rank's quarter of each parameter that forward reads, then of those that backward reads: all but the
    positions (128 x 1024), whose backward needs no weight."""
    changes: dict[str, Any] = {"offload_param": {"device": "cpu"}, "block": {"offload_parameters": True}}
    found = plan(2, **changes)
    shard = 2 * NUMEL // 4
    assert sum(copies(found, "h2d", "forward")) == sum(copies(found, "d2h", "forward")) == 2 * shard
    returned = sum(copies(found, "d2h", "backward"))
    assert sum(copies(found, "h2d", "backward")) == returned == 2 * (shard - 2 * 128 * 1024 // 4)
    ops = found.programs[0].ops
    first = {
        name: next(n for n, op in enumerate(ops) if op.name.startswith(name)) for name in ("shard", "all_")
    }
    assert first["shard"] in ops[first["all_"]].after
    check_plan(found)


@pytest.mark.parametrize("pin_memory", [True, False])
def test_shards_on_pages_that_are_not_pinned_are_copied_from_them(pin_memory: bool) -> None:
    """`offload_param.pin_memory`. The host waits for each such copy."""
    device = {"device": "cpu", "pin_memory": pin_memory}
    ops = plan(1, offload_param=device, block={"offload_parameters": True}).programs[0].ops
    shards = [op.work for op in ops if isinstance(op.work, Copy) and op.name.startswith("shard of")]
    assert {work.direction for work in shards} == {"h2d", "d2h"}
    assert {work.is_pinned for work in shards} == {pin_memory}


def test_parameters_on_the_gpu_are_not_moved_and_not_gathered_ahead() -> None:
    found = plan(1, block={"offload_parameters": True})
    assert found.programs[0].ops == plan(1, tensor_bytes=0).programs[0].ops
    notes = job(1, block={"offload_parameters": True}).strategy.notes
    assert any("moves no parameter" in note for note in notes)
    early = job(1, stage=2, block={"offload_opt_states": True}).strategy.notes
    assert any("compile.offload_opt_states: no effect before stage 3" in note for note in early)


@pytest.mark.parametrize("moves", [True, False])
def test_pages_of_activations_that_stay_are_not_pinned_without_effect(moves: bool) -> None:
    block = {"offload_activation": moves, "offload_activation_pin_memory": False}
    notes = job(1, block=block).strategy.notes
    assert any("offload_activation_pin_memory: no effect" in note for note in notes) != moves


@pytest.mark.parametrize(
    ("changes", "moment"),
    [
        ({}, ", after the fifth step, "),
        ({"block": {"offload_opt_states": True}}, ", after the first step, "),
        ({"block": {"offload_activation": True}}, ", after the fifth step, up to which all activations"),
        ({"block": {"offload_parameters": True}}, ""),
        ({"stage": 2}, ""),
    ],
)
def test_a_note_says_that_the_script_compiles_and_when_passes_run(
    changes: dict[str, Any], moment: str
) -> None:
    notes = [note for note in job(**changes).strategy.notes if "engine.compile()" in note]
    assert len(notes) == 1
    assert notes[0].partition("engine.compile()")[2].startswith(moment)
    assert moment or notes[0].endswith("engine.compile()")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"stage": 2, "optimizer": "Muon"}, "DeepCompile with Muon before stage 3"),
        ({"offload_optimizer": {"device": "cpu"}}, "DeepCompile with offload_optimizer, whose gradients"),
        (
            {"mics_shard_size": 2, "experiment": {"strategy": {"version": "0.19.6"}}},
            "DeepCompile with MiCS",
        ),
        (
            {"block": {"offload_opt_states": True, "offload_activation": True}},
            "offload_opt_states: found with compile.offload_activation, which DeepSpeed refuses",
        ),
        (
            {"block": {"offload_opt_states": True}, "offload_optimizer": {"device": "cpu"}},
            "found with zero_optimization.offload_optimizer, which DeepSpeed refuses",
        ),
        (
            {"block": {"offload_activation": True}, "experiment": {"strategy": {"version": "0.19.6"}}},
            "compile.offload_activation: .* activations on the host before 0.19.7",
        ),
        (
            {"offload_param": {"device": "cpu"}},
            "DeepCompile with offload_param and without compile.offload_parameters",
        ),
        (
            {"offload_param": {"device": "nvme", "nvme_path": "/n"}, "block": {"offload_parameters": True}},
            "DeepCompile with offload_param on NVMe",
        ),
        ({"block": {"passes": ["autotp"]}}, "compile.passes: .* passes of DeepCompile that a file chooses"),
        ({"experiment": {"strategy": {"version": "0.17.0"}}}, "DeepCompile before 0.19.5"),
        ({"experiment": {"parallelism": {"tensor": 2}}}, "DeepCompile with model parallelism"),
        ({"block": {"autoep_non_moe": True}}, "compile.autoep_non_moe: .* torch's compiler around AutoEP"),
        ({"block": {"free_activations": True}}, "'free_activations'; did you mean 'free_activation'"),
        ({"training": {"compile": False}}, "training.compile: found false, but .* compile.deepcompile"),
    ],
)
def test_what_is_not_simulated_is_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises((InputError, NotSimulatedError), match=sentence):
        job(**changes)


@pytest.mark.parametrize(("stage", "reductions"), [(1, 1), (2, 3)])
def test_stages_1_and_2_all_reduce_buckets_from_backward(stage: int, reductions: int) -> None:
    """All gradients, with the last of three micro-batches or with each. Of buckets of 13 million elements
    there are three, as at stage 3."""
    found = plan(3, stage=stage, reduce_bucket_size=13_000_000)
    assert calls(found, "all_reduce") == reductions * [2 * 12_599_296, 2 * 12_726_272, 2 * 4_194_304]
    sums = [op for op in found.programs[0].ops if op.name.startswith("accumulate ")]
    assert bool(sums) == (stage == 1)
    assert 2 * 2 * 13_000_000 in [memory.bytes for memory in found.resident]
    check_plan(found)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("steps", [1, 3])
def test_stages_1_and_2_give_back_what_they_take(stage: int, steps: int) -> None:
    """At stage 1 whole gradients are freed as they are reduced, and the partition's behind the update. At
    stage 2 those of the partition (a quarter, bf16 sums in bf16) are there from step to step."""
    found = plan(steps, stage=stage, reduce_bucket_size=13_000_000)
    left: dict[str, int] = {}
    for change in found.programs[0].memory:
        left[change.category] = left.get(change.category, 0) + change.bytes
    assert {category: size for category, size in left.items() if size} == {}
    kept = sum(memory.bytes for memory in found.resident if memory.category == "gradients")
    config = job(steps, stage=stage).strategy
    assert isinstance(config, DeepSpeedConfig)
    width = {"bf16": 2, "fp32": 4}[config.grad_accum_dtype]
    assert kept == (width * NUMEL // 4 if stage == 2 else 0)


def test_stage_0_is_left_to_torchs_compiler() -> None:
    config = job(stage=0).strategy
    assert isinstance(config, DeepSpeedConfig)
    assert config.deep_compile is None


def test_a_compiled_step_is_faster_and_takes_more_memory() -> None:
    """Both compile their kernels. What is off is Python's hooks, and gathers for backward."""

    def report(*, deep: bool) -> Any:
        config = {
            "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4,
            "zero_optimization": {"stage": 3}, "compile": {"deepcompile": deep},
        }  # fmt: skip
        return zsim.simulate(
            zsim.Experiment(
                model="llama-3-8b", cluster="dgx-h100", nodes=1,
                training={"sequence_length": 1024, "compile": True},
                strategy={"kind": "deepspeed", "config": config},
            )
        ).report  # fmt: skip

    eager, compiled = report(deep=False), report(deep=True)
    assert compiled.step_seconds < eager.step_seconds
    assert compiled.peaks["gpu"].total > eager.peaks["gpu"].total
    assert any("engine.compile()" in note for note in compiled.to_dict()["notes"])


def test_its_runs_are_not_taken_for_zero_3s() -> None:
    """No published run is of it, so that ranges say that nothing like it was compared."""
    resolved = job()
    assert resolved.strategy.label(4, 4) == "ZeRO-3 + DeepCompile"
    assert strategy_name(resolved) == "ZeRO-3 + DeepCompile"
