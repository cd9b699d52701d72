"""`training.software`: releases and years as defaults of other keys."""

import json
from pathlib import Path
from typing import Any

import pytest

import zsim
from zsim.errors import InputError
from zsim.files import preset_table
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.deepspeed.settings.release import OLDEST
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import load_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.formats.toml import experiment_toml
from zsim.specs.key_index import first_unknown_segment
from zsim.specs.model.families import decoders
from zsim.specs.model.huggingface import FAMILIES
from zsim.specs.model.spec import Attention
from zsim.specs.strategy.registry import STRATEGIES

CASE = """
model = "{model}"
cluster = "dgx-{gpu}"
gpus = 8
[training]
sequence_length = 512
{training}
[strategy]
kind = "{kind}"
{strategy}
"""


def job_of(
    tmp_path: Path,
    software: str,
    *,
    kind: str = "fsdp2",
    training: str = "",
    strategy: str = "",
    model: str = "llama-3-8b",
    gpu: str = "a100-80gb",
) -> Job:
    path = tmp_path / "job.toml"
    text = f'software = "{software}"\n{training}' if software else training
    path.write_text(CASE.format(model=model, gpu=gpu, training=text, kind=kind, strategy=strategy))
    return resolve(load_experiment(path))


def setting(job: Job, key: str) -> object:
    return getattr(job.experiment.strategy, key)


def software_note(job: Job) -> str:
    (note,) = [note for note in job.notes if note.startswith("training.software")]
    return note


def test_transformers_4_44_checkpoints_with_two_outputs_and_updates_by_foreach(tmp_path: Path) -> None:
    training = job_of(tmp_path, "transformers 4.44").training
    assert (training.checkpoint_is_reentrant, training.optimizer_implementation) == (True, "foreach")
    assert (training.cross_entropy, training.attention) == ("eager", "flash")


def test_transformers_5_shifts_labels_and_copies_no_fp32_logits(tmp_path: Path) -> None:
    """Of 512 tokens of 128,256 logits: the fp32 copy is gone, the model's bf16 output is held meanwhile."""
    from zsim.cost.kernels.losses import LOSSES

    training = job_of(tmp_path, "transformers 5.0").training
    assert (training.cross_entropy, training.checkpoint_is_reentrant) == ("eager-shifted-labels", False)
    logits = 512 * 128256
    old, new = (
        LOSSES[name].temporary_sizes(logits, 2, is_backward=False)
        for name in ("eager", "eager-shifted-labels")
    )
    assert sum(old) - sum(new) == logits * (4 - 2)


@pytest.mark.parametrize(
    ("software", "attention"),
    [
        ("transformers 4.35", "math"),
        ("transformers 4.36", "flash"),
        ("torch 1.13", "math"),
        ("torch 2.1", "flash"),
    ],
)
def test_the_release_chooses_attention(tmp_path: Path, software: str, attention: str) -> None:
    assert job_of(tmp_path, software).training.attention == attention


def test_torch_2_1_has_the_first_flash_attention_where_the_gpu_file_knows_it(tmp_path: Path) -> None:
    """A100-80GB's file has a curve of it, H100's has none of its CUDA kernel."""
    on_a100, on_h100 = (job_of(tmp_path, "torch 2.1", gpu=gpu) for gpu in ("a100-80gb", "h100"))
    assert 'training.attention = "flash1"' in software_note(on_a100)
    assert 'training.attention = "flash"' in software_note(on_h100)


def test_what_the_user_writes_wins(tmp_path: Path) -> None:
    training = job_of(
        tmp_path,
        "transformers 4.35",
        training='attention = "flash"\ncheckpoint_is_reentrant = false\ncross_entropy = "fused"',
    ).training
    assert (training.attention, training.checkpoint_is_reentrant) == ("flash", False)
    assert training.cross_entropy == "fused"


def test_a_year_is_the_last_release_of_what_the_job_runs(tmp_path: Path) -> None:
    megatron = job_of(tmp_path, "2021", kind="megatron")
    assert 'strategy.version = "2.6"' in software_note(megatron)
    assert megatron.training.layer_kernels == "megatron-2"
    deepspeed = job_of(tmp_path, "2023", kind="deepspeed", strategy="stage = 3")
    assert setting(deepspeed, "version") == "0.12.6"
    assert "transformers 4.36" in software_note(deepspeed)
    torchtitan = job_of(tmp_path, "2024")
    assert "torchtitan 0.0.2" in software_note(torchtitan)
    assert "transformers" not in software_note(torchtitan)


