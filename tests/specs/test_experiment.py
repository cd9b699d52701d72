"""The experiment file: its shape, its mistakes, and how it is resolved into a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zsim.errors import InputError
from zsim.frameworks.ddp.settings import DdpConfig
from zsim.frameworks.fsdp1.settings import Fsdp1Config
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import build_experiment, load_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

BASE: dict[str, Any] = {"model": "llama-2-7b", "cluster": "dgx-h100"}


def experiment(**changes: Any) -> Experiment:
    return Experiment(**{**BASE, **changes})


def job(**changes: Any) -> Job:
    return resolve(experiment(**changes))


def refused(words: str, **changes: Any) -> None:
    """The experiment is an InputError whose one paragraph says so."""
    with pytest.raises(InputError, match=words) as caught:
        job(**changes)
    assert "\n" not in str(caught.value)


# -- mistakes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"modle": "x"}, r"unknown key 'modle'; did you mean 'model'"),
        (
            {"training": {"sequence_lenght": 1}},
            r"unknown key 'sequence_lenght'; did you mean 'sequence_l",
        ),
        ({"strategy": {"kind": "ddp", "bucket_cap_mb": 1e308}}, r"strategy\.bucket_cap_mb: found 1e\+308"),
        (
            {
                "strategy": {
                    "kind": "deepspeed",
                    "config": {"zero_optimization": {"reduce_bucket_size": 1e30}},
                }
            },
            r"zero_optimization\.reduce_bucket_size: found 1e\+30",
        ),
        ({"training": {"device_max_connections": 0}}, r"training\.device_max_connections: found 0"),
        ({"training": {"device_max_connections": 33}}, r"training\.device_max_connections: found 33"),
        ({"training": {"device_max_connections": 1.0}}, r"training\.device_max_connections: found 1\.0"),
        ({"strategy": {"kind": {"a": 1}}}, r"strategy\.kind: found \{'a': 1\}, expected one of ddp, deepspe"),
        (
            {"strategy": {"kind": ["fsdp2"]}},
            r"strategy\.kind: found \['fsdp2'\], expected one of ddp, deepspe",
        ),
        (
            {"parallelism": {"expert_imbalance": 0.5}},
            r"parallelism\.expert_imbalance: found 0\.5, expected gr",
        ),
        ({"strategy": {5: 1, "x": 2}}, r"strategy: unknown key '5'"),
        (
            {"strategy": {"kind": "fsdp3"}},
            r"strategy\.kind: found 'fsdp3', expected one of ddp, deepspe",
        ),
        (
            {"strategy": {"kind": "fsdp2", "reshard_after": True}},
            r"unknown key 'reshard_after'; did you",
        ),
        ({"strategy": {"wraping": "none"}}, r"unknown key 'wraping'; did you mean 'wrapping'"),
    ],
)
def test_a_typo_is_refused_with_the_nearest_right_word(changes: dict[str, Any], words: str) -> None:
    refused(words, **changes)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("fsdp2", r'strategy: found \'fsdp2\', expected a table; write kind = "fsdp2"$'),
        ("ZeRO-3", r'expected a table; write kind = "deepspeed" and stage = 3$'),
        (
            {"kind": "zero_2"},
            r'found \'zero_2\', expected one of .*; write kind = "deepspeed" and stage = 2$',
        ),
        ({"kind": "fsdp"}, r'write kind = "fsdp1" for FullyShardedDataParallel, or kind = "fsdp2" for fully'),
        ({"kind": "HSDP"}, r'write kind = "fsdp2" and replicate = the number of replicas'),
    ],
)
def test_what_people_call_a_strategy_is_refused_with_the_keys_that_say_it(
    strategy: object, words: str
) -> None:
    refused(words, strategy=strategy)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (
            {"kind": "fsdp2", "limit_all_gathers": True},
            r"strategy\.limit_all_gathers does not belong to kind 'fsdp2'; it is a key of fsdp1",
        ),
        (
            {"kind": "ddp", "reshard_after_forward": True},
            r"not belong to kind 'ddp'; it is a key of fsdp2",
        ),
        (
            {"kind": "fsdp1", "stage": 3},
            r"not belong to kind 'fsdp1'; it is a key of deepspeed",
        ),
        (
            {"kind": "deepspeed", "replicate": 2},
            r"'deepspeed'; it is a key of fsdp1 and fsdp2",
        ),
    ],
)
def test_a_key_of_another_kind_is_refused_by_its_owner(strategy: dict[str, Any], words: str) -> None:
    refused(words, strategy=strategy)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ({"stage": 3}, "deepspeed"),
        ({"bucket_cap_mb": 10}, "ddp"),
        ({"sharding_strategy": "FULL_SHARD"}, "fsdp1"),
        ({"reshard_after_forward": False}, "fsdp2"),
        ({"replicate": 1}, "fsdp2"),
        ({}, "fsdp2"),
    ],
)
def test_a_missing_kind_is_read_from_the_keys(strategy: dict[str, Any], kind: str) -> None:
    assert experiment(strategy=strategy).strategy.kind == kind


def test_keys_of_two_kinds_without_a_kind_are_refused() -> None:
    refused(r"strategy\.kind is missing", strategy={"stage": 3, "bucket_cap_mb": 10})


@pytest.mark.parametrize("key", ["gpus", "nodes"])
@pytest.mark.parametrize("value", [0, -8, 1.5, "8", True, float("nan")])
def test_counts_are_whole_and_positive(key: str, value: Any) -> None:
    refused(key, **{key: value})


@pytest.mark.parametrize("value", [0, -1, float("nan"), 2.5])
@pytest.mark.parametrize("key", ["sequence_length", "micro_batch_size", "gradient_accumulation_steps"])
def test_training_counts_are_whole_and_positive(key: str, value: Any) -> None:
    refused(key, training={key: value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_gradient_clipping_is_a_finite_number(value: float) -> None:
    refused("gradient_clipping", training={"gradient_clipping": value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0, -25])
def test_a_bucket_has_a_finite_size(value: float) -> None:
    refused("bucket_cap_mb", strategy={"kind": "ddp", "bucket_cap_mb": value})


@pytest.mark.parametrize("value", [0, -2, "yes", 1.5])
def test_resharding_is_a_flag_or_a_group_size(value: Any) -> None:
    refused("reshard_after_forward", strategy={"kind": "fsdp2", "reshard_after_forward": value})


@pytest.mark.parametrize("value", [3, 16, 8, 1])
def test_a_group_to_reshard_to_divides_the_shard_group_and_is_smaller(value: int) -> None:
    """On 8 ranks: 2 and 4 are possible."""
    refused(
        rf"found group size {value}, expected a divisor of the 8 ranks",
        gpus=8,
        strategy={"kind": "fsdp2", "reshard_after_forward": value},
    )


@pytest.mark.parametrize(
    "strategy",
    [
        {"kind": "fsdp2", "replicate": 3},
        {"kind": "fsdp1", "sharding_strategy": "HYBRID_SHARD", "replicate": 3},
    ],
)
def test_replicas_divide_the_world(strategy: dict[str, Any]) -> None:
    refused(r"strategy\.replicate: found 3, expected a divisor of 16 GPUs", nodes=2, strategy=strategy)


def test_replicas_of_fsdp1_need_a_hybrid_strategy() -> None:
    refused(r"FULL_SHARD has no replicas", nodes=2, strategy={"kind": "fsdp1", "replicate": 2})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": 12}, r"gpus: found 12, expected a multiple of the 8 GPUs of a 'dgx-h100' node \(8 or 16\)"),
        ({"gpus": 10, "nodes": 3}, r"gpus: found 10 on 3 nodes"),
        ({"gpus": 20, "nodes": 2}, r"gpus: found 20 on 2 nodes of 'dgx-h100' with 8 GPUs each; expected 16"),
    ],
)
def test_uneven_nodes_are_refused_with_what_would_fit(changes: dict[str, Any], words: str) -> None:
    refused(words, **changes)


def test_both_fsdps_offload_to_the_cpu() -> None:
    for kind in ("fsdp1", "fsdp2"):
        assert job(strategy={"kind": kind, "cpu_offload": True}).strategy.cpu_offload  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"cluster": "dgx-2", "training": {"precision": "bf16"}},
            r"'v100.*' has no bf16 arithmetic; it has fp16",
        ),
        (
            {"cluster": "dgx-2", "training": {"attention": "flash"}},
            r"not support 'flash'; expected 'math'",
        ),
        ({"training": {"attention": "flash", "precision": "fp32"}}, r"'flash' needs bf16 or fp16"),
        (
            {"model": "gpt2", "training": {"sequence_length": 2048}},
            r"found 2048, but 'gpt2' has 1024 learned",
        ),
        ({"model": "lama-2-7b"}, r"lama-2-7b"),
        ({"cluster": "dgx-h10"}, r"dgx-h10"),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, Any], words: str) -> None:
    refused(words, **changes)


# -- files -----------------------------------------------------------------------------------------------

FILE = """
model = "llama-3-8b"
cluster = "dgx-h100"
nodes = 2

