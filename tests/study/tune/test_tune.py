"""Goals, what to change, and the files, on a model small enough to check."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import zsim
from tests.expect import of_kind, there
from tests.study.tune.conftest import tune
from validation.published.tune import SETTINGS, Setting
from zsim.engine.micro_batches import NUM_SAMPLED
from zsim.errors import InputError
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.study.sweep.pool import Task
from zsim.study.tune.evaluate import Evaluator, memory_of
from zsim.study.tune.result import TuneResult, pareto_front, tuning_files
from zsim.study.tune.search import fastest

Tiny = Callable[..., zsim.Experiment]


def fits(experiment: zsim.Experiment) -> bool:
    memory = memory_of(experiment)
    return not isinstance(memory, str) and memory.fits


def run_out_of(
    monkeypatch: pytest.MonkeyPatch,
    is_short: Callable[[Job], bool],
    *,
    least_micro_batches: int = NUM_SAMPLED + 2,
) -> None:
    """Steps of so many micro-batches or more find no room in torch's allocator where the job `is_short`."""
    run = Evaluator._run

    def run_short(self: Evaluator, tasks: list[Task]) -> None:
        run(self, tasks)
        for task in tasks:
            job, row = resolve(task.experiment), self._records[task.identity]["row"]
            if job.training.gradient_accumulation_steps >= least_micro_batches and is_short(job):
                row["allocator_failures"] = 4

    monkeypatch.setattr(Evaluator, "_run", run_short)


@pytest.fixture
def tuned(make_tiny: Tiny) -> TuneResult:
    """From ZeRO-3 with a sequence at a time and full checkpointing."""
    return tune(make_tiny({"stage": 3}, activation_checkpointing="full"), keep=("offload",), top=3)


def test_the_counts_of_configurations_add_up(tuned: TuneResult, make_tiny: Tiny) -> None:
    found = tuned.search
    parts = found.num_too_large, found.num_too_slow, found.num_refused, found.num_simulated
    assert sum(parts) == found.num_candidates
    text = " ".join(tuned.lines())
    assert f"{found.num_candidates} configurations: {parts[0]} do" in text
    assert f"{parts[1]} cannot be faster" in text
    steps = f"{tuned.num_simulated} steps in all, with the given configuration and variations"
    shown = f"{parts[3]} simulated ({steps})"
    assert shown in text
    kept = tune(make_tiny({"stage": 3}), keep=("all",))
    assert "1 configuration: 0 do not fit, 0 cannot be faster, 1 simulated" in " ".join(kept.lines())


def test_the_best_is_no_slower_than_what_was_given_and_every_file_fits(tuned: TuneResult) -> None:
    assert tuned.given is not None
    assert tuned.best[0].seconds < tuned.given.seconds
    for measured in tuned.best:
        report = zsim.simulate(measured.candidate.experiment()).report
        assert report.fits
        assert report.step_seconds == pytest.approx(measured.seconds, rel=1e-3)


def test_the_steps_lead_from_what_was_given_to_the_best(tuned: TuneResult) -> None:
    """Each begins where the one before ended, gains at least 0.2 %, and is a simulation."""
    assert tuned.given is not None
    seconds = tuned.given.seconds
    for step in tuned.steps:
        assert step.seconds_before == seconds
        assert step.after.seconds < seconds * 0.998
        seconds = step.after.seconds
        report = zsim.simulate(step.after.candidate.experiment()).report
        assert report.step_seconds == pytest.approx(seconds, rel=1e-3)
    assert seconds == pytest.approx(tuned.best[0].seconds, rel=0.005)
    changes = {change.key: change for step in tuned.steps for change in step.changes}
    assert changes["training.activation_checkpointing"].before == "full"


def test_what_follows_by_default_is_said_once_the_stage_changes(make_tiny: Tiny) -> None:
    """Stage 3 overlaps by default, stage 1 only when told: taking the stage down must say so."""
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "reduce_bucket_size": 1e6}}
    keep = ("offload", "hpZ", "checkpointing", "micro-batch")
    result = tune(make_tiny({"config": config}, micro_batch_size=1), keep=keep)
    wanted = result.best[0].candidate.overrides
    if wanted.get("strategy.config.zero_optimization.overlap_comm"):
        said = {change.key: change.after for step in result.steps for change in step.changes}
        assert said["strategy.config.zero_optimization.overlap_comm"] is True


