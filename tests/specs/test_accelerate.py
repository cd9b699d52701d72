"""Accelerate's YAML as experiments, as `accelerate launch` 1.15.0 hands it on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.expect import of_kind, there
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.settings.table import DeepSpeedTable
from zsim.frameworks.fsdp1.settings import Fsdp1Table
from zsim.frameworks.fsdp2.settings import Fsdp2Table
from zsim.programs.accelerate.read import read_accelerate
from zsim.specs.experiment.load import build_experiment, load_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment

FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_version: {version}
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: SHARDED_STATE_DICT
{more}
machine_rank: 0
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""
DEEPSPEED = """
distributed_type: DEEPSPEED
deepspeed_config:
{more}
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""


def imported(folder: Path, text: str) -> Experiment:
    path = folder / "accelerate.yaml"
    path.write_text(text)
    data = {"model": "llama-3-8b", "cluster": "dgx-h100"}
    return build_experiment(data, {"strategy.config": str(path)}, origin="test")


def fsdp(folder: Path, version: int, *lines: str) -> Experiment:
    return imported(folder, FSDP.format(version=version, more="\n".join(f"  {line}" for line in lines)))


def deepspeed(folder: Path, *lines: str) -> Experiment:
    return imported(folder, DEEPSPEED.format(more="\n".join(f"  {line}" for line in lines)))


def test_fsdp2_gathers_and_reduces_in_mixed_precision(tmp_path: Path) -> None:
    """`set_mixed_precision` uses one type for both; the units are those of Accelerate 1.15."""
    experiment = fsdp(tmp_path, 2, "fsdp_reshard_after_forward: false", "fsdp_activation_checkpointing: true")
    strategy = of_kind(experiment.strategy, Fsdp2Table)
    assert (experiment.nodes, experiment.gpus) == (2, 16)
    assert (strategy.kind, strategy.param_dtype, strategy.reduce_dtype) == ("fsdp2", "bf16", "bf16")
    assert (strategy.reshard_after_forward, strategy.wrapping) == (False, "torchtitan")
    assert strategy.no_sync
    assert experiment.training.activation_checkpointing == "full"
    assert any("no effect on a step: fsdp_state_dict_type" in note for note in experiment.notes)


def test_parallelism_config_makes_replicas(tmp_path: Path) -> None:
    text = FSDP.format(version=2, more="")
    prefix = "parallelism_config"
    sizes = f"{prefix}:\n  {prefix}_dp_replicate_size: 2\n  {prefix}_dp_shard_size: 8\n"
    assert of_kind(imported(tmp_path, text + sizes).strategy, Fsdp2Table).replicate == 2
    with pytest.raises(InputError, match="tp_size: found 2, which leaves FSDP no ranks to shard over"):
        imported(tmp_path, text + "parallelism_config:\n  parallelism_config_tp_size: 2\n")
    with pytest.raises(InputError, match="2 replicas of 4 shards are 8 GPUs, but the experiment has 16"):
        imported(tmp_path, text + sizes.replace("shard_size: 8", "shard_size: 4"))
    with pytest.raises(InputError, match="dp_shard_size: found 1 with 2 replicas, which Accelerate refuses"):
        imported(tmp_path, text + sizes.replace("shard_size: 8", "shard_size: 1"))


def test_fsdp1_has_no_backward_prefetch_unless_asked(tmp_path: Path) -> None:
    strategy = of_kind(fsdp(tmp_path, 1, "fsdp_sharding_strategy: SHARD_GRAD_OP").strategy, Fsdp1Table)
    assert (strategy.kind, strategy.sharding_strategy) == ("fsdp1", "SHARD_GRAD_OP")
    assert (strategy.backward_prefetch, strategy.wrapping) == ("none", None)
    asked = fsdp(tmp_path, 1, "fsdp_backward_prefetch: BACKWARD_PRE")
    assert of_kind(asked.strategy, Fsdp1Table).backward_prefetch == "BACKWARD_PRE"


def test_reshard_after_forward_alone_leaves_fsdp1_fully_sharded(tmp_path: Path) -> None:
    """The launcher also passes fsdp_sharding_strategy, FULL_SHARD by default, and the plugin prefers it
    (tried with accelerate 1.15.0: FSDP_RESHARD_AFTER_FORWARD=shard_grad_op gives FULL_SHARD)."""
    experiment = fsdp(tmp_path, 1, "fsdp_reshard_after_forward: SHARD_GRAD_OP")
    assert of_kind(experiment.strategy, Fsdp1Table).sharding_strategy == "FULL_SHARD"
    assert any("SHARD_GRAD_OP: no effect" in note for note in experiment.notes)


def test_sizes_and_no_wrapping_of_fsdp1(tmp_path: Path) -> None:
    def wrapping(*lines: str) -> str | None:
        text = FSDP.format(version=1, more="\n".join(f"  {line}" for line in lines))
        text = text.replace("  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n", "")
        return of_kind(imported(tmp_path, text).strategy, Fsdp1Table).wrapping

    assert wrapping() == "none"
    assert (
        wrapping("fsdp_auto_wrap_policy: SIZE_BASED_WRAP", "fsdp_min_num_params: 20000000") == "size:20000000"
    )


