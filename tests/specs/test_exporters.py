"""Files that other programs take: importing what was exported gives the same plan."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

import zsim
from zsim.cost.inference.layers import EngineLayout, served_model
from zsim.errors import NotSimulatedError
from zsim.programs.megatron_lm.network_flags import why_not_network
from zsim.specs.experiment.load import load_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.formats.export import ExportedFiles, export_files
from zsim.specs.formats.toml import toml_text

NVME = {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 12, "pipeline_read": True}
# Strategy, training: every file that can say a case must give its plan back.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a stage": ({"stage": 3}, {}),
    "stage 1 accumulating": ({"stage": 1}, {"micro_batch_size": 2, "gradient_accumulation_steps": 4}),
    "old defaults": ({"stage": 2, "version": "0.14.5"}, {}),
    "own buckets": (
        {
            "config": {
                "bf16": {"enabled": True},
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {
                    "stage": 3,
                    "reduce_bucket_size": 1e8,
                    "stage3_prefetch_bucket_size": "auto",
                    "overlap_comm": False,
                    "param_persistence_threshold": 0,
                },
            }
        },
        {"activation_checkpointing": "full"},
    ),
    "offloaded": (
        {
            "config": {
                "fp16": {"enabled": True, "initial_scale_power": 12},
                "train_batch_size": 32,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
                "zero_optimization": {
                    "stage": 3,
                    "sub_group_size": 1e8,
                    "offload_param": {"device": "cpu"},
                    "offload_optimizer": NVME,
                },
            }
        },
        {},
    ),
    "fsdp2": ({"kind": "fsdp2"}, {"gradient_clipping": 1.0}),
    "hsdp": (
        {"kind": "fsdp2", "replicate": 2, "reshard_after_forward": False},
        {
            "gradient_clipping": 1.0,
            "activation_checkpointing": "selective-op",
            "gradient_accumulation_steps": 2,
        },
    ),
    "replicas that shard nothing": (
        {"kind": "fsdp2", "replicate": 16, "cpu_offload": True},
        {"gradient_clipping": 1.0},
    ),
    "every second block": (
        {"kind": "fsdp2"},
        {
            "gradient_clipping": 0.5,
            "activation_checkpointing": "full",
            "checkpoint_every": 2,
            "compile": True,
        },
    ),
    "the loss alone compiled": (
        {"kind": "fsdp2"},
        {"gradient_clipping": 1.0, "cross_entropy": "fused", "activation_checkpointing": "full"},
    ),
    "the model alone compiled": (
        {"kind": "fsdp2"},
        {"gradient_clipping": 1.0, "cross_entropy": "eager", "compile": True},
    ),
    "reduced in bf16": (
        {"kind": "fsdp2", "reduce_dtype": "bf16", "replicate": 2, "no_sync": True},
        {"activation_checkpointing": "full", "gradient_accumulation_steps": 2},
    ),
    "fsdp1": (
        {
            "kind": "fsdp1",
            "sharding_strategy": "SHARD_GRAD_OP",
            "reduce_dtype": "bf16",
            "no_sync": True,
            "backward_prefetch": "BACKWARD_POST",
            "wrapping": "size:100000000",
        },
        {"gradient_accumulation_steps": 2},
    ),
    "hybrid fsdp1": (
        {"kind": "fsdp1", "sharding_strategy": "_HYBRID_SHARD_ZERO2", "reduce_dtype": "bf16"},
        {"micro_batch_size": 2},
    ),
    "offloaded fsdp1": (
        {"kind": "fsdp1", "reduce_dtype": "bf16", "no_sync": True, "cpu_offload": True},
        {"micro_batch_size": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0},
    ),
    "ddp": ({"kind": "ddp"}, {"micro_batch_size": 2}),
    "own ddp": (
        {"kind": "ddp", "bucket_cap_mb": 50.0, "gradient_as_bucket_view": True},
        {
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 0.5,
            "activation_checkpointing": "full",
        },
    ),
    "ddp that reduces every micro-batch": (
        {"kind": "ddp", "no_sync": False},
        {"gradient_accumulation_steps": 4},
    ),
}
DDP_OPTIONS = ("bucket_cap_mb", "gradient_as_bucket_view")  # the script's, under Accelerate
READABLE = ("accelerate.yaml", "torchtitan.toml", "experiment.toml")


def experiment_of(name: str) -> Experiment:
    strategy, training = CASES[name]
    return zsim.Experiment(
        model="llama-3-8b", cluster="dgx-h100", nodes=2, training={"sequence_length": 2048, **training},
        strategy=strategy,
    )  # fmt: skip


def exported(name: str, folder: Path) -> ExportedFiles:
    """The files of a case, written."""
    found = export_files(resolve(experiment_of(name)))
    for file, text in found.files.items():
        (folder / file).write_text(text)
    return found


def read_back(name: str, file: Path) -> Experiment:
    """What is not in the file is said beside it."""
    if file.name == "experiment.toml":
        return load_experiment(file)
    strategy, training = CASES[name]
    said = {"sequence_length": 2048}
    if file.name == "accelerate.yaml":
        keys: tuple[str, ...] = ("micro_batch_size", "gradient_accumulation_steps", "gradient_clipping")
        if strategy.get("kind") == "ddp":
            keys += ("activation_checkpointing",)
        said |= {key: training[key] for key in keys if key in training}
    if "ds_config.json" in file.read_text():
        said = {
            key: value
            for key, value in {**said, **training}.items()
            if key in ("sequence_length", "activation_checkpointing")
        }
    data: dict[str, Any] = {"model": "llama-3-8b", "cluster": "dgx-h100", "nodes": 2, "training": said}
    beside = {key: strategy[key] for key in ("version", *DDP_OPTIONS) if key in strategy}
    from zsim.specs.experiment.load import build_experiment

    return build_experiment({**data, "strategy": {"config": str(file), **beside}}, {}, origin="test")


@pytest.mark.parametrize("name", CASES)
def test_importing_what_was_exported_gives_the_same_plan(name: str, tmp_path: Path) -> None:
    plan = zsim.make_plan(experiment_of(name))
    found = exported(name, tmp_path)
    readable = [file for file in READABLE if file in found.files]
    assert "experiment.toml" in readable
    for file in readable:
        again = zsim.make_plan(read_back(name, tmp_path / file))
        assert again.ops == plan.ops, file
        assert again.memory == plan.memory, file
        assert (again.resident, again.groups) == (plan.resident, plan.groups), file


def test_every_file_is_tried_by_some_case() -> None:
    names = {file for name in CASES for file in export_files(resolve(experiment_of(name))).files}
    assert names == {*READABLE, "ds_config.json", "fsdp2.py", "fsdp1.py", "ddp.py"}


@pytest.mark.parametrize(
    "name", ["a stage", "stage 1 accumulating", "old defaults", "own buckets", "offloaded"]
)
def test_the_deepspeed_json_gives_the_same_plan_whatever_the_release_would_default_to(
    name: str, tmp_path: Path
) -> None:
    """Gradient clipping, pinned memory and `use_multi_rank_bucket_allreduce` changed from release to
    release; they are written out."""
    exported(name, tmp_path)
    data: dict[str, Any] = {"model": "llama-3-8b", "cluster": "dgx-h100", "nodes": 2}
    said = {key: CASES[name][1][key] for key in ("activation_checkpointing",) if key in CASES[name][1]}
    training = {"sequence_length": 2048, **said}
    strategy = {
        "config": str(tmp_path / "ds_config.json"),
        "version": CASES[name][0].get("version", "0.19.8"),
    }
    again = zsim.make_plan(zsim.Experiment(**data, training=training, strategy=strategy))
    assert again.ops == zsim.make_plan(experiment_of(name)).ops


def test_the_users_other_keys_stay_in_the_json() -> None:
    made = json.loads(export_files(resolve(experiment_of("offloaded"))).files["ds_config.json"])
    assert made["optimizer"] == {"type": "AdamW", "params": {"lr": 1e-4}}
    assert made["fp16"] == {"enabled": True, "initial_scale_power": 12}
    assert made["train_batch_size"] == 32
    assert made["zero_optimization"]["offload_optimizer"]["nvme_path"] == "/nvme"


def test_what_a_file_cannot_say_is_said() -> None:
    missing = export_files(resolve(experiment_of("fsdp2"))).missing
    assert "reduces in fp32" in missing["accelerate.yaml"]
    missing = export_files(resolve(experiment_of("reduced in bf16"))).missing
    assert "reduces in fp32, not in bf16" in missing["torchtitan.toml"]
    missing = export_files(resolve(experiment_of("replicas that shard nothing"))).missing
    assert missing["torchtitan.toml"] == "it takes shards of 1 and 16 replicas for DDP"
    assert "full" in export_files(resolve(experiment_of("own buckets"))).notes[0]


def test_what_accelerate_takes_from_the_script_is_said() -> None:
    def note(name: str) -> str:
        notes = export_files(resolve(experiment_of(name))).notes
        return next(note for note in notes if note.startswith("accelerate.yaml"))

    assert note("ddp") == "accelerate.yaml: the script's: DataLoader(batch_size=2)"
    assert note("own ddp") == (
        "accelerate.yaml: the script's: DataLoader(batch_size=2), "
        "Accelerator(gradient_accumulation_steps=4), accelerator.clip_grad_norm_(model.parameters(), 0.5), "
        "kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=50, gradient_as_bucket_view=True)], "
        "model.gradient_checkpointing_enable()"
    )
    assert note("offloaded fsdp1") == (
        "accelerate.yaml: the script's: DataLoader(batch_size=2), "
        "Accelerator(gradient_accumulation_steps=4), accelerator.clip_grad_norm_(model.parameters(), 1)"
    )


def test_accelerate_does_not_reduce_every_micro_batch() -> None:
    missing = export_files(resolve(experiment_of("ddp that reduces every micro-batch"))).missing
    assert missing["accelerate.yaml"] == "it reduces gradients after the last micro-batch only (no_sync)"


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ({"kind": "fsdp2", "replicate": 16}, "its FSDP2 refuses shards of 1, here with 16 replicas"),
        (
            {"kind": "fsdp1", "limit_all_gathers": False},
            "it limits FSDP1's all-gathers whatever its file says (limit_all_gathers)",
        ),
    ],
)
def test_accelerate_refuses_or_reads_past(strategy: dict[str, Any], reason: str) -> None:
    """Accelerate 1.15.0: `_validate_accelerator` refuses `dp_shard_size` 1 with fsdp_version 2; nothing reads
    `fsdp_limit_all_gathers`, the plugin's own is true."""
    data: dict[str, Any] = {"model": "llama-3-8b", "cluster": "dgx-h100", "nodes": 2}
    files = export_files(resolve(zsim.Experiment(**data, strategy={**strategy, "reduce_dtype": "bf16"})))
    assert files.missing["accelerate.yaml"] == reason


