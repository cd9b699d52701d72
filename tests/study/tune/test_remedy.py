"""What makes a job fit that does not: one switch, the cheapest, and only one that its program has."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import zsim
from tests.study.tune.conftest import tune
from zsim.cli import app
from zsim.engine.simulator import Simulator
from zsim.errors import InputError
from zsim.plan import plans
from zsim.plan.make import PlanBasis, plan_of
from zsim.plan.ops import Plan
from zsim.plan.workload.workload import Workloads
from zsim.report.memory import Remedy
from zsim.report.views.text.sentences import format_remedy, missing_memory
from zsim.specs.experiment.load import build_experiment, change_experiment
from zsim.study.search import least_gpus
from zsim.study.tune import remedy as remedies
from zsim.study.tune.axes import Candidate, base_of, structure_of
from zsim.study.tune.evaluate import Evaluator, memory_of
from zsim.study.tune.remedy import remedy_of, tried_changes

Tiny = Callable[..., zsim.Experiment]
LONG = {"model.n_positions": 4096, "training.sequence_length": 4096}
WORDY = {**LONG, "model.vocab_size": 65536}  # 4096 x 65536 logits: 1.07 GB for each 4 bytes of them
ALONE = {"micro_batch_size": 1, "gradient_accumulation_steps": 1}


def fits(experiment: zsim.Experiment) -> bool:
    memory = memory_of(experiment)
    return not isinstance(memory, str) and memory.fits


def of(experiment: zsim.Experiment) -> Remedy:
    found = remedy_of(experiment)
    assert found is not None
    return found


def missing(experiment: zsim.Experiment) -> str:
    finding = zsim.simulate(experiment).report.out_of_memory
    assert finding is not None
    return missing_memory(finding)


def test_a_loss_that_does_not_fit_is_answered_with_one_that_does(make_tiny: Tiny) -> None:
    """Sequences cannot be cut, three blocks keep little, and no number of GPUs makes logits smaller."""
    given = change_experiment(make_tiny({"kind": "fsdp2"}, memory="5 GB", **ALONE), WORDY)
    report = zsim.simulate(given).report
    finding = report.out_of_memory
    assert finding is not None
    assert finding.least_gpus is None
    assert finding.remedy is not None
    assert list(finding.remedy.overrides) == ["training.cross_entropy"]
    after = zsim.simulate(change_experiment(given, finding.remedy.overrides)).report
    assert after.fits
    assert after.step_seconds == pytest.approx(finding.remedy.step_seconds, rel=1e-6)
    assert after.peaks["gpu"].total == finding.remedy.gpu_peak_bytes
    said = missing_memory(finding)
    loss = finding.remedy.overrides["training.cross_entropy"]
    assert f"training.cross_entropy = {loss} would fit: " in " ".join(said.split())
    assert report.to_dict()["out_of_memory"]["remedy"]["overrides"] == {"training.cross_entropy": loss}


def test_a_pipeline_is_looked_at_full(make_tiny: Tiny) -> None:
    """8 stages hold 8 micro-batches in flight, 4.89 GB; by the plan of two, 4.02 GB, all choices would fit in
    4.4, none of the three that are simulated would, and one switch more was added."""
    given = make_tiny(
        {"kind": "megatron"}, memory="4.4 GB", num_layers=16, micro_batch_size=8,
        gradient_accumulation_steps=16,
    )  # fmt: skip
    remedy = of(change_experiment(given, {"parallelism.pipeline": 8, "model.vocab_size": 1024}))
    assert remedy.overrides == {"training.activation_checkpointing": "full"}
    assert remedy.gpu_peak_bytes < 4.4e9


def test_the_cheapest_of_the_switches_that_do_is_named(make_tiny: Tiny) -> None:
    """Every single choice that fits takes at least as long."""
    given = make_tiny({"kind": "fsdp2"}, memory="1.9 GB", micro_batch_size=8, gradient_accumulation_steps=1)
    assert not fits(given)
    remedy = of(given)
    others: list[Mapping[str, Any]] = [
        {"training.activation_checkpointing": "full"},
        {"training.cross_entropy": "fused"},
        {"training.cross_entropy": "fused_linear"},
        {"strategy.cpu_offload": True},
        *(
            {"training.micro_batch_size": size, "training.gradient_accumulation_steps": 8 // size}
            for size in (1, 2, 4)
        ),
    ]
    seconds = [
        zsim.simulate(change_experiment(given, other)).report.step_seconds
        for other in others
        if fits(change_experiment(given, other))
    ]
    assert len(seconds) > 1
    assert remedy.step_seconds <= min(seconds) * 1.001


def test_where_no_switch_is_enough_the_fewest_are_joined(make_tiny: Tiny) -> None:
    """400 MB above the framework's 1.39 GB: neither full checkpointing nor the loss alone."""
    given = change_experiment(make_tiny({"kind": "fsdp2"}, memory="1.9 GB", **ALONE), WORDY)
    alone = [{"training.activation_checkpointing": "full"}, {"training.cross_entropy": "fused_linear"}]
    assert not any(fits(change_experiment(given, one)) for one in alone)
    remedy = of(given)
    assert len(remedy.overrides) > 1
    assert " and " in remedy.words
    assert fits(change_experiment(given, remedy.overrides))