def test_what_does_not_fit_is_made_to_fit_first(make_tiny: Tiny) -> None:
    given = make_tiny({"kind": "fsdp2"}, memory="1.6 GB", micro_batch_size=8, gradient_accumulation_steps=1)
    assert not fits(given)
    result = tune(given, top=1)
    assert result.given is None
    assert result.steps[0].seconds_before is None
    assert fits(result.best[0].candidate.experiment())
    assert "what was given does not fit" in "\n".join(result.lines())


def test_what_may_fit_is_called_as_a_run_of_it_is(make_tiny: Tiny) -> None:
    """A hundredth of the bytes is missing, which is inside the band of errors and likelier not to fit. A
    twentieth of the GPU is the allocator's."""
    training = {"micro_batch_size": 8, "gradient_accumulation_steps": 1}
    memory = memory_of(make_tiny({"kind": "fsdp2"}, **training))
    assert not isinstance(memory, str)
    capacity = memory.peaks["gpu"] * 0.99 * 1.05
    given = make_tiny({"kind": "fsdp2"}, memory=f"{capacity:.0f} B", **training)
    verdict = zsim.simulate(given).report.verdict
    assert verdict.word == "likely does not fit"
    result = tune(given, top=1)
    assert result.given is None
    text = " ".join(" ".join(result.lines()).split())
    assert f"what was given likely does not fit, {verdict.chance}" in text
    assert result.to_dict()["given_verdict"]["verdict"] == "likely does not fit"


