"""The settings of the page: they start as the experiment, and say the experiment when they are turned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.expect import of_kind, there
from zsim.errors import InputError
from zsim.frameworks.ddp.settings import DdpTable
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.fsdp2.settings import Fsdp2Table
from zsim.specs.experiment.load import change_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.experiment.training.table import TrainingTable
from zsim.ui.form import Form, make_form, resolved_values

ZERO3: dict[str, Any] = {
    "model": "gpt2", "cluster": "dgx-h100", "nodes": 2, "training": {"sequence_length": 512},
    "strategy": {"kind": "deepspeed", "stage": 3},
}  # fmt: skip


def made(**changes: Any) -> Experiment:
    return Experiment(**{**ZERO3, **changes})


def turned(form: Form, more: str = "", **changes: Any) -> Experiment:
    """The experiment after fields (dots as two underscores) were turned."""
    return form.experiment({**form.initial, **{k.replace("__", "."): v for k, v in changes.items()}}, more)


STRATEGIES = [
    {"kind": "ddp", "bucket_cap_mb": 50.0},
    {"kind": "deepspeed", "stage": 2},
    {"kind": "fsdp1", "sharding_strategy": "HYBRID_SHARD", "replicate": 2, "wrapping": "size:1000000"},
    {"kind": "fsdp2", "reshard_after_forward": 2, "cpu_offload": True},
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy["kind"])
def test_untouched_fields_say_the_experiment_itself(strategy: dict[str, Any]) -> None:
    experiment = made(strategy=strategy)
    form = make_form(experiment)
    assert form.experiment(form.initial) == experiment
    assert form.initial["strategy.kind"] == {
        "ddp": "DDP", "deepspeed": "DeepSpeed ZeRO", "fsdp1": "FSDP1", "fsdp2": "FSDP2"
    }[strategy["kind"]]  # fmt: skip


def test_values_that_are_no_preset_are_choices_too() -> None:
    form = make_form(made(strategy=STRATEGIES[2]))
    assert form.initial["strategy.wrapping"] == "size:1000000"
    assert make_form(made(strategy=STRATEGIES[3])).initial["strategy.reshard_after_forward"] == "2"


def test_a_model_and_a_cluster_of_the_experiments_own_stand_beside_the_presets() -> None:
    """A changed gpt2 is not the preset of that name, which can still be chosen."""
    experiment = change_experiment(made(), {"model.n_layer": 2, "cluster.nvme.drives": 3})
    form = make_form(experiment)
    assert form.initial["model"] == "gpt2 (the experiment's own)"
    assert form.initial["cluster"] == "dgx-h100, changed (the experiment's own)"
    assert form.experiment(form.initial) == experiment
    assert len(resolve(turned(form, nodes=1)).model.blocks) == 2
    assert len(resolve(turned(form, model="gpt2")).model.blocks) == 12


def test_a_field_turned_is_that_key_alone() -> None:
    form = make_form(made())
    experiment = turned(form, training__micro_batch_size=4)
    assert experiment == made(training={"sequence_length": 512, "micro_batch_size": 4})


def test_an_emptied_field_leaves_the_value_open() -> None:
    """GPT-2's longest is 1024."""
    experiment = turned(make_form(made()), training__sequence_length=None)
    assert experiment.training.sequence_length is None
    assert resolved_values(resolve(experiment))["training.sequence_length"] == "1024"


def test_an_emptied_field_goes_back_to_the_frameworks_default() -> None:
    """torch's DDP has buckets of 25 MiB."""
    form = make_form(made(strategy=STRATEGIES[0]))
    emptied = turned(form, strategy__bucket_cap_mb=None)
    assert of_kind(emptied.strategy, DdpTable).bucket_cap_mb == 25.0


def test_nodes_and_gpus_are_as_the_page_shows_them() -> None:
    """Nodes emptied and 4 GPUs; both, 2 nodes with 4 GPUs each."""
    form = make_form(made())
    assert resolve(turned(form, nodes=None, gpus=4)).world_size == 4
    assert resolve(turned(form, gpus=8)).gpus_per_node == 4