def test_a_switch_that_is_refused_alone_is_tried_with_others(
    make_tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As full checkpointing is where DeepSpeed's few buffers of parameters on NVMe do not suffice for it."""
    given = change_experiment(make_tiny({"kind": "fsdp2"}, memory="1.9 GB", **ALONE), WORDY)
    check_plan = remedies._check_plan

    def refuse_checkpointing(evaluator: Evaluator, candidate: Candidate) -> Any:
        return None if [*candidate.choices] == ["checkpointing"] else check_plan(evaluator, candidate)

    expected = of(given).overrides
    assert "training.activation_checkpointing" in expected
    monkeypatch.setattr(remedies, "_check_plan", refuse_checkpointing)
    assert of(given).overrides == expected


def test_a_jsons_own_keys_are_named_for_its_batch(make_tiny: Tiny) -> None:
    config = {"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 1,
              "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}  # fmt: skip
    given = make_tiny({"kind": "deepspeed", "config": config}, memory="2.6 GB", gradient_accumulation_steps=1)
    remedy = of(given)
    size = remedy.overrides["strategy.config.train_micro_batch_size_per_gpu"]
    assert remedy.overrides["strategy.config.gradient_accumulation_steps"] == 16 // size > 1
    assert f"train_micro_batch_size_per_gpu = {size} and gradient_accumulation_steps" in remedy.words
    after = zsim.simulate(change_experiment(given, remedy.overrides)).report
    assert after.fits
    assert after.peaks["gpu"].total == remedy.gpu_peak_bytes


def test_an_offload_that_the_file_has_is_not_a_change(make_tiny: Tiny) -> None:
    """A block with more keys than the one that a search writes. "offload_optimizer = cpu" was named, though
    the file says it, and the remedy left out its `ratio`."""
    offload = {"device": "cpu", "pin_memory": True, "ratio": 0.9}
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
              "zero_optimization": {"stage": 3, "offload_optimizer": offload}}  # fmt: skip
    start = Candidate(base_of(make_tiny({"kind": "deepspeed", "config": config})), {}, -1)
    key = "strategy.config.zero_optimization.offload_optimizer"
    changes = remedies._single_changes(start, structure_of("deepspeed"))
    blocks = [change.overrides[key] for change in changes if key in change.overrides]
    assert blocks
    assert not any(block and block["device"] == "cpu" for block in blocks)


@pytest.mark.parametrize(("program", "loss"), [(None, "fused_linear"), ("torchtitan", "fused")])
def test_only_a_loss_that_the_program_has_is_named(make_tiny: Tiny, program: str | None, loss: str) -> None:
    """A loss that keeps the logits does not fit in 3 GB, Liger's that never has them whole does. torchtitan
    has none such: there it takes another switch beside the loss, and both stand in its file."""
    given = change_experiment(
        make_tiny({"kind": "fsdp2"}, memory="3 GB", **ALONE), {**WORDY, "program": program}
    )
    assert not fits(change_experiment(given, {"training.cross_entropy": "fused"}))
    remedy = of(given)
    assert remedy.overrides["training.cross_entropy"] == loss
    assert len(remedy.overrides) == (1 if program is None else 2)
    assert bool(remedy.script_changes) == (program is None)
    assert ("LigerFusedLinearCrossEntropyLoss" in missing(given)) == (program is None)


def test_nothing_helps_states_that_no_switch_makes_smaller(make_tiny: Tiny) -> None:
    """DDP keeps 16 bytes for each of 11.8 million parameters, and the GPU has 20 MB above its context."""
    assert remedy_of(make_tiny({"kind": "ddp"}, memory="1.46 GB")) is None


@pytest.mark.parametrize(
    ("strategy", "change"),
    [
        ({"kind": "deepspeed", "stage": 0}, "strategy.stage = 2"),
        ({"kind": "deepspeed", "config": {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}},
         "strategy.config.zero_optimization.stage = 2"),
        ({"kind": "megatron"}, "strategy.distributed_optimizer = true"),
        ({"kind": "fsdp1", "sharding_strategy": "NO_SHARD"}, "strategy.sharding_strategy = "),
    ],
)  # fmt: skip
def test_states_that_do_not_fit_are_sharded(make_tiny: Tiny, strategy: dict[str, Any], change: str) -> None:
    """16 bytes or more for each of 309 million parameters are 4.9 GB, and the GPU has 3.5 GB for them."""
    wide = {"model.n_embd": 2048, "model.n_layer": 6}
    given = change_experiment(make_tiny(strategy, memory="5.2 GB", nodes=1, micro_batch_size=1), wide)
    assert not fits(given)
    finding = zsim.simulate(given).report.out_of_memory
    assert finding is not None
    assert finding.remedy is not None
    assert change.partition(" = ")[0] in finding.remedy.overrides
    after = zsim.simulate(change_experiment(given, finding.remedy.overrides)).report
    assert after.fits
    assert after.peaks["gpu"].total == finding.remedy.gpu_peak_bytes
    assert change.removeprefix("strategy.config.") in " ".join(missing_memory(finding).split())


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_states_that_no_sharding_makes_small_enough_go_to_the_host(make_tiny: Tiny, kind: str) -> None:
    """12 bytes for an eighth of each of 309 million parameters are 0.46 GB: with them the GPU holds 2.4 GB,
    without them 2.0 GB, and it has 2.1 GB."""
    wide = {"model.n_embd": 2048, "model.n_layer": 6, "training.activation_checkpointing": "full"}
    small = make_tiny(
        {"kind": kind}, memory="2.2 GB", nodes=1, micro_batch_size=1, gradient_accumulation_steps=1
    )
    given = change_experiment(small, wide)
    assert not fits(given)
    remedy = remedy_of(given)
    assert remedy is not None
    assert remedy.overrides["strategy.cpu_offload"] is True
    assert fits(change_experiment(given, remedy.overrides))


def test_tune_names_what_run_does_where_no_number_of_gpus_helps(make_tiny: Tiny) -> None:
    """151M parameters on GPUs of 2.2 GB under DDP, of which every GPU holds all states."""
    given = change_experiment(make_tiny({"kind": "ddp"}, memory="2.2 GB"), {"model.n_embd": 2048})
    assert least_gpus(given) is None
    with pytest.raises(InputError) as refused:
        tune(given)
    said, remedy = str(refused.value), remedy_of(given)
    assert "expected a shorter sequence or a smaller batch" in said
    assert remedy is not None
    assert said.endswith(format_remedy(remedy))


def test_tune_names_the_switch_that_it_was_to_leave_alone(make_tiny: Tiny) -> None:
    given = change_experiment(make_tiny({"kind": "fsdp2"}, memory="5 GB", **ALONE), WORDY)
    with pytest.raises(InputError) as refused:
        tune(given, keep=("cross-entropy", "offload", "checkpointing"))
    said = str(refused.value)
    assert "nothing fits" in said
    assert "training.cross_entropy = " in said
    assert said.endswith("--keep leaves cross-entropy as given.")
    assert tune(given, keep=("offload", "checkpointing"), top=1).given is None


def test_the_memory_command_names_it_too(tmp_path: Path) -> None:
    """A 13B model's states fit on 8 GPUs of 40 GB, its activations not."""
    words = ["memory", "--model", "llama-2-13b", "--cluster", "dgx-a100-40gb", "--nodes", "1", "--set",
             "strategy.kind=fsdp2", "--set", "training.sequence_length=2048", "--set",
             "training.activation_checkpointing=none"]  # fmt: skip
    path = tmp_path / "memory.json"
    result = CliRunner().invoke(app, [*words, "--json", str(path)])
    assert result.exit_code == 1
    assert max(map(len, result.output.replace(str(path), "").splitlines())) <= 80
    remedy = json.loads(path.read_text())["remedy"]
    assert remedy["overrides"]
    assert " would fit: " in " ".join(result.output.split())


def test_what_the_script_must_change_is_said_without_saying_the_switch_again() -> None:
    """Of several switches, whose it is."""
    how = "training.activation_checkpointing = full: model.gradient_checkpointing_enable()"
    one = Remedy({}, "training.activation_checkpointing = full", 10**9, 1.0, (how,))
    assert format_remedy(one) == (
        "training.activation_checkpointing = full would fit: 1.00 GB, step 1.000 s (needs a change of the "
        "script: model.gradient_checkpointing_enable())."
    )
    assert " would fit with 38 % probability: 1.00 GB" in format_remedy(replace(one, fits_probability=0.38))
    two = replace(one, words=f"{one.words} and training.micro_batch_size = 2")
    assert format_remedy(two).endswith(
        "(needs a change of the script: training.activation_checkpointing: "
        "model.gradient_checkpointing_enable())."
    )


def test_an_experiment_without_a_plan_has_no_remedy() -> None:
    """What cannot be simulated is another message's."""
    given = build_experiment(
        {"model": "gpt2", "cluster": "dgx-h100", "nodes": 1, "strategy": {"kind": "fsdp2", "replicate": 3}},
        {},
        origin="test",
    )
    assert remedy_of(given) is None


@pytest.mark.parametrize(("given", "tried"), [("full", set()), ("selective-op", {"full"})])
def test_less_checkpointing_is_no_remedy(
    make_tiny: Tiny, monkeypatch: pytest.MonkeyPatch, given: str, tried: set[str]
) -> None:
    """It takes as long to look at as what helps, and keeps more."""
    looked: list[Mapping[str, Any]] = []

    def look(evaluator: object, candidate: Any) -> None:
        looked.append(candidate.overrides)

    monkeypatch.setattr("zsim.study.tune.remedy._check_plan", look)
    key = "training.activation_checkpointing"
    assert (
        remedy_of(change_experiment(make_tiny({"kind": "fsdp2"}, memory="1 GB", **ALONE), {key: given}))
        is None
    )
    assert {changes[key] for changes in looked if key in changes} == tried
    assert len(looked) > len(tried)


def test_switches_of_the_batch_are_not_planned_where_states_alone_are_too_much(
    make_tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP holds its states whole, whatever is recomputed: on GPUs of 1.46 GB, which do not hold them, the
    remedy plans the given job and adapters alone, with all switches and without, and where a simulation has
    planned the job, the adapters; on ones of 5 GB, which hold them but no logits, the switches as well."""
    planned: list[PlanBasis] = []

    def counted(basis: PlanBasis, workloads: Workloads) -> Plan:
        planned.append(basis)
        return plan_of(basis, workloads)

    monkeypatch.setattr(plans, "plan_of", counted)
    given = make_tiny({"kind": "ddp"}, memory="1.46 GB", **ALONE)
    assert remedy_of(given) is None
    assert len(planned) == 3
    simulator = Simulator()
    simulator.step(simulator.job(given))
    planned.clear()
    assert remedy_of(given, simulator) is None
    assert len(planned) == 2
    of(change_experiment(make_tiny({"kind": "ddp"}, memory="5 GB", **ALONE), WORDY))
    assert len(planned) > 2


# -- What makes a job fit that no switch makes fit: other degrees of parallelism, adapters -----------------


def remedy(kind: str, **given: Any) -> tuple[zsim.Experiment, Remedy]:
    training = {"sequence_length": 2048, "gradient_accumulation_steps": 8}
    data = {"model": "mixtral-8x7b", "cluster": "dgx-h100", "training": training, "strategy": {"kind": kind}}
    experiment = zsim.Experiment(**{**data, **given})
    found = remedy_of(experiment)
    assert found is not None
    return experiment, found


def test_experts_on_several_ranks_are_a_remedy_of_megatrons() -> None:
    """Mixtral's 46.7 billion parameters are 93 GB in bf16, more than a GPU, whatever shards the states over
    data parallel ranks; on 8 ranks, each cut between 2 tensor ranks, the experts, 45.1 billion, are a
    sixteenth of that: 7.2 GB with half of the rest. The batch stays: fewer replicas make more
    micro-batches."""
    experiment, found = remedy("megatron", gpus=16)
    degrees = [found.overrides.get(f"parallelism.{name}", 1) for name in ("pipeline", "tensor", "expert")]
    assert degrees == [1, 2, 8]
    replicas = 16 // (degrees[0] * degrees[1])
    assert found.overrides["training.gradient_accumulation_steps"] * replicas == 8 * 16
    after = zsim.simulate(change_experiment(experiment, found.overrides)).report
    assert after.out_of_memory is None
    assert after.peaks["gpu"].total == found.gpu_peak_bytes
    assert after.peaks["gpu"].by_category["parameters"] == pytest.approx(7.2e9, rel=0.01)


def test_adapters_are_a_remedy_where_there_are_no_degrees() -> None:
    """Under DDP every GPU holds Llama 2's 13 billion parameters with 16 bytes each: 208 GB. Frozen in bf16
    they are 26."""
    experiment, found = remedy("ddp", model="llama-2-13b", gpus=8)
    assert found.overrides["training.lora.rank"] == 16
    assert zsim.simulate(change_experiment(experiment, found.overrides)).report.out_of_memory is None


def test_adapters_and_degrees_together_are_a_remedy_where_neither_is_enough() -> None:
    """On 8 GPUs Mixtral's states, 18 bytes a parameter, are 105 GB on each however they are cut, and frozen
    on every GPU it is 93 GB. With half of the experts on each of two ranks it is (1.6 + 22.5) x 2 GB."""
    experiment, found = remedy("megatron", gpus=8)
    assert found.overrides["training.lora.rank"] == 16
    assert found.overrides["parallelism.expert"] == 2
    after = zsim.simulate(change_experiment(experiment, found.overrides)).report
    assert after.out_of_memory is None
    assert after.peaks["gpu"].by_category["parameters"] == pytest.approx(48.3e9, rel=0.01)


def test_tensor_ranks_with_experts_split_sequences_too() -> None:
    """Megatron refuses them otherwise, so that no larger degree of tensor parallelism would be tried."""
    base = base_of(zsim.Experiment(model="mixtral-8x7b", cluster="dgx-h100", strategy={"kind": "megatron"}))
    changes = [
        {key: value for key, value in candidate.overrides.items() if key.startswith("parallelism.")}
        for candidate in remedies.degree_changes(Candidate(base, {}, -1))
    ]
    assert {"parallelism.tensor": 2, "parallelism.sequence_parallel": True} in changes
    assert {"parallelism.expert": 2} in changes
    assert all(("parallelism.tensor" in one) == ("parallelism.sequence_parallel" in one) for one in changes)


def test_what_was_tried_is_what_the_strategy_has() -> None:
    """DDP neither shards nor offloads, and a job with adapters is not told to take them."""
    data: dict[str, Any] = {"model": "gpt2", "cluster": "dgx-h100", "training": {"lora": {"rank": 8}}}
    ddp = zsim.Experiment(**data, strategy={"kind": "ddp"})
    assert tried_changes(ddp) == ("checkpointing", "another loss", "smaller micro-batches")
    assert "sharding" in tried_changes(zsim.Experiment(**data, strategy={"kind": "fsdp1"}))


@pytest.mark.parametrize(
    ("strategy", "counts"),
    [
        ({"kind": "ddp"}, {4, 5, 8, 9, 16, 17, 40}),
        ({"kind": "fsdp2"}, {4, 8, 16, 40}),
        ({"stage": 3}, {4, 8, 16, 40}),
    ],
    ids=["ddp", "fsdp2", "zero3"],
)
def test_very_many_equal_blocks_are_searched_with_few(
    make_tiny: Tiny, strategy: dict[str, Any], counts: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 blocks from plans of 4, 8 and 16: the remedy is the same as of plans of 40, of which only the
    proposed change is made, and those that are close to the limit or on no line. Under DDP a first block
    that alone is checkpointed otherwise is tried: it is one more."""
    given = change_experiment(make_tiny(strategy, memory="5 GB", **ALONE), {**WORDY, "model.n_layer": 40})
    assert not fits(given)
    whole = of(given)
    monkeypatch.setattr(remedies, "_MIN_BLOCKS", 32)
    monkeypatch.setattr(remedies, "_SAMPLED_BLOCKS", 4)
    planned: list[int] = []

    def counted(basis: PlanBasis, workloads: Workloads) -> Plan:
        planned.append(len(basis.model.blocks))
        return plan_of(basis, workloads)

    monkeypatch.setattr(plans, "plan_of", counted)
    assert of(given) == whole
    assert set(planned) == counts
    assert planned.count(16) > planned.count(40)


def test_blocks_that_repeat_behind_the_first_are_sampled_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense block and 39 of experts: 4, 8 and 16 of these with the dense one."""
    monkeypatch.setattr(remedies, "_MIN_BLOCKS", 32)
    monkeypatch.setattr(remedies, "_SAMPLED_BLOCKS", 4)
    model = {"extends": "deepseek-v2-lite", "num_hidden_layers": 40}
    job = Simulator().job(zsim.Experiment(model=model, cluster="dgx-h100", strategy={"kind": "fsdp2"}))
    assert [len(sample.model.blocks) for sample in remedies._sampled_jobs(job)] == [5, 9, 17]


@pytest.mark.parametrize("fails", [lambda calls: True, lambda calls: calls == 4], ids=["all", "the second"])
def test_steps_that_fail_with_few_blocks_leave_the_lower_bounds(
    make_tiny: Tiny, fails: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change is that of the lowest bound, also where only one candidate has no estimate: those of the
    others are longer than any bound."""
    given = change_experiment(
        make_tiny({"kind": "fsdp2"}, memory="5 GB", **ALONE), {**WORDY, "model.n_layer": 40}
    )
    monkeypatch.setattr(remedies, "_MIN_BLOCKS", 32)
    monkeypatch.setattr(remedies, "_SAMPLED_BLOCKS", 4)
    bounds: dict[str, float] = {}
    shortest = remedies._first_with_room

    def ranked_by(evaluator: Any, ranked: Any) -> Any:
        bounds.update({str(check.candidate.overrides): check.seconds for check in ranked})
        return shortest(evaluator, ranked)

    step, calls = Simulator.step, [0]

    def failing(self: Simulator, job: Any) -> Any:
        calls[0] += 1
        if len(job.model.blocks) < 40 and fails(calls[0]):
            raise InputError("no step with few blocks")
        return step(self, job)

    monkeypatch.setattr(remedies, "_first_with_room", ranked_by)
    monkeypatch.setattr(Simulator, "step", failing)
    found = of(given)
    assert len(bounds) > 1
    assert bounds[str(found.overrides)] == min(bounds.values())


def test_what_blocks_hold_is_told_from_few_only_where_it_is_on_a_line(make_tiny: Tiny) -> None:
    job = Simulator().job(make_tiny({"kind": "fsdp2"}, memory="5 GB", **ALONE))
    blocks = job.model.blocks[:1]
    sizes = [replace(job, model=replace(job.model, blocks=blocks * count)) for count in (1, 2, 4, 10)]
    assert remedies._extrapolate(sizes[3], sizes[:3], [[7.0, 5.0], [9.0, 5.0], [13.0, 5.0]]) == [25.0, 5.0]
    assert remedies._extrapolate(sizes[3], sizes[:3], [[7.0], [9.0], [12.0]]) is None
