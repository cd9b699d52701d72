"""`python -m validation.rl`: words of tables, rows that fail alone, and the JSON."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from validation.rl import calibration
from validation.rl.__main__ import main, placement_pairs
from validation.rl.predict import RowPrediction
from validation.rl.steps import row_experiment
from validation.rl.table import RlRow, read_rows
from validation.rl.words import Layout, cluster_of, dtype_of, model_of, split_of
from zsim.cost.inference.iteration import ADAPTER_SECONDS
from zsim.engine.simulator import Simulator
from zsim.errors import NotSimulatedError
from zsim.frameworks.verl.workflow import PHASES, RELOAD_BANDWIDTH
from zsim.specs.library import Library
from zsim.workflows.rl.job import resolve_rl

STEP = {
    "role": "report", "row_id": "a", "source": "s", "framework": "NeMo-RL", "version": "v0.5.0",
    "algorithm": "GRPO", "model": "meta-llama/Llama-3.2-1B-Instruct", "n_gpus": "8",
    "gpu": "H100-SXM5-80GB (DGX)", "gpus_per_node": "8", "placement": "colocated", "gpu_split": "all shared",
    "prompts_per_step": "16", "samples_per_prompt": "8", "prompt_len_mean": "100",
    "response_len_mean": "300", "response_len_max": "1500", "train_parallelism": "fsdp2 over 8",
    "gen_parallelism": "vllm tp1 x 8 replicas; gpu_mem 0.6", "updates_per_rollout": "2",
    "logprob_passes": "policy + reference", "step_time_s": "20", "train_s": "", "sync_s": "",
}  # fmt: skip
ENGINE = {
    "role": "report", "row_id": "e", "source": "s", "engine": "vLLM", "version": "0.15.1",
    "model": "Llama-3.1-8B", "gpu": "H100-SXM5-80GB", "n_gpus": "1", "tp": "1", "precision": "bf16",
    "concurrency": "16", "concurrency_kind": "closed", "n_requests": "32", "input_len": "200",
    "output_len": "50", "output_tokens_per_s": "", "itl_mean_ms": "",
}  # fmt: skip


def write(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def predict(tmp_path: Path, *rows: dict[str, str]) -> list[dict[str, object]]:
    out = tmp_path / "out.json"
    assert main([str(write(tmp_path / "runs.csv", *rows)), "--json", str(out)]) == 0
    content: list[dict[str, object]] = json.loads(out.read_text())["rows"]
    return content


def test_a_step_has_its_phases_and_a_range(tmp_path: Path) -> None:
    (row,) = predict(tmp_path, STEP)
    assert row["status"] == "predicted"
    assert isinstance(row["predicted_seconds"], float)
    assert row["measured_seconds"] == 20.0
    assert isinstance(row["predicted_phases_seconds"], dict)
    assert set(row["predicted_phases_seconds"]) >= {"rollout", "training", "weight_sync"}
    assert isinstance(row["predicted_phases_range_seconds"], dict)
    for name, (low, high) in row["predicted_phases_range_seconds"].items():
        assert low <= row["predicted_phases_seconds"][name] <= high


def test_a_row_that_cannot_be_simulated_is_skipped_with_its_reason(tmp_path: Path) -> None:
    first, second = predict(tmp_path, {**STEP, "gpu": "TPU v7"}, {**STEP, "row_id": "b"})
    assert (first["status"], first["reason"]) == ("skipped", "GPU 'TPU v7' has no hardware file")
    assert second["status"] == "predicted"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {  # its trainer is not named, and its recipes of Megatron have a key of their own
            "model": "Qwen/Qwen3-235B-A22B", "n_gpus": "256", "placement": "split", "gpu_split": "",
            "train_parallelism": "", "gen_parallelism": "",
        },
    ],
)  # fmt: skip
def test_a_row_about_the_sync_alone_has_only_that(tmp_path: Path, changes: dict[str, str]) -> None:
    (row,) = predict(
        tmp_path,
        {
            **STEP,
            "algorithm": "sync-only",
            "prompts_per_step": "",
            "samples_per_prompt": "",
            "sync_s": "2",
            **changes,
        },
    )
    assert row["predicted_seconds"] is None
    assert list(row["predicted_phases_seconds"]) == ["weight_sync"]  # type: ignore[call-overload]


def test_an_engine_has_tokens_and_times_between_them(tmp_path: Path) -> None:
    """16 sequences of an 8B model, about 9 ms a token: 1,000 to 2,500 tokens/s."""
    (row,) = predict(tmp_path, ENGINE)
    assert 1000 < row["predicted_tokens_per_second"] < 2500  # type: ignore[operator]
    assert 0.006 < row["predicted_itl_seconds"] < 0.016  # type: ignore[operator]


def test_prompts_of_shared_prefixes_are_computed_once(tmp_path: Path) -> None:
    """Prompts of 4,000 tokens stand in the way of answers, but for 44 of them."""
    row = {
        **ENGINE, "input_len": "4000", "concurrency": "", "request_rate_per_s": "8", "n_requests": "200",
        "itl_mean_ms": "10", "prefix_caching": "on", "length_law": "", "concurrency_kind": "open arrivals",
    }  # fmt: skip
    shared = {**row, "row_id": "f", "length_law": "shared-prefix workload"}
    own, once = (content["predicted_itl_seconds"] for content in predict(tmp_path, row, shared))
    assert once < 0.7 * own  # type: ignore[operator]


def test_constants_come_from_rows_to_calibrate_with_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of 10 s that is there to report an error is not among them, whatever its length."""
    row = {**STEP, "role": "calibrate", "row_id": "b", "response_len_mean": "600"}
    assert calibration.main([str(write(tmp_path / "runs.csv", STEP, row))]) == 0
    printed = capsys.readouterr().out
    assert "1 rows, 0.40 to 0.40, geometric mean 0.400" in printed
    assert "\n    b " in printed
    assert "\n    a " not in printed
    assert "step, 1: " in printed