def test_another_framework_starts_with_its_own_defaults() -> None:
    """The stage is DeepSpeed's and is gone; back again it is the page's."""
    form = make_form(made())
    assert turned(form, strategy__kind="FSDP2").strategy == made(strategy={"kind": "fsdp2"}).strategy
    form = make_form(made(strategy={"kind": "fsdp2", "replicate": 2}))
    changed = turned(form, strategy__kind="DeepSpeed ZeRO", strategy__stage="1: optimizer states")
    assert changed.strategy.model_dump(exclude_unset=True) == {"kind": "deepspeed", "stage": 1}


def test_a_value_of_the_experiments_own_is_no_default_of_another_framework() -> None:
    form = make_form(made(strategy={"kind": "fsdp1", "wrapping": "size:1000000"}))
    changed_kind = turned(form, strategy__kind="FSDP2", strategy__wrapping="default")
    assert changed_kind.strategy == made(strategy={"kind": "fsdp2"}).strategy
    kept = turned(form, strategy__kind="FSDP2")
    assert of_kind(kept.strategy, Fsdp2Table).wrapping == "size:1000000"


def test_offloading_is_deepspeeds_own_block() -> None:
    """The largest shard of gpt2 on 16 GPUs, 50,257 x 768 / 16, is smaller than the least buffer, 1e8."""
    job = resolve(turned(make_form(made()), offload_optimizer="host memory", offload_param="NVMe"))
    zero = of_kind(job.strategy, DeepSpeedConfig).zero
    param = there(zero.offload_param)
    assert there(zero.offload_optimizer).device == "cpu"
    assert (param.device, param.buffer_size) == ("nvme", 10**8)
    assert zero.stage == 3


def test_parameters_are_offloaded_at_stage_3_alone() -> None:
    """The field is hidden at stage 2, where DeepSpeed would not do what it says."""
    experiment = turned(make_form(made()), strategy__stage="2: gradients too", offload_param="host memory")
    assert experiment == made(strategy={"kind": "deepspeed", "stage": 2})


@pytest.fixture
def from_json(tmp_path: Path) -> Form:
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1234, "offload_optimizer": {"device": "cpu"}},
    }  # fmt: skip
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    return make_form(made(strategy={"kind": "deepspeed", "config": str(path)}))


def test_a_deepspeed_json_fills_the_fields(from_json: Form) -> None:
    shown = from_json.initial
    assert shown["training.micro_batch_size"] == 2
    assert shown["training.gradient_accumulation_steps"] == 3
    assert shown["strategy.stage"] == "2: gradients too"
    assert shown["offload_optimizer"] == "host memory"


def test_a_deepspeed_json_is_changed_where_a_field_is_and_kept_where_not(from_json: Form) -> None:
    """Batch sizes of the JSON may be turned too, though it gives them explicitly."""
    job = resolve(
        turned(
            from_json,
            training__micro_batch_size=8,
            strategy__stage="3: parameters too",
            offload_optimizer="no",
        )
    )
    assert job.training.micro_batch_size == 8
    assert job.training.gradient_accumulation_steps == 3
    strategy = of_kind(job.strategy, DeepSpeedConfig)
    assert strategy.stage == 3
    assert strategy.zero.reduce_bucket_size == 1234
    assert strategy.zero.offload_optimizer is None