def test_every_python_offloads_what_its_job_does() -> None:
    assert (
        "CPUOffload(offload_params=True)"
        in export_files(resolve(experiment_of("offloaded fsdp1"))).files["fsdp1.py"]
    )


@pytest.mark.parametrize(
    ("precision", "said"),
    [
        ("bf16", '; run it under torch.autocast("cuda", torch.bfloat16)."""'),
        ("fp16", '; run it under torch.autocast("cuda", torch.float16)."""'),
        ("fp32", 'before its optimizer is made."""'),
    ],
)
def test_ddps_python_names_autocasts_type_where_there_is_one(precision: str, said: str) -> None:
    strategy = {"kind": "ddp"}
    training = {"precision": precision}
    job = resolve(
        zsim.Experiment(model="llama-3-8b", cluster="dgx-h100", strategy=strategy, training=training)
    )
    text = export_files(job).files["ddp.py"]
    assert said in text
    assert ("autocast" in text) == (precision != "fp32")


@pytest.mark.parametrize(
    ("key", "value", "variable"),
    [
        ("expandable_segments", True, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ("max_split_size_mb", 128, "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128"),
        ("roundup_power2_divisions", 8, "PYTORCH_CUDA_ALLOC_CONF=roundup_power2_divisions:8"),
        ("device_max_connections", 1, "CUDA_DEVICE_MAX_CONNECTIONS=1"),
    ],
)
def test_what_the_environment_sets_is_said(key: str, value: object, variable: str) -> None:
    experiment = experiment_of("own buckets")
    training = experiment.training.model_copy(update={key: value})
    notes = export_files(resolve(experiment.model_copy(update={"training": training}))).notes
    assert f"in the run's environment: {variable}" in notes
    assert not any(variable in note for note in export_files(resolve(experiment)).notes)


@pytest.mark.parametrize("name", [name for name, (strategy, _) in CASES.items() if strategy.get("kind")])
def test_the_python_compiles(name: str) -> None:
    files = export_files(resolve(experiment_of(name))).files
    for file, text in files.items():
        if file.endswith(".py"):
            compile(text, file, "exec")
            assert max(len(line) for line in text.splitlines()) < 120


def test_tables_by_number_are_written_by_their_digits() -> None:
    """A GPU's kernels for narrow heads, `attention.by_head_dim`."""
    text = toml_text({"by_head_dim": {64: {"forward_ratio": 1.5}}})
    assert tomllib.loads(text) == {"by_head_dim": {"64": {"forward_ratio": 1.5}}}


def test_whatever_is_written_as_toml_reads_as_it_was() -> None:
    """Quotes, backslashes, keys that are no words, what a terminal acts on, tables in lists of tables."""
    data = {
        "schema": 1, "is_on": True, "share": 1e-9, "many": 1e22, "empty": [], "ratios": [[1, 2.5], []],
        "text": 'a "b" \\ c\n\t\x1b[31m \u202e \x7f ü 中', "a key": 1, "": 2, "dotted.key": {"ü": {"x": 1}},
        "network": {"kind": "links", "link": [{"from": "n0", "rate": {"value": 2}}, {"from": "n1"}]},
        "gpu": {"gemm": {"range": {"m": [1, 2]}}, "nothing": {}},
        "mixed": [{"a": 1}, 2],
    }  # fmt: skip
    text = toml_text(data, "two\nlines")
    assert tomllib.loads(text) == data
    assert text.startswith("# two\n# lines\nschema = 1\n")
    assert all(character.isprintable() or character == "\n" for character in text)
    assert "[[network.link]]" in text
    assert "[gpu]" not in text
    assert tomllib.loads(toml_text({"a": None, "b": [{"c": None}]})) == {"b": [{}]}


def test_an_encoder_with_a_decoder_is_written_as_what_can_say_it() -> None:
    """Accelerate wraps blocks by class; our programs, and torchtitan's trainer, have one list of them."""
    job = resolve(
        Experiment(model="t5-large", cluster="dgx-h100", training={"sequence_length": 512},
                   strategy={"kind": "fsdp2", "reduce_dtype": "bf16"})
    )  # fmt: skip
    exported = export_files(job)
    assert {"experiment.toml", "accelerate.yaml"} == set(exported.files)
    assert "an encoder with a decoder" in exported.missing["fsdp2.py"]
    assert exported.missing["torchtitan.toml"] == "its trainer has decoders alone"


def test_a_tower_of_sounds_is_not_said_to_be_one_of_images() -> None:
    audio = {
        "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
    }  # fmt: skip
    text = {
        "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100,
    }  # fmt: skip
    model = {"model_type": "qwen2_audio", "text_config": text, "audio_config": audio}
    job = resolve(Experiment(model=model, cluster="dgx-h100", strategy={"kind": "fsdp2"}))
    missing = export_files(job).missing
    assert "has towers" in missing["fsdp2.py"]
    assert missing["torchtitan.toml"].endswith("no flavor with towers")
    assert why_not_network(job.model) == "it has no towers"
    with pytest.raises(NotSimulatedError, match="leaves its towers out"):
        served_model(job.model, EngineLayout())