def test_keys_that_the_launcher_reads_past_are_said(tmp_path: Path) -> None:
    notes = fsdp(tmp_path, 1, "fsdp_backward_prefetching: BACKWARD_PRE").notes
    assert any("Accelerate knows no 'fsdp_backward_prefetching'" in note for note in notes)
    older = fsdp(tmp_path, 1, "fsdp_backward_prefetch_policy: BACKWARD_POST")
    assert of_kind(older.strategy, Fsdp1Table).backward_prefetch == "BACKWARD_POST"
    assert any("fsdp_backward_prefetch_policy: read as" in note for note in older.notes)
    notes = fsdp(tmp_path, 2, "fsdp_backward_prefetch: BACKWARD_PRE").notes
    assert any("no effect with fsdp_version 2: fsdp_backward_prefetch" in note for note in notes)


def test_deepspeed_keys_become_the_json_that_the_plugin_writes(tmp_path: Path) -> None:
    experiment = deepspeed(
        tmp_path, "zero_stage: 3", "offload_optimizer_device: cpu", "gradient_accumulation_steps: 4"
    )
    job = resolve(experiment)
    strategy = of_kind(job.strategy, DeepSpeedConfig)
    assert (strategy.stage, there(strategy.zero.offload_optimizer).device) == (3, "cpu")
    assert job.training.gradient_accumulation_steps == 4
    assert (job.training.precision, strategy.gradient_clipping) == ("bf16", 1.0)


def test_a_named_deepspeed_json_is_read_beside_the_yaml(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 2}'
    )
    job = resolve(deepspeed(tmp_path, "deepspeed_config_file: ds.json"))
    assert of_kind(job.strategy, DeepSpeedConfig).stage == 1
    assert (job.training.micro_batch_size, job.training.precision) == (2, "bf16")
    with pytest.raises(InputError, match="zero_stage: Accelerate refuses them together with deepspeed_"):
        deepspeed(tmp_path, "deepspeed_config_file: ds.json", "zero_stage: 3")


def test_its_classes_of_experts_are_leaf_modules(tmp_path: Path) -> None:
    """`deepspeed_moe_layer_cls_names`, beside the JSON too."""
    named = "deepspeed_config_file: ds.json"
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    found = deepspeed(tmp_path, named, "deepspeed_moe_layer_cls_names: MixtralSparseMoeBlock, Qwen3MoeBlock")
    assert of_kind(found.strategy, DeepSpeedTable).leaf_modules == ("MixtralSparseMoeBlock", "Qwen3MoeBlock")


def test_plain_multi_gpu_is_ddp_and_inductor_compiles(tmp_path: Path) -> None:
    experiment = imported(
        tmp_path,
        "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 8\n"
        "dynamo_config:\n  dynamo_backend: INDUCTOR\n",
    )
    assert (experiment.strategy.kind, experiment.gpus, experiment.training.compile) == ("ddp", 8, True)


def test_the_experiments_gpus_win_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(FSDP.format(version=2, more=""))
    data = {"model": "llama-3-8b", "cluster": "dgx-h100", "nodes": 4}
    experiment = build_experiment(data, {"strategy.config": str(path)}, origin="test")
    assert experiment.nodes == 4
    assert f"{path}: written for 16 GPUs; the experiment's 32 are simulated" in experiment.notes


def test_an_experiment_file_may_name_the_yaml(tmp_path: Path) -> None:
    (tmp_path / "accelerate.yaml").write_text(FSDP.format(version=2, more=""))
    toml = tmp_path / "experiment.toml"
    toml.write_text(
        'model = "llama-3-8b"\ncluster = "dgx-h100"\n'
        '[strategy]\nconfig = "accelerate.yaml"\nno_sync = false\n'
    )
    strategy = of_kind(load_experiment(toml).strategy, Fsdp2Table)
    assert (strategy.kind, strategy.no_sync) == ("fsdp2", False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mixed_precision: bf16\n", "distributed_type: missing"),
        ("distributed_type: FSDP\nmixd_precision: bf16\n", "did you mean 'mixed_precision'"),
        ("distributed_type: FSDP\nmixed_precision: bf17\n", "expected no, fp16, bf16 or fp8"),
        ("- a\n- b\n", "holds a list; expected keys and values"),
        (FSDP.format(version=3, more=""), "fsdp_version: found 3, expected 1 or 2"),
        (FSDP.format(version=2, more="  fsdp_forward_prefetch: true"), "refuses it with fsdp_version 2"),
        (FSDP.format(version=1, more="  fsdp_sharding_strategy: FULL"), "expected one of FULL_SHARD"),
    ],
)
def test_mistakes_name_what_was_expected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        imported(tmp_path, text)