def test_the_smallest_cluster_is_the_smallest(make_tiny: Tiny) -> None:
    """11.8M parameters fit on one GPU of 40 GB; 151M and their vocabulary have states of 2.5 GB, more than
    one GPU of 2.4 GB has room for: several are needed, and on half as many nothing fits."""
    assert tune(make_tiny({"kind": "fsdp2"}), "smallest-cluster", keep=("offload",)).best[0].gpus == 1
    experiment = change_experiment(make_tiny({"kind": "fsdp2"}, memory="2.4 GB"), {"model.n_embd": 2048})
    result = tune(experiment, "smallest-cluster", keep=("offload", "no_sync"))
    gpus = result.best[0].gpus
    assert 1 < gpus <= 16
    assert f"{gpus} GPUs" in result.remark
    smaller = experiment.model_copy(update={"nodes": 1, "gpus": gpus // 2})
    with pytest.raises(InputError, match="nothing fits"):
        tune(smaller, keep=("offload", "no_sync"))


def test_what_only_the_whole_step_shows_to_run_out_comes_behind_what_fits(
    make_tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of the eight micro-batches of the fastest have room, all eight not: the next best that has room
    is first, even where only one was asked for, and what may run out is behind it."""
    experiment = make_tiny({"kind": "fsdp2"}, nodes=1, gradient_accumulation_steps=8)
    keep = ("micro-batch", "offload", "checkpointing", "cross-entropy")
    before = tune(experiment, keep=keep, top=2)
    fastest = before.best[0].candidate.overrides
    run_out_of(monkeypatch, lambda job: job.experiment == before.best[0].candidate.experiment())
    after = tune(experiment, keep=keep, top=9)
    assert not after.best[0].may_run_out
    assert after.best[0].candidate.overrides != fastest
    assert after.best[0].seconds >= before.best[0].seconds
    assert [m.may_run_out for m in after.best] == sorted(m.may_run_out for m in after.best)
    alone = tune(experiment, keep=keep, top=1)
    assert not alone.best[0].may_run_out
    found = alone.search
    parts = found.num_too_large, found.num_too_slow, found.num_refused, found.num_simulated
    assert sum(parts) == found.num_candidates


def test_the_smallest_cluster_rests_on_what_torch_has_room_for(
    make_tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tensors fit on one GPU, and none of the whole steps there: two are the fewest. Where none has room
    on any number of GPUs, it is said to rest on the tensors alone."""
    experiment = make_tiny({"kind": "fsdp2"}, nodes=1)
    keep = ("micro-batch", "offload", "no_sync", "cross-entropy")
    assert tune(experiment, "smallest-cluster", keep=keep).remark == "1 GPU (1 node) are the fewest"
    run_out_of(monkeypatch, lambda job: job.world_size == 1)
    result = tune(experiment, "smallest-cluster", keep=keep)
    assert [m.gpus for m in result.best] == [2] * len(result.best)
    assert not result.best[0].may_run_out
    assert result.remark == (
        "2 GPUs (1 node) are the fewest; all tensors fit on 1 GPU too, but torch's allocator may find no "
        "room for them there"
    )
    assert max(map(len, result.lines())) <= 80
    run_out_of(monkeypatch, lambda job: True, least_micro_batches=1)
    nowhere = tune(experiment, "smallest-cluster", keep=keep)
    assert nowhere.best[0].gpus == 1
    assert nowhere.best[0].may_run_out
    assert nowhere.remark == (
        "1 GPU (1 node) are the fewest, by their tensors alone: torch's allocator may find no room"
    )


def test_the_largest_batch_is_the_largest(make_tiny: Tiny) -> None:
    keep = ("checkpointing", "cross-entropy", "offload", "replicas", "reshard", "no_sync")
    result = tune(make_tiny({"kind": "fsdp2"}, memory="2.5 GB"), "largest-batch", keep=keep)
    best = result.best[0].candidate.experiment()
    size = there(best.training.micro_batch_size)
    assert fits(best)
    more = best.training.model_copy(update={"micro_batch_size": size + 1})
    assert not fits(best.model_copy(update={"training": more}))
    assert f"{size} sequences per GPU" in result.remark


def test_the_longest_sequence_is_the_longest(make_tiny: Tiny) -> None:
    """Every length up to the model's 8,192 learned positions, in steps of 256 tokens."""
    keep = ("checkpointing", "cross-entropy", "offload", "replicas", "reshard", "no_sync")
    made = make_tiny({"kind": "fsdp2"}, memory="2.5 GB")
    longer = made.model_copy(update={"model": {**of_kind(made.model, dict), "n_positions": 8192}})
    result = tune(longer, "longest-sequence", keep=keep)
    best = result.best[0].candidate.experiment()
    length = best.training.sequence_length
    assert length is not None
    assert length > 512
    assert fits(best)
    assert f"sequences of {length:,} tokens instead of 512" in result.remark
    more = best.training.model_copy(update={"sequence_length": length + 256})
    assert not fits(best.model_copy(update={"training": more}))
    limited = tune(make_tiny({"kind": "fsdp2"}), "longest-sequence", keep=keep)
    assert limited.best[0].candidate.experiment().training.sequence_length == 512  # the model ends there


def test_everything_may_be_kept_but_what_the_goal_sets(make_tiny: Tiny) -> None:
    """One configuration is left; the largest batch is that of the given one's own structure."""
    kept = tune(make_tiny({"kind": "fsdp2"}), keep=("all",))
    assert kept.search.num_candidates == 1
    assert not kept.steps
    batch = tune(make_tiny({"kind": "fsdp2"}, memory="2.5 GB"), "largest-batch", keep=("all",))
    assert batch.search.num_candidates == 1
    assert there(batch.best[0].candidate.experiment().training.micro_batch_size) > 1


def test_the_largest_model_is_the_largest(make_tiny: Tiny) -> None:
    keep = ("checkpointing", "cross-entropy", "offload", "replicas", "reshard", "no_sync")
    result = tune(make_tiny({"kind": "fsdp2"}, memory="2.5 GB"), "largest-model", keep=keep)
    best = result.best[0].candidate.experiment()
    model = of_kind(best.model, dict)
    layers = model["n_layer"]
    assert layers > 3
    assert fits(best)
    assert f"{layers} layers instead of 3" in result.remark
    assert not fits(best.model_copy(update={"model": {**model, "n_layer": layers + 1}}))


def test_the_cheapest_needs_fewest_gpu_seconds(make_tiny: Tiny) -> None:
    """A model this small is cheapest on one GPU, where nothing is sent."""
    result = tune(make_tiny({"kind": "ddp"}), "cheapest", keep=("checkpointing",))
    assert result.best[0].gpus == 1
    assert result.given is not None
    assert result.best[0].seconds < 16 * result.given.seconds


def test_several_kinds_are_compared(make_tiny: Tiny) -> None:
    keep = ("checkpointing", "cross-entropy", "micro-batch", "offload", "hpZ", "reshard", "replicas")
    result = tune(make_tiny({"kind": "fsdp2"}), kinds=("deepspeed", "fsdp2", "ddp"), keep=keep, top=9)
    kinds = {measured.candidate.base.kind for measured in result.best}
    assert kinds == {"deepspeed", "fsdp2", "ddp"}


def test_quantised_collectives_are_tried_when_asked_for_and_never_in_the_best(make_tiny: Tiny) -> None:
    keep = ("checkpointing", "micro-batch", "offload", "stage")
    found = [tune(make_tiny({"stage": 3}), keep=keep, quantised=allows, top=2) for allows in (False, True)]
    assert found[1].num_checked > found[0].num_checked
    assert not any("qwZ" in measured.candidate.label for result in found for measured in result.best)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"goal": "fast"}, "did you mean 'fastest'"),
        ({"kinds": ("zero",)}, "--kind zero: expected one of"),
        ({"keep": ("microbatch",)}, "did you mean 'micro-batch'"),
        ({"headroom": 1.0}, "expected a fraction"),
        ({"goal": "largest-batch", "keep": ("micro-batch",)}, "the goal largest-batch sets it"),
    ],
)
def test_mistakes_name_what_was_expected(make_tiny: Tiny, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tune(make_tiny({"kind": "fsdp2"}), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["tp", "pipeline", "3D"])
def test_other_parallelisms_are_refused_by_name(make_tiny: Tiny, kind: str) -> None:
    with pytest.raises(InputError, match="--parallelism searches the degrees of --kind megatron"):
        tune(make_tiny({"kind": "fsdp2"}), kinds=("deepspeed", kind))


def test_the_given_configuration_stands_in_the_table_once(make_tiny: Tiny) -> None:
    """Everything kept: all that is left is what was given."""
    keep = (
        "checkpointing",
        "compile",
        "cross-entropy",
        "micro-batch",
        "offload",
        "reshard",
        "no_sync",
        "wrapping",
    )
    result = tune(make_tiny({"kind": "fsdp2"}, nodes=1), keep=keep)
    assert len(result.best) == 1
    assert not result.steps


def test_the_table_fits_80_columns_and_the_json_says_the_same(tuned: TuneResult) -> None:
    lines = list(tuned.lines())
    assert max(len(line) for line in lines) <= 80
    content = tuned.to_dict()
    assert content["best"][0]["step_seconds"] == tuned.best[0].seconds
    assert [row["may_run_out"] for row in content["best"]] == [False] * len(tuned.best)
    assert [step["after_seconds"] for step in content["steps"]] == [
        step.after.seconds for step in tuned.steps
    ]


def test_the_files_are_of_the_best_and_run(tuned: TuneResult, tmp_path: Path) -> None:
    for name, text in tuning_files(tuned).items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert {path.name for path in tmp_path.iterdir()} == {"best", "2", "3"}
    assert {path.name for path in (tmp_path / "best").iterdir()} == {
        "experiment.toml", "ds_config.json", "accelerate.yaml", "NOTES.txt",
    }  # fmt: skip
    report = zsim.simulate(zsim.load_experiment(tmp_path / "best" / "experiment.toml")).report
    assert report.step_seconds == pytest.approx(tuned.best[0].seconds, rel=1e-9)


def test_the_page_draws_every_simulated_configuration(tuned: TuneResult) -> None:
    page = tuned.page()
    assert page == tuned.page()
    assert 'data-plot="plot-pareto"' in page
    assert "What to change" in page
    front = pareto_front(list(tuned.measured))
    assert [m.seconds for m in front] == sorted(m.seconds for m in front)
    assert [m.gpu_bytes for m in front] == sorted((m.gpu_bytes for m in front), reverse=True)


# -- Published settings: what `zsim tune` finds fits, and is at least as fast by its odds ------------------


DOCUMENT = Path(__file__).parents[3] / "docs" / "recipes" / "tune.md"
# What stays, so that a handful of configurations is left: those of one plan are many more.
KEEP = (
    "checkpointing", "cross-entropy", "micro-batch", "offload", "no_sync", "hpZ", "wrapping",
    "backward prefetch", "forward prefetch", "limit_all_gathers", "overlap_comm", "bucket", "prefetch",
    "persistence", "reuse", "compile", "precision",
)  # fmt: skip
CHEAP = ("Llama-3.1-8B", "Llama-2-70B", "MPT-7B")


@pytest.mark.parametrize(
    "setting", [s for s in SETTINGS if any(n in s.name for n in CHEAP)], ids=lambda s: s.name
)
def test_a_small_search_is_never_slower_and_always_fits(setting: Setting) -> None:
    tuned = tune(setting.load(), keep=KEEP, top=2)
    assert tuned.given is not None
    assert tuned.best[0].objective_value(fastest) <= tuned.given.objective_value(fastest)
    assert all(measured.row["fits"] for measured in tuned.measured)


def test_the_recipe_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block, DOCUMENT.name, "exec"), {"__name__": "recipe"})
    assert "What to change, in order of gain" in printed.getvalue()
