"""Keys of what a trainer does, of how a step is simulated, and of its batch: each reaches the job, or is an
error."""

from __future__ import annotations

from typing import Any

import pytest

import zsim
from tests.expect import of_kind
from zsim.errors import InputError, NotSimulatedError
from zsim.explain.job import resolved_experiment
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.fsdp1.settings import Fsdp1Config
from zsim.frameworks.megatron.settings.config import MegatronConfig
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.formats.export import export_files
from zsim.specs.model.spec import Attention, Loss

GPT = {"model_type": "gpt2", "n_embd": 256, "n_head": 4, "n_layer": 2, "vocab_size": 512, "n_positions": 128}

CORE = {"kind": "megatron"}
INTERNEVO = {"kind": "megatron", "engine": "internevo", "distributed_optimizer": True}


def experiment(**changes: Any) -> Experiment:
    return Experiment(**{"model": GPT, "cluster": "dgx-a100-80gb", "gpus": 8, **changes})


def job(**changes: Any) -> Job:
    return resolve(experiment(**changes))


def test_the_trainer_says_what_its_loss_and_attention_do() -> None:
    trainer = {
        "metrics_per_micro_batch": 2,
        "holds_logits": "as they are",
        "unpads_attention": True,
        "reads_sequence_lengths": True,
    }
    model = job(trainer=trainer).model
    losses = [module.op_spec for module in model.after if isinstance(module.op_spec, Loss)]
    assert [(loss.num_metrics, loss.holds_logits) for loss in losses] == [(2, "as they are")]
    cores = [m.op_spec for block in model.blocks for m in block.modules if isinstance(m.op_spec, Attention)]
    assert [(core.unpads, core.host_waits) for core in cores] == [(True, True)] * 2
    assert job(trainer={}).model == job().model


def test_metrics_make_the_step_longer_and_logits_that_are_held_make_it_larger() -> None:
    plain = zsim.simulate(experiment()).report
    logged = zsim.simulate(
        experiment(trainer={"metrics_per_micro_batch": 2, "holds_logits": "in fp32"})
    ).report
    assert logged.step_seconds > plain.step_seconds
    assert logged.peaks["gpu"].total > plain.peaks["gpu"].total


def test_strategies_say_what_their_software_was() -> None:
    old = job(strategy={"kind": "fsdp1", "before_torch_2": True}).strategy
    assert isinstance(old, Fsdp1Config)
    assert old.before_torch_2
    early = job(strategy={"kind": "deepspeed", "stage": 3, "fetches_one_by_one": True}).strategy
    assert isinstance(early, DeepSpeedConfig)
    assert early.fetches_one_by_one
    graph = job(strategy={"kind": "megatron", "cuda_graph": True, "skips_update": True}).strategy
    assert isinstance(graph, MegatronConfig)
    assert (graph.host_events.block, graph.skips_update, graph.checks_nan) == (None, True, True)
    owners = job(strategy={**INTERNEVO, "grad_reduce_dtype": "bf16"}).strategy
    assert isinstance(owners, MegatronConfig)
    assert (owners.has_whole_tensor_owners, owners.is_contiguous, owners.fuses_accumulation) == (
        True,
        False,
        False,
    )


def test_megatrons_own_kernels_are_not_another_engines() -> None:
    assert job(strategy={"kind": "megatron"}).training.compile
    assert not job(strategy={"kind": "megatron", "engine": "nanotron"}).training.compile


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"strategy": {"kind": "deepspeed", "stage": 2, "fetches_one_by_one": True}},
            "which has no such schedule; expected stage 3",
        ),
        (
            {"strategy": {"kind": "deepspeed", "stage": 2, "scatters_after_backward": True}},
            "expected stage 1",
        ),
        ({"strategy": {"kind": "fsdp2"}, "training": {"autocast": True}}, "expected 'fsdp1'"),
        ({"strategy": {"kind": "megatron"}, "training": {"stored_dtype": "bf16"}}, "expected 'ddp', "),
        (
            {"strategy": {"kind": "ddp"}, "training": {"stored_dtype": "bf16", "precision": "fp16"}},
            "expected 'fp32', or precision bf16 or fp8",
        ),
        ({"strategy": {"kind": "megatron", "engine": "nanotron", "cuda_graph": True}}, "engine 'megatron'"),
        (
            {"strategy": {"kind": "megatron", "cuda_graph": True, "cuda_graph_modules": ["attn"]}},
            "cuda_graph = true, one graph of the whole step",
        ),
        ({"strategy": {**CORE, "cuda_graph_modules": ["moe_preprocess"]}}, "without 'moe_router'"),
        ({"strategy": {**CORE, "cuda_graph_modules": ["atn"]}}, "cuda_graph_modules"),
        ({"strategy": INTERNEVO}, "in the parameters' type; expected 'bf16'"),
        ({"strategy": {"kind": "megatron", "engine": "internevo"}}, "has no other optimizer; expected dist"),
        ({"training": {"global_batch_size": 12, "micro_batch_size": 1, "gradient_accumulation_steps": 3}},
         "expected 24, or more than 16"),
        ({"training": {"global_batch_size": 7}}, "found 7 sequences for 8 GPUs; expected at least 8"),
        ({"trainer": {"metrics": 2}}, "unknown key 'metrics'"),
        ({"trainer": {"metrics_per_micro_batch": 2}}, "found 2, but the logits .* expected holds_logits"),
        ({"trainer": {"holds_logits": "yes"}}, "trainer.holds_logits"),
        ({"simulation": {"every_microbatch": False}}, "did you mean 'every_micro_batch'"),
    ],
)  # fmt: skip
def test_what_has_no_effect_or_no_meaning_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        job(**changes)