[training]
sequence_length = 8192
activation_checkpointing = "full"

[strategy]
kind = "fsdp2"
replicate = 2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "experiment.toml"
    path.write_text(FILE)
    return path


def test_a_file_is_read_and_resolved(file: Path) -> None:
    resolved = resolve(load_experiment(file))
    assert (resolved.model.name, resolved.world_size) == ("llama-3-8b", 16)
    assert resolved.training.sequence_length == 8192
    assert resolved.strategy == Fsdp2Config(None, 2, "torchtitan", "bf16", "fp32", False)


def test_a_missing_file_and_a_truncated_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.toml"):
        load_experiment(tmp_path / "nowhere.toml")
    path = tmp_path / "half.toml"
    path.write_text(FILE[: FILE.index("full")])
    with pytest.raises(InputError, match=r"half\.toml"):
        load_experiment(path)


def test_the_file_is_named_in_its_errors(file: Path) -> None:
    file.write_text(FILE.replace("nodes", "nods"))
    with pytest.raises(InputError, match=r"experiment\.toml: unknown key 'nods'; did you mean 'nodes'"):
        load_experiment(file)


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    """A DeepSpeed JSON beside the experiment."""
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1})
    )
    path = tmp_path / "experiment.toml"
    path.write_text('model = "gpt2"\ncluster = "dgx-h100"\n[strategy]\nconfig = "ds.json"\n')
    assert load_experiment(path).strategy.config == str(tmp_path / "ds.json")  # type: ignore[attr-defined]