def test_other_settings_are_any_key() -> None:
    more = "\ncluster.nvme.drives = 3\n  strategy.config.zero_optimization.reduce_bucket_size = 1000\n"
    job = resolve(turned(make_form(made()), more))
    assert there(job.cluster.nvme).drives == 3
    assert of_kind(job.strategy, DeepSpeedConfig).zero.reduce_bucket_size == 1000


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("training.sequense_length = 4", "unknown key 'sequense_length'; did you mean 'sequence_length'?"),
        ("training.micro_batch_size = 4", "it has its own field, 'Micro-batch'"),
        (
            "training.expandable_segments = true\ntraining.expandable_segments = false",
            "training.expandable_segments is there twice",
        ),
        ("training.compile = true", "it has its own field, 'Compile'"),
        ("compile", "expected KEY=VALUE"),
    ],
)
def test_other_settings_that_cannot_be_are_refused(more: str, said: str) -> None:
    with pytest.raises(InputError, match=said.replace("?", r"\?")):
        turned(make_form(made()), more)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": 0}, "settings: nodes: found 0, expected greater than 0"),
        (
            {"training__micro_batch_size": 1.5},
            "training.micro_batch_size: found 1.5, expected a valid integer",
        ),
        ({"strategy__kind": "FSDP2", "strategy__replicate": 3}, "strategy.replicate"),
        ({"model": "gpt5"}, "model: unknown .gpt5.; did you mean .gpt2."),
    ],
)
def test_impossible_settings_are_zsims_own_error(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        resolve(turned(make_form(made()), **changes))


def test_degrees_have_their_fields_and_leave_with_a_strategy_that_has_none() -> None:
    experiment = made(
        nodes=1, strategy={"kind": "megatron"}, parallelism={"tensor": 2, "pipeline": 2},
        training={"sequence_length": 512, "gradient_accumulation_steps": 4},
    )  # fmt: skip
    form = make_form(experiment)
    assert (form.initial["parallelism.tensor"], form.initial["parallelism.schedule"]) == (2, "default")
    assert form.experiment(form.initial) == experiment
    job = resolve(turned(form, parallelism__pipeline=4, parallelism__schedule="1f1b"))
    assert (job.parallelism.tensor, job.parallelism.pipeline) == (2, 4)
    assert resolve(turned(form, strategy__kind="DDP")).parallelism.is_trivial
    assert resolved_values(job)["parallelism.virtual_stages"] == "1"


def test_a_field_says_what_its_declaration_says() -> None:
    """A flag, a choice that may be left open and one that has a default; the sentence is the key's own."""
    fields = make_form(made()).fields
    assert fields["training.compile"].choices == {"no": False, "yes": True}
    assert list(fields["training.precision"].choices or ()) == ["default", "bf16", "fp16", "fp32", "fp8"]
    assert next(iter(fields["training.activation_checkpointing"].choices or ())) == "none"
    sentence = TrainingTable.model_fields["cross_entropy"].description
    assert fields["training.cross_entropy"].sentence == sentence


def test_a_rank_asks_for_adapters_and_an_empty_one_leaves_all_of_them_out() -> None:
    """QLoRA of gpt2; its targets of the experiment's own are a choice, which goes when the rank does."""
    form = make_form(made(strategy={"kind": "ddp"}))
    changed: dict[str, Any] = {"training__lora__rank": 16, "training__lora__quantized": "nf4 (QLoRA)"}
    lora = there(turned(form, **changed).training.lora)
    assert (lora.rank, lora.quantized) == (16, "nf4")
    assert turned(form, training__lora__quantized="nf4 (QLoRA)").training.lora is None
    given = make_form(
        made(training={"sequence_length": 512, "lora": {"rank": 4, "targets": ["c_attn", "c_proj"]}})
    )
    assert given.initial["training.lora.targets"] == "c_attn, c_proj"
    assert there(turned(given, training__lora__rank=8).training.lora).targets == ("c_attn", "c_proj")
    assert turned(given, training__lora__rank=None).training.lora is None


def test_what_a_fields_list_does_not_have_is_an_other_setting() -> None:
    form = make_form(made())
    experiment = turned(form, 'training.lora.targets = ["c_attn"]', training__lora__rank=4)
    assert there(experiment.training.lora).targets == ("c_attn",)


def test_a_name_that_a_list_does_not_have_is_met_with_the_nearest() -> None:
    """No list of all presets: of a name that is near none, a few of them."""
    field = make_form(made()).fields["model"]
    with pytest.raises(InputError, match=r"^model: unknown 'llama-3-8bb'; did you mean 'llama-3-8b'\?$"):
        field.read("llama-3-8bb")
    with pytest.raises(InputError, match=r"^model: unknown ''; expected one of \d+, such as") as caught:
        field.read(None)
    assert len(str(caught.value)) < 300


def test_typing_a_hub_id_finds_its_preset() -> None:
    """The list holds presets, and is searched by the Hub ids of each too."""
    options = {option["value"]: option for option in make_form(made()).fields["model"].options()}
    assert "meta-llama/Llama-3.1-8B" in options["llama-3.1-8b"]["search"]
    assert options["llama-3.1-8b"]["label"] == "llama-3.1-8b"