def test_the_global_batch_says_how_many_micro_batches_and_how_small_the_last_is() -> None:
    """8 GPUs: 48 sequences are 6 each, 3 micro-batches of 2; 44 are 5.5 each, and the third has 1.5."""
    even = job(training={"micro_batch_size": 2, "global_batch_size": 48})
    assert (even.training.gradient_accumulation_steps, even.sequences) == (3, None)
    uneven = job(training={"micro_batch_size": 2, "global_batch_size": 44})
    assert (uneven.training.gradient_accumulation_steps, uneven.sequences) == (3, 5.5)


def test_a_smaller_last_micro_batch_is_worth_its_tokens() -> None:
    training = {"sequence_length": 128, "micro_batch_size": 2, "gradient_accumulation_steps": 3}
    whole = zsim.simulate(experiment(training=training)).report
    less = zsim.simulate(experiment(training={**training, "global_batch_size": 44})).report
    two = zsim.simulate(experiment(training={**training, "gradient_accumulation_steps": 2})).report
    assert two.step_seconds < less.step_seconds < whole.step_seconds
    assert less.work.tokens == 5.5 * 128
    assert less.peaks["gpu"].total == whole.peaks["gpu"].total
    assert any("3 micro-batches, the last of them smaller" in note for note in less.notes)


def test_three_micro_batches_tell_of_many() -> None:
    """The whole report: seconds, their breakdown, tokens per second."""
    training = {"micro_batch_size": 4, "gradient_accumulation_steps": 12}
    every = zsim.simulate(experiment(training=training)).report
    few = zsim.simulate(experiment(training=training, simulation={"every_micro_batch": False}))
    report = few.report
    assert report.step_seconds == pytest.approx(every.step_seconds, rel=0.002)
    assert sum(report.breakdown.seconds.values()) == pytest.approx(report.step_seconds)
    assert report.breakdown.seconds["compute"] == pytest.approx(every.breakdown.seconds["compute"], rel=0.005)
    assert sum(sum(row.values()) for row in report.breakdown.by_phase.values()) == pytest.approx(
        report.step_seconds
    )
    assert report.work == every.work
    assert report.peaks["gpu"].total == every.peaks["gpu"].total
    assert few.trace.step_seconds < report.step_seconds / 3
    assert report.labels["batch"] == every.labels["batch"]
    assert any("of 12 micro-batches, 3 are simulated" in note for note in report.notes)


def test_steps_that_are_drawn_have_all_their_micro_batches_simulated() -> None:
    training = {"gradient_accumulation_steps": 8}
    with pytest.raises(NotSimulatedError, match="every_micro_batch = false beside other jobs or with jitter"):
        zsim.simulate(
            experiment(training=training, simulation={"every_micro_batch": False}, jitter={"seed": 1})
        )


def test_a_job_on_the_same_fabric_has_the_trainer_unless_it_says_another() -> None:
    trainer = {"holds_logits": "in fp32"}
    jobs = {"like": {"nodes": 1}, "unlike": {"nodes": 1, "trainer": {"holds_logits": "no"}}}
    others = job(nodes=1, gpus=None, trainer=trainer, jobs=jobs).colocated_jobs
    held = {name: of_kind(other.model.after[-1].op_spec, Loss).holds_logits for name, other in others.items()}
    assert held == {"like": "in fp32", "unlike": "no"}


def test_the_resolved_experiment_says_all_that_the_simulation_used() -> None:
    training = {"micro_batch_size": 2, "global_batch_size": 12}
    told = resolved_experiment(job(training=training, trainer={"holds_logits": "in fp32"}))
    assert told["trainer"]["holds_logits"] == "in fp32"
    assert told["sequences_per_gpu"] == 1.5
    assert told["training"]["gradient_accumulation_steps"] == 1
    assert not {"trainer", "simulation", "sequences_per_gpu"} & set(resolved_experiment(job()))


def test_exported_files_say_what_the_script_must_do_of_it() -> None:
    asked = job(
        trainer={"metrics_per_micro_batch": 2, "holds_logits": "as they are"},
        training={"micro_batch_size": 2, "global_batch_size": 12, "autocast": True},
        strategy={"kind": "fsdp1", "param_dtype": "fp32", "reduce_dtype": "bf16", "before_torch_2": True},
    )
    notes = export_files(asked).notes
    for said in (
        "[trainer] is the script's: metrics_per_micro_batch 2, holds_logits as they are",
        "a last micro-batch that is smaller (1.5 sequences a step) is the script's",
        "it is simulated as in torch 1.12 and 1.13",
    ):
        assert said in notes
    assert any("under torch.autocast" in note for note in notes)
    assert not [note for note in export_files(job()).notes if "[trainer]" in note or "autocast" in note]