@pytest.mark.slow
def test_verl_has_the_constants_that_calibration_prints() -> None:
    """Of the six runs whose lengths are published. A phase that takes less than its passes has none."""
    table = Path(calibration.__file__).parent / "offloaded_runs.csv"
    runs = calibration.offloaded_runs(read_rows([table]))
    bandwidth = calibration.reload_bandwidth(runs)
    assert round(bandwidth / 1e9) == RELOAD_BANDWIDTH / 1e9
    seconds = calibration.phase_seconds(runs, bandwidth)
    assert {phase: round(value, 1) for phase, value in seconds.items() if value > 0} == PHASES


@pytest.mark.slow
def test_adapters_take_the_python_that_calibration_prints() -> None:
    """The geometric mean of the same six runs, whatever the constant is from which it starts."""
    table = Path(calibration.__file__).parent / "offloaded_runs.csv"
    seconds = calibration.adapter_seconds(read_rows([table]))
    assert len(seconds) == 6
    assert round(geometric_mean(seconds.values()), 5) == ADAPTER_SECONDS


def test_the_first_benchmarks_of_prime_rl_copy_weights_to_the_host(tmp_path: Path) -> None:
    """1.24 billion parameters in 16 bits at 6 GB/s, and no optimizer states. The host reads the positions of
    16 samples of a replica one by one, a kernel and a copy for each of 1,024 tokens."""
    row = {
        **STEP, "framework": "prime-rl", "version": "Jan 2026", "algorithm": "RL trainer only, full",
        "total_len_max": "1024", "offload": "optimizer states on CPU", "placement": "split",
        "gpu_split": "train 8 / gen 0",
    }  # fmt: skip
    (predicted,) = (content["predicted_phases_seconds"] for content in predict(tmp_path, row))
    asked = row_experiment(RlRow("a", row, False), Library())
    assert not row_experiment(RlRow("b", {**row, "version": "Jun 2026"}, False), Library()).read_tokens
    step = Simulator().job(asked.experiment)
    assert asked.read_tokens == 16 * 1024
    reading = 2 * step.cluster.host.seconds_per_launch * asked.read_tokens
    assert not step.strategy.offload_states  # type: ignore[attr-defined]
    copying = 2 * step.model.numel * (1 / 6e9 + 0.27e-9)
    assert predicted["training"] > copying + reading  # type: ignore[index]


def test_a_trainer_alone_has_the_memory_that_torch_reserves(tmp_path: Path) -> None:
    row = {
        **STEP, "algorithm": "RL trainer only, full", "total_len_max": "1024", "peak_mem_gib": "10",
        "gpu_split": "train 8 / gen 0", "placement": "split",
    }  # fmt: skip
    (content,) = predict(tmp_path, row)
    assert content["measured_peak_bytes"] == 10 * 2**30
    assert isinstance(content["predicted_peak_bytes"], int)
    assert content["predicted_peak_bytes"] > 1.24e9 * 16 / 8


def prediction(row_id: str, placement: str, gpus: int, measured: float, predicted: float) -> RowPrediction:
    return RowPrediction(
        row_id, "s", "report", "predicted", placement=placement, gpus=gpus, batch=("m",),
        measured_seconds=measured, predicted_seconds=predicted,
    )  # fmt: skip


def test_the_faster_placement_is_that_of_fewer_gpu_seconds() -> None:
    """8 GPUs for 10 s against 8 for 9 s, and against 16 for 6 s."""
    colocated = prediction("a", "colocated", 8, 10.0, 10.0)
    split, asynchronous = prediction("b", "split", 8, 9.0, 11.0), prediction("c", "async", 16, 6.0, 7.0)
    pairs = placement_pairs([colocated, split, asynchronous])
    assert [(pair.first.row_id + pair.second.row_id, pair.is_right) for pair in pairs] == [
        ("ab", False), ("ac", True), ("bc", True),
    ]  # fmt: skip
    assert [pair.is_same_gpus for pair in pairs] == [True, False, False]