def test_automodel_patches_models_with_liger_and_brings_tokens_by_deepep(tmp_path: Path) -> None:
    """Its loss is of logits in fp32, which Liger's is not. DeepEP is the default from 0.2 on. Its mixtures
    have units of their own."""
    dense = job_of(tmp_path, "NeMo AutoModel 0.2").training
    assert (dense.liger, dense.cross_entropy, dense.stored_dtype) == (True, "eager-shifted-labels", "bf16")
    split = "[parallelism]\nexpert = 8"
    releases = [job_of(tmp_path, f"automodel {number}", model="qwen3-30b-a3b", strategy=split)
                for number in ("0.1", "0.2")]  # fmt: skip
    assert [job.experiment.parallelism.dispatcher for job in releases] == [None, "deepep"]
    assert {setting(job, "wrapping") for job in releases} == {"automodel"}


@pytest.mark.parametrize(
    ("release", "loss", "compiled_loss"),
    [
        ("0.0.2", "eager", "eager"),
        ("0.2.2", "eager", "fused"),
        ("0.3.0", "torchtitan-chunked", "torchtitan-chunked-fused"),
    ],
)
def test_torchtitans_loss_is_compiled_from_0_1_on_and_in_chunks_from_0_3_on(
    tmp_path: Path, release: str, loss: str, compiled_loss: str
) -> None:
    for compiled, expected in (("false", loss), ("true", compiled_loss)):
        job = job_of(tmp_path, f"torchtitan {release}", training=f"compile = {compiled}")
        assert job.training.cross_entropy == expected
        assert not job.training.checkpoint_is_reentrant
        assert job.training.checkpoint_stops_early == (release == "0.0.2")


def test_a_deepspeed_before_the_oldest_that_was_read_is_taken_for_it(tmp_path: Path) -> None:
    job = job_of(tmp_path, "deepspeed 0.5.8", kind="deepspeed", strategy="stage = 3")
    assert (setting(job, "version"), setting(job, "fetches_one_by_one")) == (OLDEST, True)
    strategy = job_of(tmp_path, "2021", kind="deepspeed", strategy="stage = 2").strategy
    assert isinstance(strategy, DeepSpeedConfig)
    assert not strategy.fetches_one_by_one


@pytest.mark.parametrize("release", [OLDEST, "0.9.1", "0.9"])
def test_a_deepspeed_that_was_read_is_the_version_that_a_strategy_may_say(
    tmp_path: Path, release: str
) -> None:
    """ZeRO-3 with bf16, whose reductions differ among releases before 0.9.2."""
    job = job_of(tmp_path, f"deepspeed {release}", kind="deepspeed", strategy="stage = 3")
    said = job_of(tmp_path, "", kind="deepspeed", strategy=f'stage = 3\nversion = "{release}"')
    assert job.strategy == said.strategy
    assert setting(job, "version") == release


def test_transformers_wraps_fsdp2_and_runs_experts_one_by_one_before_5(tmp_path: Path) -> None:
    job = job_of(tmp_path, "transformers 4.57", model="qwen3-30b-a3b", gpu="h100")
    assert setting(job, "wrapping") == "huggingface"
    assert 'training.transformers = "4.57"' in software_note(job)
    dense = job_of(tmp_path, "transformers 4.57")
    assert not any("without effect" in note for note in dense.notes)


def test_filled_in_defaults_are_not_exported_as_choices(tmp_path: Path) -> None:
    training = job_of(tmp_path, "transformers 4.44").experiment.training
    assert training.model_fields_set == {"software", "sequence_length"}


def test_several_are_a_list_or_one_text() -> None:
    data: dict[str, Any] = {"model": "llama-3-8b", "cluster": "dgx-h100", "gpus": 8}
    jobs = [
        resolve(Experiment(**data, training={"software": software}))
        for software in (["torch 2.0", "transformers 4.30"], "torch 2.0, transformers 4.30")
    ]
    assert jobs[0].training == jobs[1].training
    assert jobs[0].training.optimizer_implementation == "for_loop"