def test_overrides_win_over_the_file(file: Path) -> None:
    changed = load_experiment(file, {"training.sequence_length": 4096, "model": "llama-2-7b"})
    assert (changed.training.sequence_length, changed.model) == (4096, "llama-2-7b")
    assert changed.training.activation_checkpointing == "full"


@pytest.mark.parametrize("kind", [{"a": 1}, ["fsdp2"], 5])
def test_a_kind_of_another_type_on_the_command_line_is_refused(kind: object) -> None:
    with pytest.raises(InputError, match=r"command line: strategy\.kind: found .*, expected one of ddp"):
        build_experiment(
            {**BASE, "strategy": {"kind": "fsdp1"}}, {"strategy.kind": kind}, origin="command line"
        )


def test_overriding_the_kind_drops_the_keys_of_the_old_one(file: Path) -> None:
    """`replicate` is FSDP1's too and stays; DDP knows neither."""
    assert load_experiment(file, {"strategy.kind": "ddp"}).strategy.model_fields_set == {"kind"}
    kept = load_experiment(file, {"strategy.kind": "fsdp1", "strategy.sharding_strategy": "HYBRID_SHARD"})
    assert kept.strategy.replicate == 2  # type: ignore[attr-defined]


def test_overriding_gpus_drops_the_files_nodes_and_the_other_way_round(file: Path) -> None:
    assert resolve(load_experiment(file, {"gpus": 4})).world_size == 4
    data = {**BASE, "gpus": 4}
    assert resolve(build_experiment(data, {"nodes": 3}, origin="test")).world_size == 24


def test_an_override_below_a_value_is_refused(file: Path) -> None:
    with pytest.raises(InputError, match=r"--set nodes\.name: 'nodes' is 2, not a table"):
        load_experiment(file, {"nodes.name": "x"})


def test_overrides_leave_their_source_alone() -> None:
    data = {**BASE, "training": {"sequence_length": 128}}
    build_experiment(data, {"training.sequence_length": 256}, origin="test")
    assert data["training"] == {"sequence_length": 128}


