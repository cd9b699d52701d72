"""The profile of real experiments: the simulated peak to the byte, and nothing that is not given back."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from typer.testing import CliRunner

import zsim
from zsim.cli import app
from zsim.errors import InputError
from zsim.specs.experiment.resolve import resolve
from zsim.study.measured.prediction import predict_step
from zsim.study.memory import compare_memory, profile_memory
from zsim.validated.verdict import verdict_of

STRATEGIES: dict[str, dict[str, Any]] = {
    "FSDP2": {"kind": "fsdp2"},
    "HSDP, reduced in bf16": {"kind": "fsdp2", "replicate": 2, "reduce_dtype": "bf16"},
    "FSDP2, resharded to a node": {"kind": "fsdp2", "reshard_after_forward": 8, "no_sync": True},
    "FSDP2, offloaded": {"kind": "fsdp2", "cpu_offload": True},
    "FSDP1": {"kind": "fsdp1"},
    "ZeRO-2": {"kind": "deepspeed", "stage": 2},
    "ZeRO-3": {"kind": "deepspeed", "stage": 3},
    "DDP": {"kind": "ddp"},
}  # fmt: skip


def experiment(strategy: dict[str, Any], **training: Any) -> zsim.Experiment:
    return zsim.Experiment(
        model="llama-3.2-1b",
        cluster="dgx-h100",
        nodes=2,
        training={"sequence_length": 2048, "gradient_accumulation_steps": 2, **training},
        strategy=strategy,
    )


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("checkpointing", ["full", "selective-op"])
def test_the_peak_is_the_simulated_one_and_its_owners_add_up_to_it(name: str, checkpointing: str) -> None:
    asked = experiment(STRATEGIES[name], activation_checkpointing=checkpointing)
    peak = zsim.simulate(asked).report.peaks["gpu"]
    profile = profile_memory(asked).profile
    assert profile.peak.total == peak.total
    assert dict(profile.peak.by_category) == peak.at_total
    assert sum(profile.at_peak.values()) == peak.total


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_owner_gives_back_what_it_took(name: str) -> None:
    plan = zsim.make_plan(experiment(STRATEGIES[name], activation_checkpointing="full"))
    left: Counter[tuple[str, str, str]] = Counter()
    for change in plan.memory:
        left[change.device, change.category, change.owner] += change.bytes
    assert {owner: size for owner, size in left.items() if size} == {}


def test_a_checkpointed_block_keeps_its_input_and_its_modules_nothing() -> None:
    """2,048 tokens x 2,048 wide x 2 bytes of each of the 16 blocks."""
    profile = profile_memory(experiment({"kind": "fsdp2"}, activation_checkpointing="full")).profile
    kept = {
        owner: size
        for (category, owner), size in profile.kept_for_backward.items()
        if category == "activations" and owner.startswith("model.layers.")
    }
    assert kept == {f"model.layers.{number} checkpoint": 8_388_608 for number in range(16)}


def test_blocks_may_differ_in_what_they_keep() -> None:
    """Blocks 0 to 3 keep their inputs, 4 also what attention and every second product put out, the others
    all: as they would each keep if all were like them."""
    policies = {"0-3": "full", "4": "selective-op"}
    mixed = _kept_by_block(block_checkpointing=policies)
    full, partly, nothing = (
        _kept_by_block(activation_checkpointing=policy) for policy in ("full", "selective-op", "none")
    )
    assert mixed == {n: (full if n < 4 else partly if n == 4 else nothing)[n] for n in range(16)}
    assert full[0] < partly[0] < nothing[0]


def _kept_by_block(**training: Any) -> dict[int, int]:
    kept: Counter[int] = Counter()
    profile = profile_memory(experiment({"kind": "fsdp2"}, **training)).profile
    for (category, owner), size in profile.kept_for_backward.items():
        if category == "activations" and owner.startswith("model.layers."):
            kept[int(owner.split(".")[2].split()[0])] += size
    return dict(kept)


def test_half_the_blocks_run_again_between_none_and_all() -> None:
    seconds = [
        zsim.simulate(experiment({"kind": "fsdp2"}, **training)).report
        for training in ({}, {"block_checkpointing": {"0-7": "full"}}, {"activation_checkpointing": "full"})
    ]
    none, half, full = (report.step_seconds for report in seconds)
    assert none < half < full
    assert seconds[0].hfu_fraction == seconds[0].mfu_fraction  # nothing is run again


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"block_checkpointing": {"16": "full"}}, "found block 16; the model has 0-15"),
        ({"block_checkpointing": {"3": "full", "2-4": "none"}}, "block 3 is named twice"),
        ({"block_checkpointing": {"all": "full"}}, "expected block numbers like '0-15' or '3,7'"),
        ({"block_checkpointing": {"1": "full"}, "checkpoint_every": 2}, "both say which blocks"),
    ],
)
def test_blocks_that_cannot_be_meant_are_refused(training: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        profile_memory(experiment({"kind": "fsdp2"}, **training))


def test_the_command_prints_tables_and_json_and_fails_where_it_does_not_fit() -> None:
    words = ["memory", "--model", "llama-3-8b", "--cluster", "dgx-a100-40gb", "--nodes", "1"]
    small = [*words, "--set", "strategy.kind=fsdp2", "--set", "training.sequence_length=512"]
    result = CliRunner().invoke(app, small)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80
    for heading in ("Highest of, GB", "Who holds it at the peak", "Kept for backward", "Unsharded by unit"):
        assert heading in result.output
    content = json.loads(CliRunner().invoke(app, [*small, "--json", "-"]).output)
    assert content["fits"]
    assert content["peak"]["total_bytes"] == sum(row["bytes"] for row in content["held_at_peak"])
    large = CliRunner().invoke(app, [*words, "--set", "strategy.kind=ddp"])
    assert large.exit_code == 1
    assert "DOES NOT FIT" in large.output


SIDE_BY_SIDE = ["memory", "--model", "llama-3.2-1b", "--cluster", "dgx-h100", "--nodes", "1"]


def test_variants_stand_side_by_side_and_one_that_cannot_be_is_a_row() -> None:
    """1, 2 and 8 divide the 8 GPUs, 3 does not."""
    words = [*SIDE_BY_SIDE, "--set", "strategy.kind=fsdp2", "--vary", "strategy.replicate=1,3,2"]
    for by in ("category", "phase", "time"):
        result = CliRunner().invoke(app, [*words, "--by", by])
        assert result.exit_code == 0, result.output
        lines = result.output.splitlines()
        assert lines[0].startswith("replicate ")
        judged = [] if by == "time" else ["Judged"]
        assert [line.split()[0] for line in lines[1:]] == ["1", "3", "2", *judged]
        assert "expected a divisor" in lines[2] or "found 3" in lines[2]
        assert max(map(len, lines)) <= 80
    rows = json.loads(CliRunner().invoke(app, [*words, "--json", "-"]).output)
    assert [row["overrides"]["strategy.replicate"] for row in rows] == [1, 3, 2]
    assert rows[1]["error"].startswith("strategy.replicate: found 3")
    peaks = [row["peak"]["total_bytes"] for row in (rows[0], rows[2])]
    assert peaks[0] < peaks[1]


@pytest.mark.parametrize(("length", "may_run_out"), [(6795, True), (2048, False)])
def test_the_json_says_where_torchs_allocator_may_find_no_room(length: int, may_run_out: bool) -> None:
    words = [
        *SIDE_BY_SIDE, "--set", "strategy.kind=deepspeed", "--set", "training.micro_batch_size=5",
        "--set", "training.gradient_accumulation_steps=2", "--set", f"training.sequence_length={length}",
        "--set", "training.activation_checkpointing=selective-op", "--vary", "strategy.stage=2",
    ]  # fmt: skip
    rows = json.loads(CliRunner().invoke(app, [*words, "--by", "time", "--json", "-"]).output)
    assert [row["fits"] for row in rows] == [True]
    assert [row["may_run_out"] for row in rows] == [may_run_out]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--by", "phas"], "did you mean 'phase'"),
        (["--by", "time"], "is for --vary"),
        (["--vary", "training.micro_batchsize=1,2"], "did you mean 'micro_batch_size'"),
        (["--vary", "nodes"], "expected KEY=VALUE"),
    ],
)
def test_what_cannot_be_varied_is_said(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, [*SIDE_BY_SIDE, *words])
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nodes=[]"], "expected at least one value"),
        (["nodes"], "expected KEY=VALUES"),
        (["nodes=1", "nodes=2"], "nodes is there twice"),
    ],
)
def test_what_is_varied_must_have_values_once(words: list[str], reason: str) -> None:
    options = [part for word in words for part in ("--vary", word)]
    result = CliRunner().invoke(app, ["memory", "--model", "gpt2", "--cluster", "dgx-h100", *options])
    assert isinstance(result.exception, InputError)
    assert reason in str(result.exception)


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        (["nodes=0,1"], "nodes = 0: experiment: nodes: found 0, expected greater than 0"),
        (["nodes=1,2", "training.precision=bf16,bf61"], "training.precision = bf61: experiment: training"),
    ],
)
def test_a_value_that_no_experiment_has_is_refused_before_the_first_row(
    vary: list[str], message: str
) -> None:
    options = [part for one in vary for part in ("--vary", one)]
    done = CliRunner().invoke(app, ["memory", "--model", "gpt2", "--cluster", "dgx-h100", *options])
    assert isinstance(done.exception, InputError)
    assert str(done.exception).startswith(message)
    assert done.stdout == ""


def test_varying_a_key_keeps_the_rest_of_its_table() -> None:
    """A pipeline of 2 beside tensor parallelism of 8 shares the parameters 16 ways, not 2."""
    given = zsim.Experiment(
        model="llama-3.2-1b", cluster="dgx-h100", nodes=2, strategy={"kind": "megatron"},
        parallelism={"tensor": 8}, training={"sequence_length": 2048, "gradient_accumulation_steps": 4},
    )  # fmt: skip
    (found,) = compare_memory(given, {"parallelism.pipeline": [2]})
    assert found.profiled is not None
    assert found.profiled.job.parallelism.tensor == 8


def test_all_commands_have_one_probability_of_a_job_that_exceeds_the_memory() -> None:
    """Model states are exact in the run, in the profile, in their JSON and in the predicted rows."""
    asked = zsim.Experiment(
        model="qwen3-4b",
        cluster="dgx-h100",
        training={"micro_batch_size": 1, "sequence_length": 512},
        strategy={"kind": "ddp"},
    )
    report, profile = zsim.simulate(asked).report, profile_memory(asked)
    load, exact = report.load_and_exact
    assert load > 1 > exact > 0.5
    assert profile.load_and_exact == pytest.approx((load, exact))
    found = report.verdict.probability
    assert found < verdict_of(load, "DDP").probability - 0.02
    shown = [report.to_dict()["fits_probability"], profile.to_dict()["fits_probability"]]
    assert [profile.verdict.probability, *shown] == pytest.approx([found] * 3)
    step = predict_step(resolve(asked))
    assert step.peak_bytes == report.peaks["gpu"].total
    assert step.state_bytes / step.peak_bytes == pytest.approx(exact / load)
