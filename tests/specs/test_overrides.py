"""Dotted overrides: into the experiment's tables, and on into the files that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from zsim.errors import InputError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.specs.cluster.files import check_hardware_key
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import build_experiment, load_experiment, parse_setting
from zsim.specs.experiment.resolve import resolve

BASE: dict[str, Any] = {"model": "gpt2", "cluster": "dgx-h100", "gpus": 8}
ZERO2: dict[str, Any] = {**BASE, "strategy": {"kind": "deepspeed", "stage": 2}}


def job(overrides: dict[str, Any], base: dict[str, Any] = ZERO2) -> Job:
    return resolve(build_experiment(base, overrides, origin="test"))


def deepspeed(overrides: dict[str, Any], base: dict[str, Any] = ZERO2) -> DeepSpeedConfig:
    strategy = job(overrides, base).strategy
    assert isinstance(strategy, DeepSpeedConfig)
    return strategy


@pytest.fixture
def with_file(tmp_path: Path) -> dict[str, Any]:
    """An experiment with a DeepSpeed JSON of stage 3, bf16, two sequences per micro-batch."""
    content = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 1000, "offload_param": None},
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    return {**BASE, "strategy": {"kind": "deepspeed", "config": str(path)}}


def refused(words: str, overrides: dict[str, Any], base: dict[str, Any] = ZERO2) -> None:
    with pytest.raises(InputError, match=words):
        job(overrides, base)


# -- DeepSpeed's JSON ------------------------------------------------------------------------------------


def test_a_key_of_the_json_is_set_over_the_file(with_file: dict[str, Any]) -> None:
    config = deepspeed({"strategy.config.zero_optimization.reduce_bucket_size": 5e7}, with_file)
    assert config.zero.reduce_bucket_size == 50_000_000
    assert (config.zero.stage, config.zero.prefetch_bucket_size, config.batch.micro_batch_size) == (
        3,
        1000,
        2,
    )
    assert config.name.endswith("ds.json")


def test_a_key_of_the_json_is_set_over_a_stage_alone() -> None:
    """All else stays what the stage alone means: bf16 and one sequence per micro-batch."""
    plain = deepspeed({})
    config = deepspeed({"strategy.config.zero_optimization.reduce_bucket_size": 5e7})
    assert config.zero.reduce_bucket_size == 50_000_000
    assert (config.zero.stage, config.precision, config.batch) == (2, "bf16", plain.batch)


def test_the_json_may_be_built_from_nothing() -> None:
    overrides = {
        "strategy.config.zero_optimization.stage": 1,
        "strategy.config.fp16.enabled": True,
        "strategy.config.train_batch_size": 32,
    }
    config = deepspeed(overrides, BASE)
    assert (config.zero.stage, config.precision, config.batch.micro_batch_size) == (1, "fp16", 4)


def test_a_stage_in_the_json_wins_over_the_experiments_unless_both_are_set() -> None:
    key = "strategy.config.zero_optimization.stage"
    assert deepspeed({key: 1}).zero.stage == 1
    refused(r"strategy\.stage: found 2, but DeepSpeed config says", {key: 1, "strategy.stage": 2})


def test_bf16_turned_off_is_deepspeeds_fp32() -> None:
    assert deepspeed({"strategy.config.bf16.enabled": False}).precision == "fp32"


@pytest.mark.parametrize("spelling", ["prefetch_bucket_size", "stage3_prefetch_bucket_size"])
def test_both_spellings_of_a_key_change_the_same_number(with_file: dict[str, Any], spelling: str) -> None:
    config = deepspeed({f"strategy.config.zero_optimization.{spelling}": 2000}, with_file)
    assert config.zero.prefetch_bucket_size == 2000


def test_a_block_that_is_null_or_missing_is_made(with_file: dict[str, Any]) -> None:
    for base in (with_file, {**BASE, "strategy": {"stage": 3}}):
        config = deepspeed({"strategy.config.zero_optimization.offload_param.device": "cpu"}, base)
        assert config.zero.offload_param is not None
        assert config.zero.offload_param.device == "cpu"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("zero_optimization.reduce_bucket_siz", 1, r"unknown key 'reduce_bucket_siz'; did you mean 'reduce_"),
        ("zero_optimization.reduce_bucket_size", True, r"reduce_bucket_size: expected a number, found true"),
        ("zero_optimization.reduce_bucket_size", 0.5, r"zero_optimization.reduce_bucket_size: found 0.5"),
        ("zero_optimization.stage.x", 1, r"'stage' is 2, not a table"),
        ("zero_optimisation.stage", 1, r"unknown key 'zero_optimisation'; did you mean 'zero_optimization'"),
    ],
)
def test_mistakes_in_the_json_are_refused_as_in_a_file(key: str, value: Any, words: str) -> None:
    refused(words, {f"strategy.config.{key}": value})


def test_deepspeeds_keys_belong_to_deepspeed() -> None:
    base = {**BASE, "strategy": {"kind": "fsdp2"}}
    refused(r"strategy\.kind is 'fsdp2'", {"strategy.config.bf16.enabled": True}, base)


# -- the model -------------------------------------------------------------------------------------------


def test_a_key_of_the_model_is_set_over_the_preset() -> None:
    """A block of GPT-2 has 12 * 768^2 + 13 * 768 = 7,087,872 parameters; two more are 14,175,744."""
    grown = job({"model.n_layer": 14})
    assert grown.model.numel - job({}).model.numel == 14_175_744
    assert grown.model.name == "gpt2"


def test_a_key_that_says_nothing_about_the_model_is_refused() -> None:
    refused(
        r"model\.n_layr: says nothing about the shape of 'gpt2'; did you mean 'n_layer'", {"model.n_layr": 1}
    )


# -- the cluster -----------------------------------------------------------------------------------------


def test_a_number_of_the_cluster_is_set_with_a_source_that_says_so() -> None:
    nvme = job({"cluster.nvme.drives": 16}).cluster.nvme
    assert nvme is not None
    assert nvme.drives == 16
    assert nvme.source.startswith("set by the user: cluster.nvme.drives = 16; the rest as in dgx-h100")
    assert nvme.evidence == "assumed"


def test_numbers_of_the_gpu_and_the_gpu_itself_are_set() -> None:
    assert job({"cluster.gpu.memory.capacity": "40 GB"}).cluster.gpu.memory.capacity == 40_000_000_000
    assert job({"cluster.gpu": "h200-sxm-141gb"}).cluster.gpu.name == "h200-sxm-141gb"


def test_the_evidence_of_a_changed_number_may_be_given() -> None:
    changed = {"cluster.nic.bandwidth": "800 Gb/s", "cluster.nic.evidence": "measured"}
    nic = job({**changed, "cluster.nic.source": "timed on our own cluster"}).cluster.nic
    assert nic.bandwidth == 100e9
    assert nic.source.startswith("timed on our own cluster")
    assert nic.evidence == "measured"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("nic.bandwidth", 800, r"nic.bandwidth: '800' has no unit"),
        ("gpu.memry.capacity", "40 GB", r"unknown key 'memry'; did you mean 'memory'"),
        ("nics.per_node", 4, r"unknown key 'nics'; did you mean 'nic'"),
    ],
)
def test_mistakes_in_the_cluster_are_refused_as_in_a_file(key: str, value: Any, words: str) -> None:
    refused(words, {f"cluster.{key}": value})


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (
            "cluster.power_limit",
            "--set cluster.power_limit: unknown key 'power_limit'; did you mean 'gpu.power_limit'?",
        ),
        ("gpu.power_limt", "--set gpu.power_limt: unknown key 'power_limt'; did you mean 'power_limit'?"),
        ("cluster.bandwidth", "'cluster.nic.bandwidth' or 'cluster.c2c.bandwidth'?"),
        ("cluster.gpu.bandwidth", "; did you mean 'gpu.memory.bandwidth', 'gpu.cache.bandwidth', "),
        ("gpu.nic.bandwidth", "unknown key 'nic'; did you mean 'cluster.nic.bandwidth'?"),
        ("nic.bandwith", "test: unknown key 'nic'; did you mean 'cluster.nic.bandwidth'?"),
        ("power_limit", "test: unknown key 'power_limit'; did you mean 'cluster.gpu.power_limit'?"),
        ("cluster.cores", "unknown key 'cores'; did you mean 'cluster.host.cores'?"),
        ("training.stage", "test: training: unknown key 'stage'; did you mean 'strategy.stage'?"),
        ("parallelism.sequence", "parallelism: unknown key 'sequence'; did you mean 'sequence_parallel'?"),
        (
            "strategy.sequence_length",
            "test: strategy: unknown key 'sequence_length'; did you mean 'training.sequence_length'?",
        ),
    ],
)
def test_a_key_in_the_wrong_table_is_pointed_to_the_right_one(key: str, words: str) -> None:
    refused(re.escape(words), {key: 1})


@pytest.mark.parametrize("key", ["cluster.fabric", "cluster.gpu", "cluster.gpu.extends", "cluster.extends"])
def test_what_files_of_clusters_say_beside_their_tables_is_no_unknown_key(key: str) -> None:
    check_hardware_key(key, "")


def test_an_experiment_is_not_changed_by_what_is_set_over_it() -> None:
    base = {**ZERO2, "cluster": {"extends": "dgx-h100"}}
    job({"cluster.nvme.drives": 16, "strategy.config.bf16.enabled": True}, base)
    assert base["cluster"] == {"extends": "dgx-h100"}
    assert base["strategy"] == {"kind": "deepspeed", "stage": 2}


# -- what is written -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("strategy.version=0.10", "0.10"),  # a release, of which the number 0.1 is another one
        ("strategy.version = 0.15.0", "0.15.0"),
        ('strategy.version="0.8"', "0.8"),
        ("cluster.name=4090", "4090"),
        ("training.micro_batch_size=2", 2),
        ("strategy.reshard_after_forward=4", 4),
        ("strategy.config.zero_optimization.reduce_bucket_size=5e8", 5e8),
        ("training.optimizer=null", None),
    ],
)
def test_where_only_text_may_stand_a_number_is_the_text_as_written(text: str, value: object) -> None:
    assert parse_setting(text)[1] == value
    assert type(parse_setting(text)[1]) is type(value)


def test_null_unsets_a_key_of_the_experiment_and_of_the_json(with_file: dict[str, Any]) -> None:
    data = {**with_file, "training": {"activation_checkpointing": "full"}}
    assert job({}, data).training.activation_checkpointing == "full"
    assert job({"training.activation_checkpointing": None}, data).training.activation_checkpointing == "none"
    unset = deepspeed({"strategy.config.zero_optimization.stage3_prefetch_bucket_size": None}, with_file)
    assert unset.zero.prefetch_bucket_size == 50_000_000  # DeepSpeed's own


def test_null_in_a_config_json_is_a_value() -> None:
    """DeepSeek-V2 without `q_lora_rank` has transformers' 1,536; with null one product makes its queries."""
    data = {**BASE, "model": "deepseek-v2-lite", "strategy": {"kind": "fsdp2"}}
    assert any(
        "q_proj" in name for name, _ in job({"model.q_lora_rank": None}, data).model.named_parameters()
    )
    assert any(
        "q_a_proj" in name for name, _ in job({"model.q_lora_rank": 1536}, data).model.named_parameters()
    )


def test_a_clusters_number_that_is_not_set_cannot_be_unset() -> None:
    refused("nothing to unset", {"cluster.gpu.power_limit": None}, {**ZERO2})


def test_a_key_with_a_default_of_its_family_is_followed() -> None:
    """Gemma's and BERT's builders read their files through defaults of the family."""
    for name in ("gemma3-1b", "bert-base"):
        data = {**BASE, "model": name, "strategy": {"kind": "fsdp2"}}
        assert job({"model.vocab_size": 50_000}, data).model.vocab_size == 50_000


def test_a_json_that_is_not_there_is_named_with_every_place(tmp_path: Path) -> None:
    path = tmp_path / "e.toml"
    path.write_text('model = "llama-3.2-1b"\ncluster = "dgx-h100"\n[strategy]\nconfig = "d/ds.json"\n')
    with pytest.raises(
        InputError, match=r"e\.toml: strategy\.config: 'd/ds\.json': no such file; tried .* and d/ds"
    ):
        load_experiment(path)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 2}')
    assert load_experiment(path).strategy.kind == "deepspeed"