@pytest.mark.parametrize("kind", ["XLA", "MULTI_CPU"])
def test_other_kinds_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    with pytest.raises(NotSimulatedError, match=kind):
        imported(tmp_path, f"distributed_type: {kind}\n")


def test_a_model_and_a_cluster_must_be_named(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(FSDP.format(version=2, more=""))
    with pytest.raises(InputError, match="names no model: give it"):
        build_experiment({}, {"strategy.config": str(path)}, origin="test")


@pytest.mark.parametrize("found", ["full_shard", "[1]", "5"])
@pytest.mark.parametrize(
    ("kind", "section"),
    [
        ("FSDP", "fsdp_config"),
        ("FSDP", "parallelism_config"),
        ("FSDP", "dynamo_config"),
        ("DEEPSPEED", "deepspeed_config"),
        ("DEEPSPEED", "dynamo_config"),
    ],
)
def test_a_section_that_has_no_keys_is_refused(tmp_path: Path, kind: str, section: str, found: str) -> None:
    words = rf"accelerate\.yaml: {section}: found .*, expected keys and values below it"
    with pytest.raises(InputError, match=words):
        imported(tmp_path, f"distributed_type: {kind}\n{section}: {found}\n")


def test_a_size_of_a_mesh_that_is_no_number_is_refused(tmp_path: Path) -> None:
    text = FSDP.format(version=2, more="parallelism_config:\n  parallelism_config_tp_size: two")
    with pytest.raises(InputError, match=r"parallelism_config_tp_size: found 'two', expected a whole number"):
        imported(tmp_path, text)


def test_a_yaml_of_nobody_is_said_to_be_nobodys(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("checkpoints: {}\nanything: 1\n")
    with pytest.raises(
        InputError, match=r"is no file of a program that zsim reads \(it has checkpoints, anything\)"
    ):
        read_accelerate(str(path))


@pytest.mark.parametrize(
    ("version", "config", "recipe", "gathered"),
    [
        (2, "{backend: AO}", "torchao-tensorwise", "fp8"),
        (2, "{fp8_backend: AO, fp8_enable_fsdp_float8_all_gather: false}", "torchao-tensorwise", "bf16"),
        (1, "{backend: AO, enable_fsdp_float8_all_gather: true}", "torchao-tensorwise", "bf16"),
        (2, "{backend: TE, fp8_format: HYBRID, amax_history_len: 1024}", "delayed", "bf16"),
    ],
)
def test_the_library_of_fp8_says_its_recipe(
    tmp_path: Path, version: int, config: str, recipe: str, gathered: str
) -> None:
    """torchao scales by tensor and gathers in fp8 under FSDP2. Transformer Engine's scales are delayed."""
    text = FSDP.format(version=version, more="").replace("mixed_precision: bf16", "mixed_precision: fp8")
    found = imported(tmp_path, f"{text}fp8_config: {config}\n")
    assert (found.training.precision, found.training.fp8_recipe) == ("fp8", recipe)
    assert found.strategy.model_dump()["param_dtype"] == gathered
    noted = any("all_gather: no effect without FSDP2" in note for note in found.notes)
    assert noted is (version == 1)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ("{backend: MSAMP}", NotSimulatedError, "does not simulate MS-AMP"),
        ("{backend: XX}", InputError, "found 'XX', expected AO, TE or MSAMP"),
        ("{backend: TE, override_linear_precision: [false, false, true]}", NotSimulatedError, "in bf16"),
    ],
)
def test_other_libraries_of_fp8_are_refused(
    tmp_path: Path, config: str, error: type[Exception], message: str
) -> None:
    text = FSDP.format(version=2, more="").replace("mixed_precision: bf16", "mixed_precision: fp8")
    with pytest.raises(error, match=message):
        imported(tmp_path, f"{text}fp8_config: {config}\n")


def test_training_on_cpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotSimulatedError, match="use_cpu: zsim does not simulate training on CPUs"):
        imported(tmp_path, FSDP.format(version=1, more="") + "use_cpu: true\n")
    assert imported(tmp_path, FSDP.format(version=1, more="") + "use_cpu: false\n").gpus == 16


@pytest.mark.parametrize("line", ["", "num_processes: -1\n"])
def test_machines_without_processes_use_all_their_gpus(tmp_path: Path, line: str) -> None:
    text = FSDP.format(version=2, more="").replace("num_processes: 16\n", line)
    job = resolve(imported(tmp_path, text))
    assert (job.num_nodes, job.world_size) == (2, 16)


@pytest.mark.parametrize(("key", "value"), [("num_processes", 0), ("num_processes", -2), ("num_machines", 0)])
def test_impossible_numbers_of_processes_are_refused(tmp_path: Path, key: str, value: int) -> None:
    text = FSDP.format(version=2, more="").replace("num_processes: 16", f"num_processes: 16\n{key}: {value}")
    with pytest.raises(InputError, match=rf"{key}: found {value}, expected"):
        imported(tmp_path, text)