# -- defaults --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({}, (1, 8)),
        ({"nodes": 3}, (3, 8)),
        ({"gpus": 4}, (1, 4)),
        ({"gpus": 24}, (3, 8)),
        ({"gpus": 8, "nodes": 4}, (4, 2)),
    ],
)
def test_nodes_and_gpus_give_each_other(changes: dict[str, Any], shape: tuple[int, int]) -> None:
    resolved = job(**changes)
    assert (resolved.num_nodes, resolved.gpus_per_node) == shape


def test_precision_and_attention_are_the_best_that_the_gpu_has() -> None:
    assert (job().training.precision, job().training.attention) == ("bf16", "flash")
    volta = job(cluster="dgx-2").training
    assert (volta.precision, volta.attention) == ("fp16", "math")


def test_the_sequence_is_the_models_longest_up_to_4096() -> None:
    assert job(model="gpt2").training.sequence_length == 1024
    assert job(model="llama-3-8b").training.sequence_length == 4096


def test_fsdp_gathers_in_the_training_precision_and_reduces_in_fp32() -> None:
    for kind in ("fsdp1", "fsdp2"):
        strategy = job(strategy={"kind": kind}).strategy
        assert isinstance(strategy, Fsdp1Config | Fsdp2Config)
        assert (strategy.param_dtype, strategy.reduce_dtype) == ("bf16", "fp32")
        eight = job(strategy={"kind": kind}, training={"precision": "fp8"}).strategy
        assert isinstance(eight, Fsdp1Config | Fsdp2Config)
        assert eight.param_dtype == "bf16"


def test_hybrid_fsdp1_has_a_replica_per_node() -> None:
    strategy = job(nodes=4, strategy={"kind": "fsdp1", "sharding_strategy": "HYBRID_SHARD"}).strategy
    assert isinstance(strategy, Fsdp1Config)
    assert strategy.replicate == 4


def test_the_first_bucket_of_ddp_is_small_unless_a_cap_is_given() -> None:
    """torch: 1 MiB and then 25 MiB; an explicit `bucket_cap_mb` counts for the first too."""
    plain, explicit = job(strategy={"kind": "ddp"}), job(strategy={"kind": "ddp", "bucket_cap_mb": 10})
    assert isinstance(plain.strategy, DdpConfig)
    assert isinstance(explicit.strategy, DdpConfig)
    assert (plain.strategy.first_bucket_cap_bytes, plain.strategy.bucket_cap_bytes) == (2**20, 25 * 2**20)
    assert explicit.strategy.first_bucket_cap_bytes == explicit.strategy.bucket_cap_bytes == 10 * 2**20


def test_a_sequence_beyond_rotary_positions_is_a_note_not_an_error() -> None:
    resolved = job(training={"sequence_length": 8192})
    assert any("sequence_length 8192 is beyond the 4096 positions" in note for note in resolved.notes)


def test_a_model_config_can_be_given_as_a_table() -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    assert len(job(model=config).model.blocks) == 2
    refused("hidden size 64 is not divisible by 5", model={**config, "num_attention_heads": 5})


def test_hardware_queues_are_cudas() -> None:
    """8 where nothing is said; on a GPU of AMD's the setting is without effect, which a note says."""
    assert job().training.device_max_connections == 8
    assert job(training={"device_max_connections": 1}).training.device_max_connections == 1
    made = job(cluster="mi300x-x8", training={"device_max_connections": 1})
    assert made.training.device_max_connections == 8
    assert any("device_max_connections is CUDA's" in note for note in made.notes)


@pytest.mark.parametrize(
    ("sequences", "length", "nearest"), [(1, 4095, "4,096"), (8, 1001, "1,000"), (1, 3, "16")]
)
def test_fp8_refuses_a_number_of_tokens_that_its_products_cannot_sum_over(
    sequences: int, length: int, nearest: str
) -> None:
    """In 16s: of 8 sequences every even length does."""
    training = {"precision": "fp8", "micro_batch_size": sequences, "sequence_length": length}
    with pytest.raises(InputError, match=rf"that 16 divides.*nearest sequence_length is {nearest}$"):
        job(training=training)
    job(training={**training, "sequence_length": int(nearest.replace(",", ""))})
    job(training={**training, "precision": "bf16"})