@pytest.mark.parametrize(
    ("software", "message"),
    [
        ("transfomers 4.44", "did you mean 'transformers'"),
        (
            "megatron 0.8",
            "found 'megatron 0.8' with strategy 'fsdp2'; expected a strategy that runs megatron",
        ),
        ("torch", "without a release, expected one as in 'torch 2.15'"),
        ("torch 2.4, torch 2.1", "names torch twice, expected one release of it"),
        ("1999", "expected a year from 2019 to 2026"),
        (
            "jax 0.4",
            "expected a year, or a release of transformers, torchtitan, automodel, torch, "
            "deepspeed, megatron",
        ),
    ],
)
def test_bad_names_get_the_nearest_right_one(tmp_path: Path, software: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        job_of(tmp_path, software)


def test_every_default_is_a_key_of_some_strategy_with_a_source() -> None:
    preset = preset_table("software")
    tables = [*STRATEGIES.values()]
    for entry in preset["default"]:
        assert entry["source"]
        assert entry["software"] in preset["software"]
        for key in (entry["key"], *entry.get("when", {})):
            table, _, name = key.partition(".")
            if table == "strategy":
                assert any(name in strategy.model_fields for strategy in tables), key
            else:
                assert first_unknown_segment(key.split("."), zsim.Experiment) is None, key


def test_a_stated_default_stays_stated_beside_releases_with_another() -> None:
    """In torch 2.5 FSDP2's optimizers loop over lists by default, so that `fused` has to be written."""
    experiment = zsim.Experiment(
        model="gpt2",
        cluster="dgx-h100",
        training={"software": "2024", "optimizer_implementation": "fused"},
        strategy={"kind": "fsdp2"},
    )
    assert 'optimizer_implementation = "fused"' in experiment_toml(experiment)
    plain = experiment.model_copy(update={"training": TrainingTable(optimizer_implementation="fused")})
    assert "optimizer_implementation" not in experiment_toml(plain)


@pytest.mark.parametrize(
    ("software", "training", "reads"),
    [
        ("transformers 5.0", 'attention = "flash2"\nmicro_batch_size = 1', True),
        ("transformers 5.0", 'attention = "flash2"\nmicro_batch_size = 2', False),
        ("transformers 4.51", 'attention = "flash2"\nmicro_batch_size = 2', True),
        ("transformers 4.43", 'attention = "flash2"\nmicro_batch_size = 1', False),
        ("transformers 5.0", "micro_batch_size = 1", False),
    ],
)
def test_flash_attention_of_transformers_asks_the_gpu_whether_sequences_are_packed(
    tmp_path: Path, software: str, training: str, reads: bool
) -> None:
    """modeling_flash_attention_utils.py: `_is_packed_sequence` of 5.0.0 reads back for a batch of 1 alone,
    and the order of `position_ids` in 4.51.3 for any. 4.43 has neither, and SDPA, the default, asks nothing.
    """
    job = job_of(tmp_path, software, kind="ddp", training=training, model="llama-3.2-1b")
    cores = [
        module.op_spec for module in job.model.blocks[0].modules if isinstance(module.op_spec, Attention)
    ]
    assert [core.host_waits for core in cores] == [reads]


SDPA_IN_4_36 = "bart falcon gpt_bigcode whisper"
SDPA_FROM_THEIR_FIRST_RELEASE = "bamba jamba mllama_text_model modernbert"
NOT_IN_4_48 = """
    bailing_hybrid deepseek_v32 deepseek_v4 falcon_h1 gemma3n_text gemma4_text gemma4_unified_text
    glm_moe_dsa gpt_oss granitemoehybrid kimi_linear lara_mini lfm2 lfm2_moe lfm3 llama4_text
    longcat_flash minimax minimax_m3 minimax_m3_vl_text nemotron_h olmo_hybrid qwen qwen3_5_moe_text
    qwen3_5_text qwen3_next rwkv7 rwkv7_fla zamba2
"""


def test_every_family_older_than_transformers_4_48_has_sdpa_or_a_release_that_brought_it() -> None:
    (releases,) = (entry["families"] for entry in preset_table("software")["default"] if "families" in entry)
    others = f"{SDPA_IN_4_36} {SDPA_FROM_THEIR_FIRST_RELEASE} {NOT_IN_4_48}".split()
    assert set(releases) <= set(FAMILIES)
    assert set(FAMILIES) - set(decoders.names()) - set(releases) - {"megatron"} == set(others)


def test_attention_is_of_the_language_model_behind_a_tower(tmp_path: Path) -> None:
    """LLaVA over Llama gets the mask that LlamaModel makes of every batch in 4.38, over Mistral what Mistral
    has before 4.37."""
    text = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 8, "num_key_value_heads": 8}  # fmt: skip
    tower = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "patch_size": 14,
             "image_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4}  # fmt: skip
    for family, release, expected in (
        ("llama", "4.38", ("flash", "scores")),
        ("mistral", "4.38", ("flash", None)),
        ("mistral", "4.36", ("math", None)),
    ):
        config = {
            "model_type": "llava",
            "text_config": {"model_type": family, **text},
            "vision_config": tower,
        }
        model = tmp_path / f"{family}.json"
        model.write_text(json.dumps(config))
        training = job_of(tmp_path, f"transformers {release}", kind="ddp", model=str(model)).training
        assert (training.attention, training.padding_mask) == expected