def test_a_row_says_that_its_lengths_are_assumed_and_how_far_training_is_off() -> None:
    row = replace(prediction("a", "async", 8, 10.0, 30.0), assumptions=("H100", "responses of 900 tokens"))
    assert row.doubt == "assumed: responses of 900 tokens"
    row = replace(row, measured_phases={"training": 2.0}, predicted_phases={"training": 6.0})
    assert row.doubt == "assumed: responses of 900 tokens, with which training takes 3.0 times as long"
    assert not replace(row, assumptions=("H100",)).doubt


def experiment_of(**changes: str) -> Any:
    return row_experiment(RlRow("a", {**STEP, **changes}, False), Library()).experiment


def test_a_row_of_deepspeed_chat_generates_sixteen_samples_a_gpu_unless_it_says_more() -> None:
    """8 GPUs have 16 of 128 samples each, whatever fits a packed micro-batch."""
    chat = {
        "framework": "DeepSpeed-Chat",
        "algorithm": "PPO",
        "train_parallelism": "ZeRO-3",
        "gen_parallelism": "",
    }
    sizes = [experiment_of(**chat, micro_batch=text).training.micro_batch_size for text in ("", "4 a GPU")]
    assert sizes == [16, 4]


@pytest.mark.parametrize(
    ("name", "placement", "framework"),
    [("AReaL", "async", "areal"), ("AReaL", "colocated", "verl"), ("DS-Chat", "colocated", "deepspeed-chat"),
     ("NeMo RL", "split", "nemo-rl"), ("prime-rl", "async", "prime-rl"), ("LlamaRL", "async", "verl"),
     ("OpenRLHF", "colocated", "openrlhf"), ("TRL", "split", "trl"), ("slime", "async", "slime")],
)  # fmt: skip
def test_a_framework_without_the_placement_is_taken_as_verl(
    name: str, placement: str, framework: str
) -> None:
    split = "all shared" if placement == "colocated" else "train 4 / gen 4"
    algorithm = "PPO" if name == "DS-Chat" else "GRPO"
    table = experiment_of(framework=name, placement=placement, gpu_split=split, algorithm=algorithm).rl
    assert (table.framework, table.placement) == (framework, placement)


def test_only_verls_own_fully_asynchronous_rows_stream_prompts() -> None:
    """A recipe of one step off, and frameworks that zsim has not, generate the next batch meanwhile."""
    split = {"placement": "async", "gpu_split": "train 4 / gen 4"}
    streamed, one_off, other = (
        experiment_of(**split, framework=name, source_location=place).rl
        for name, place in (("verl", "fully_async.md"), ("verl", "one_step_off.md"), ("Unknown", ""))
    )
    assert streamed.stream_prompts is not None
    assert one_off.stream_prompts is other.stream_prompts is None
    assert (one_off.max_staleness, one_off.partial_rollout, other.max_staleness) == (1, False, 1)


def test_the_cards_of_a_row_are_its_own() -> None:
    row = RlRow("a", {**STEP, "gpu": "GH200 (4 a node, 4 NICs of 25 GB/s)", "gpus_per_node": "4"}, False)
    asked = row_experiment(row, Library())
    nic = resolve_rl(asked.experiment, Simulator()).cluster.nic
    assert (nic.per_node, nic.bandwidth) == (4, 25e9)


def test_another_table_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write(tmp_path / "other.csv", {"a": "1"}))]) == 2
    assert "expected a header line with 'placement'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "llama-3.1-70b"),
        ("deepseek-ai/DeepSeek-V3.1 (fp8)", "deepseek-v3"),
        ("google/gemma-3-4b-it", "gemma3-4b"),
    ],
)
def test_models_are_found_by_their_names(name: str, preset: str) -> None:
    assert model_of(name) == preset


def test_a_distilled_model_has_the_shape_of_its_student() -> None:
    assert model_of("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B") == "qwen2.5-7b"


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(NotSimulatedError, match=r"model 'acme/secret' has no known shape"):
        model_of("acme/secret")


@pytest.mark.parametrize(
    ("gpu", "preset"),
    [("H20-96GB", "hgx-h20"), ("H200-SXM-141GB", "hgx-h200"), ("GB200-NVL72", "gb200-nvl72")],
)
def test_gpus_are_told_apart(gpu: str, preset: str) -> None:
    assert cluster_of(gpu) == preset


def test_layouts_are_read_from_text() -> None:
    layout = Layout("megatron tp4 cp2 ep8 pp16 dp8 dist-opt sp")
    assert (layout.tensor, layout.context, layout.expert, layout.pipeline, layout.data) == (4, 2, 8, 16, 8)
    assert Layout("fsdp2 fsdp_size 8 ulysses sp4").context == 4
    assert split_of("train 96 / gen 32") == (96, 32)
    assert split_of("all shared") is None
    assert [dtype_of(text) for text in ("NVFP4", "fp8", "BF16", "")] == ["fp4", "fp8", "bf16", "bf16"]
