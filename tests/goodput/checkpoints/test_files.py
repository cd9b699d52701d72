"""The files of a save, against those that torch 2.13 and DeepSpeed 0.19.8 wrote on 2, 3 and 4 ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zsim
from validation.cases.cases import ANY_CLUSTER
from validation.checkpoints.cases import saved_cases
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.deepspeed.settings.config import DeepSpeedConfig
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.frameworks.fsdp2.studies import CHECKPOINT
from zsim.frameworks.torch import checkpoint as dcp
from zsim.goodput.checkpoints.saved import SavedFiles, archive_bytes, collect_model_states, saved_files
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.run.checkpoint import CheckpointTable

TRACES = Path(__file__).parents[3] / "traces" / "checkpoints"
RECORDED = json.loads((TRACES / "files.json").read_text())
OPTIONS = ("format", "threads", "single_file_per_rank", "saves_16bit_model")
LLAMA = "llama-3-8b"
UNIVERSAL = CheckpointTable(format="universal")


def job_of(**keys: Any) -> Job:
    return resolve(zsim.Experiment(**{"cluster": "dgx-h100", "gpus": 64, "model": LLAMA, **keys}))


def recorded(name: str) -> tuple[SavedFiles, dict[str, list[int]]]:
    """What zsim predicts, and [bytes, bytes of tensors] of every recorded file."""
    entry = RECORDED["configurations"][name]
    model = RECORDED["models"][entry["experiment"]["model"]]
    experiment = zsim.Experiment(**{**entry["experiment"], "model": model, "cluster": ANY_CLUSTER})
    options = {key: entry["checkpoint"][key] for key in OPTIONS if key in entry["checkpoint"]}
    return saved_files(resolve(experiment), CheckpointTable().model_copy(update=options)), entry["files"]


def total(saved: SavedFiles, category: str) -> int:
    """Bytes of a category in all files."""
    return sum(getattr(file, category) for file in saved.files)


@pytest.mark.parametrize("name", RECORDED["configurations"])
def test_every_file_has_the_tensors_that_the_framework_wrote(name: str) -> None:
    """The same files, and in each the same bytes of tensors; what is beside them within 2 % of the file, or
    15 % of a file without tensors (pickles, whose lengths depend on names)."""
    saved, files = recorded(name)
    made = saved.converted or saved.files
    assert {file.name: file.tensors for file in made} == {key: size for key, (_, size) in files.items()}
    for file in made:
        tolerance = 0.02 if file.tensors > 100_000 else 0.15
        if file.name != "manifest.json":
            assert file.bytes == pytest.approx(files[file.name][0], rel=tolerance), file.name


def test_every_configuration_is_recorded() -> None:
    names = {
        f"{case.name}-{model}-{ranks}ranks"
        for case in saved_cases()
        for model in case.models
        for ranks in case.ranks
    }
    assert names == set(RECORDED["configurations"])
    assert len(names) > 70


@pytest.mark.parametrize("name", ["fsdp2-apart-even-2ranks"])
def test_an_archive_is_as_long_as_torch_makes_it(name: str) -> None:
    """A file per tensor: its archive to the byte."""
    _, files = recorded(name)
    tensors = [(size, held) for file, (size, held) in files.items() if held]
    assert len(tensors) > 250
    assert all(archive_bytes(held) == size for size, held in tensors)


def test_an_archive_without_elements_has_no_record_for_them() -> None:
    """torch.save(torch.zeros(0)) is 1,513 bytes long, of one element 1,577."""
    assert archive_bytes(0) == 1513
    assert archive_bytes(4) == 1577


@pytest.mark.parametrize(
    ("strategy", "parallelism"),
    [
        ({"kind": "fsdp2", "replicate": 4}, {}),
        ({"kind": "fsdp2", "replicate": 2}, {"tensor": 4}),
        ({"kind": "fsdp2"}, {"tensor": 2, "pipeline": 2}),
        ({"kind": "fsdp2"}, {"context": 4}),
        ({"kind": "ddp"}, {}),
        ({"kind": "fsdp2", "wrapping": "torchtitan"}, {"expert": 8}),
        ({"kind": "fsdp2", "wrapping": "torchtitan", "replicate": 4}, {"expert": 4}),
    ],
)
def test_many_ranks_are_planned_as_few_ones(
    strategy: dict[str, Any], parallelism: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """[Note: many ranks] All is saved once, and the fullest rank's bytes differ by less than 1 %: step
    counters weigh 4 bytes in the planner's balance."""
    model = "mixtral-8x7b" if "expert" in parallelism else LLAMA
    training = {"gradient_accumulation_steps": 4}
    job = job_of(strategy=strategy, parallelism=parallelism, training=training, model=model)
    exact = saved_files(job, CheckpointTable(format="dcp"))
    monkeypatch.setattr(dcp, "_MAX_ITEMS", 0)
    found = saved_files(job, CheckpointTable(format="dcp"))
    for key in ("parameters", "optimizer_states"):
        assert total(found, key) == total(exact, key)
    assert found.written_bytes().max() == pytest.approx(exact.written_bytes().max(), rel=0.01)
    assert np.array_equal(found.staged, exact.staged)


def test_what_torch_saves_of_llama_is_twelve_bytes_per_parameter() -> None:
    """8,030,261,248 parameters: fp32 weights and two moments, and 291 step counters."""
    saved = saved_files(job_of(strategy={"kind": "fsdp2"}))
    assert total(saved, "parameters") == 4 * 8_030_261_248
    assert total(saved, "optimizer_states") == 8 * 8_030_261_248 + 4 * 291
    assert total(saved, "overhead") < 0.01 * saved.bytes


def test_replicas_stage_and_read_all_that_they_hold_and_write_it_once() -> None:
    """HSDP with 8 replicas of 8 shards: each rank stages an eighth of all, and writes about a 64th."""
    saved = saved_files(job_of(strategy={"kind": "fsdp2", "replicate": 8}))
    whole = 12 * 8_030_261_248
    assert saved.staged[0] == pytest.approx(whole / 8, rel=1e-3)
    assert saved.read.sum() == pytest.approx(8 * whole, rel=1e-3)
    assert saved.written_bytes().mean() == pytest.approx(whole / 64, rel=0.01)


def test_deepspeed_writes_fourteen_bytes_per_parameter_and_rank_0_the_module() -> None:
    """ZeRO-1 in bf16 on 64 ranks: 2 bytes per parameter from the first rank, 12/64 from every rank."""
    strategy = {"kind": "deepspeed", "stage": 1}
    saved = saved_files(job_of(strategy=strategy, training={"precision": "bf16"}))
    assert total(saved, "parameters") == 2 * 8_030_261_248
    assert total(saved, "optimizer_states") == pytest.approx(12 * 8_030_261_248, rel=1e-6)
    by_rank = saved.written_bytes()
    assert by_rank[1] == pytest.approx(12 * 8_030_261_248 / 64, rel=1e-3)
    assert by_rank[0] - by_rank[1] == pytest.approx(2 * 8_030_261_248, rel=1e-3)


def test_a_pipeline_of_deepspeeds_writes_a_file_per_layer() -> None:
    """32 blocks, embedding, norm and head; 14 bytes per parameter in all with ZeRO-1."""
    strategy = {"kind": "deepspeed", "stage": 1}
    job = job_of(strategy=strategy, training={"precision": "bf16", "gradient_accumulation_steps": 8},
                 parallelism={"pipeline": 4})  # fmt: skip
    saved = saved_files(job)
    layers = [file for file in saved.files if file.name.startswith("layer_")]
    assert [file.name for file in layers] == [f"layer_{number:02d}-model_states.pt" for number in range(35)]
    assert sum(file.parameters for file in layers) == 2 * 8_030_261_248
    assert {file.rank for file in layers} == {0, 16, 32, 48}


def test_megatrons_distributed_optimizer_writes_fourteen_bytes_evenly() -> None:
    """Masters and moments where they are, whole parameters dealt out: the fullest rank of 32 has 12/32 bytes
    per parameter of its half, and one half of the embedding, 128256 x 4096 x 2 / 2 bytes."""
    strategy = {"kind": "megatron", "distributed_optimizer": True}
    job = job_of(strategy=strategy, training={"precision": "bf16"}, parallelism={"tensor": 2})
    saved = saved_files(job)
    tensors = total(saved, "parameters") + total(saved, "optimizer_states")
    assert tensors == pytest.approx(14 * 8_030_261_248, rel=2e-3)  # and the padded vocabulary
    fullest = 12 * 8_030_261_248 / 2 / 32 + 128256 * 4096
    assert saved.written_bytes().max() == pytest.approx(fullest, rel=2e-3)
    assert saved.read[0] > saved.written_bytes()[0]  # whole parameters


@pytest.mark.parametrize("distributed", [False, True])
def test_megatron_saves_the_same_with_and_without_its_distributed_optimizer(distributed: bool) -> None:
    strategy = {"kind": "megatron", "distributed_optimizer": distributed}
    saved = saved_files(job_of(strategy=strategy, training={"precision": "bf16"}))
    tensors = total(saved, "parameters") + total(saved, "optimizer_states")
    assert tensors == pytest.approx(14 * 8_030_261_248, rel=2e-3)


def test_frozen_parameters_have_no_states() -> None:
    """All but the LM head frozen: 4 bytes for each parameter, 8 more for each of the head's."""
    job = job_of(strategy={"kind": "fsdp2"})
    assert isinstance(job.strategy, Fsdp2Config)
    held = collect_model_states(job)
    (stage,) = held.tensors
    frozen = tuple(replace(tensor, is_trainable=tensor.name == "lm_head.weight") for tensor in stage)
    layout = CHECKPOINT.layout(job, job.strategy, held, CheckpointTable())
    saved = dcp.dcp_files(replace(held, tensors=(frozen,)), layout)
    assert total(saved, "parameters") == 4 * 8_030_261_248
    assert total(saved, "optimizer_states") == 8 * 128_256 * 4096 + 4


@pytest.mark.parametrize(
    ("keys", "table", "words"),
    [
        ({"strategy": {"kind": "ddp"}}, {"format": "deepspeed"}, "run.checkpoint.format: found 'deepspeed'"),
        ({"strategy": {"kind": "fsdp2"}}, {"format": "megatron"}, "expected 'dcp' or 'full'"),
        ({"strategy": {"kind": "ddp"}}, {"format": "full", "threads": 2}, "run.checkpoint.threads: found 2"),
        (
            {"strategy": {"kind": "fsdp2"}},
            {"format": "full", "single_file_per_rank": False},
            "a file per tensor",
        ),
        ({"strategy": {"kind": "fsdp2"}}, {"saves_16bit_model": True}, "gathers none beside its files"),
        (
            {
                "strategy": {"kind": "deepspeed", "stage": 1},
                "parallelism": {"pipeline": 4},
                "training": {"gradient_accumulation_steps": 8},
            },
            {"saves_16bit_model": True},
            "found true with parallelism.pipeline 4",
        ),
        (
            {"strategy": {"kind": "deepspeed", "stage": 3}},
            {"saves_16bit_model": True},
            "without zero_optimization.stage3_gather_16bit_weights_on_model_save",
        ),
    ],
)
def test_a_format_that_the_framework_lacks_is_an_error(
    keys: dict[str, Any], table: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        saved_files(job_of(**keys), CheckpointTable(**table))


def test_rank_0_saves_its_shard_of_16_bit_weights() -> None:
    """DeepSpeed 0.19.8 runtime/engine.py `save_16bit_model`: below stage 3 its own `module_state_dict`."""
    strategy = {"kind": "deepspeed", "stage": 1}
    job = job_of(strategy=strategy, training={"precision": "bf16"}, parallelism={"tensor": 2})
    saved = saved_files(job, CheckpointTable(saves_16bit_model=True))
    (gathered,) = (file for file in saved.files if file.name == "pytorch_model.bin")
    assert gathered.parameters == pytest.approx(2 * 8_030_261_248 / 2, rel=1e-4)


def test_owners_of_whole_tensors_are_not_known() -> None:
    strategy = {"kind": "megatron", "engine": "internevo", "distributed_optimizer": True,
                "grad_reduce_dtype": "bf16"}  # fmt: skip
    with pytest.raises(NotSimulatedError, match="internevo"):
        saved_files(job_of(strategy=strategy, training={"precision": "bf16"}))


MIXTRAL = 46_702_792_704  # parameters, of which 45,097,156,608 are of experts
EXPERTS = 45_097_156_608
TITAN = {"kind": "fsdp2", "wrapping": "torchtitan"}


def mixtral(**keys: Any) -> Job:
    training = {"sequence_length": 4096, **keys.pop("training", {})}
    return job_of(**{"model": "mixtral-8x7b", "gpus": 32, "training": training, **keys})


@pytest.mark.parametrize(
    "parallelism",
    [
        {"expert": 8},
        {"expert": 4, "tensor": 2},
        {"expert": 8, "tensor": 2, "expert_tensor": 2},
        {"tensor": 2},
    ],
)
def test_torchtitans_experts_are_saved_once(parallelism: dict[str, int]) -> None:
    """12 bytes per parameter, and a counter for each of the 323 tensors (three of experts per layer)."""
    saved = saved_files(mixtral(strategy=TITAN, parallelism=parallelism))
    assert total(saved, "parameters") == 4 * MIXTRAL
    assert total(saved, "optimizer_states") == 8 * MIXTRAL + 4 * (32 * 10 + 3)


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize(
    "parallelism",
    [
        {"expert": 8},
        {"expert": 8, "pipeline": 2},
        {"expert": 4, "tensor": 2, "sequence_parallel": True},
        {"expert": 4, "tensor": 2, "expert_tensor": 1, "sequence_parallel": True},
        {"tensor": 2, "expert_tensor": 1, "sequence_parallel": True},
    ],
)
def test_megatrons_experts_are_saved_once(parallelism: dict[str, int], distributed: bool) -> None:
    """2 bytes per parameter and 12 of masters and moments, wherever they are. What tensor-parallel ranks
    share, a router and two norms of every layer and the last norm, is not written twice either before
    Megatron-Core 0.15, and its states are from then on, where the optimizer is distributed; so are those of
    experts that are not spread and that tensor-parallel ranks hold whole."""
    training = {"precision": "bf16", "gradient_accumulation_steps": 4}
    is_whole = "expert" not in parallelism
    shared = (4096 * (32 * (8 + 2) + 1) + EXPERTS * is_whole) * (parallelism.get("tensor", 1) - 1)
    for version, again in (("0.14.0", 0), ("0.16.1", shared * distributed)):
        strategy = {"kind": "megatron", "distributed_optimizer": distributed, "version": version}
        saved = saved_files(mixtral(strategy=strategy, training=training, parallelism=parallelism))
        assert total(saved, "parameters") == 2 * MIXTRAL
        assert total(saved, "optimizer_states") == 12 * (MIXTRAL + again)


MEGATRON_SAVES = json.loads((TRACES / "megatron.json").read_text())


@pytest.mark.parametrize("recorded", MEGATRON_SAVES["saves"], ids=lambda one: "-".join(
    str(value) for key, value in one.items() if key != "written"))  # fmt: skip
def test_ranks_of_megatron_core_write_what_they_wrote(recorded: dict[str, Any]) -> None:
    """Bytes of parameters and states of every rank, and all shards, as Megatron-Core 0.16.1 wrote them on
    CPU ranks. A dense model without tensor parallelism has its projections apart in zsim, so that its shards
    are more."""
    shape, experts = MEGATRON_SAVES["shape"], recorded["experts"]
    kind = ("mixtral", "MixtralForCausalLM") if experts else ("llama", "LlamaForCausalLM")
    model = {
        "model_type": kind[0], "architectures": [kind[1]], "hidden_size": shape["hidden"],
        "num_hidden_layers": shape["layers"], "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"], "vocab_size": shape["vocabulary"],
        "intermediate_size": shape["expert" if experts else "dense"], "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }  # fmt: skip
    parallelism = {"tensor": recorded["tensor"]}
    if experts:
        model |= {"num_local_experts": experts, "num_experts_per_tok": 2}
        if recorded["tensor"] > 1:
            parallelism |= {"expert_tensor": recorded["expert_tensor"], "sequence_parallel": True}
        if recorded["expert"] > 1:
            parallelism |= {"expert": recorded["expert"]}
    job = resolve(zsim.Experiment(
        model=model, cluster="dgx-h100", gpus=recorded["ranks"],
        training={"precision": "bf16", "sequence_length": 64}, parallelism=parallelism,
        strategy={"kind": "megatron", "distributed_optimizer": True, "version": "0.16.1"},
    ))  # fmt: skip
    saved = saved_files(job)
    for rank, written in enumerate(recorded["written"]):
        mine = [file for file in saved.files if file.rank == rank]
        assert sum(file.parameters for file in mine) == written["parameters"]
        assert sum(file.optimizer_states for file in mine) == written["optimizer_states"]
    shards = sum(written["shards"] for written in recorded["written"])
    assert saved.chunks == shards if experts or recorded["tensor"] > 1 else saved.chunks > shards


def test_a_rank_of_megatrons_writes_its_experts_and_a_part_of_the_rest() -> None:
    """8 ranks of experts, so that 4 of 32 ranks hold the same: a quarter of one expert of every layer, whose
    three products are three shards, and a 32nd of the rest; a rank reads one whole expert of every layer, a
    quarter of its states, the rest and a 32nd of that one's states."""
    strategy = {"kind": "megatron", "distributed_optimizer": True}
    saved = saved_files(mixtral(strategy=strategy, training={"precision": "bf16"}, parallelism={"expert": 8}))
    mine, rest = EXPERTS / 8, MIXTRAL - EXPERTS
    assert saved.written_bytes().max() == pytest.approx(14 * (mine / 4 + rest / 32), rel=0.01)
    assert saved.read[0] == pytest.approx(2 * (mine + rest) + 12 * (mine / 4 + rest / 32), rel=1e-6)
    whole = saved_files(mixtral(strategy={"kind": "megatron"}, parallelism={"expert": 8}))
    assert whole.chunks == 4 * (32 * (8 * 3 + 5) + 3)  # parameters, masters, two moments


def test_experts_are_gathered_into_one_file() -> None:
    """Of rank 0, with all experts: 12 bytes of every parameter, as without expert parallelism."""
    spread = saved_files(mixtral(strategy=TITAN, parallelism={"expert": 8}), CheckpointTable(format="full"))
    assert spread.bytes == pytest.approx(12 * MIXTRAL, rel=1e-3)
    assert sum(spread.gathered) == pytest.approx(12 * MIXTRAL, rel=1e-3)
    assert spread.read_once


def swapped(**keys: Any) -> Job:
    offload = {"device": "nvme", "nvme_path": "/nvme"}
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": offload}, "bf16": {"enabled": True}}
    strategy = {"kind": "deepspeed", "config": config}
    return job_of(strategy=strategy, training={"precision": "bf16", "micro_batch_size": 1}, **keys)


def test_states_on_drives_are_copied_file_by_file_and_are_in_no_partition() -> None:
    """A rank's shard is one sub-group: three files per rank, whose lengths are multiples of 1,024 bytes."""
    saved = saved_files(swapped())
    offloaded = [file for file in saved.files if file.name.startswith("offloaded_tensors/")]
    assert len(offloaded) == 3 * 64
    assert {file.bytes % 1024 for file in offloaded} == {0}
    assert sum(file.optimizer_states for file in offloaded) == 12 * 8_030_261_248
    assert total(saved, "optimizer_states") == 12 * 8_030_261_248
    assert saved.staged.max() == 0
    assert saved.copied is not None
    assert saved.copied.sum() == sum(file.bytes for file in offloaded)
    partitions = sum(file.bytes for file in saved.files if file.name.endswith("_optim_states.pt"))
    assert saved.read.sum() == saved.bytes - partitions


def test_a_sub_group_below_the_swap_floor_stays_in_the_partition() -> None:
    """1 MiB of masters is the least that DeepSpeed swaps: sub-groups of 100,000 elements are not."""
    job = swapped()
    config = job.strategy
    assert isinstance(config, DeepSpeedConfig)
    small = replace(config, zero=config.zero.model_copy(update={"sub_group_size": 100_000}))
    saved = saved_files(replace(job, strategy=small))
    large = [file for file in saved.files if file.name.startswith("offloaded_tensors/")]
    assert large
    assert min(file.optimizer_states for file in large) >= 2**20
    in_partitions = sum(f.optimizer_states for f in saved.files if f.name.endswith("_optim_states.pt"))
    assert in_partitions > 0
    assert in_partitions + sum(file.optimizer_states for file in large) == 12 * 8_030_261_248


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ({"strategy": {"kind": "deepspeed", "stage": 0}}, InputError, "expected 'deepspeed', or ZeRO stage"),
        ({"strategy": {"kind": "fsdp2"}}, InputError, "expected 'dcp' or 'full'"),
    ],
)
def test_only_partitions_are_converted(keys: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        saved_files(job_of(**keys), UNIVERSAL)


def test_states_on_drives_are_not_converted() -> None:
    with pytest.raises(NotSimulatedError, match="in no partition's file"):
        saved_files(swapped(), UNIVERSAL)


def test_every_rank_of_stage_3_reads_a_whole_universal_checkpoint_and_of_stage_1_its_parameters() -> None:
    """64 ranks; 12 bytes per parameter. In stage 1 a rank has a 64th of the flat buffer, and reads the whole
    parameters that are in it, and the module."""
    of_stage = {
        stage: saved_files(
            job_of(strategy={"kind": "deepspeed", "stage": stage}, training={"precision": "bf16"}),
            UNIVERSAL,
        )
        for stage in (1, 3)
    }
    assert of_stage[3].read.min() > 12 * 8_030_261_248
    for saved in of_stage.values():
        parameters = sum(file.optimizer_states for file in saved.converted if file.name.endswith("32.pt"))
        assert parameters == 4 * 8_030_261_248
    module = 2 * 8_030_261_248
    least, most = 12 * 8_030_261_248 // 64, 12 * (8_030_261_248 // 64 + 2 * 128_256 * 4096)
    assert (of_stage[1].read - module >= least).all()
    assert (of_stage[1].read - module <= most).all()


def test_converted_files_have_the_types_of_masters_and_moments() -> None:
    """All in 16 bits: 6 bytes per parameter, of which a rank reads a 64th or a little more."""
    types = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    config = {"bf16": types, "zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}
    saved = saved_files(job_of(strategy={"kind": "deepspeed", "config": config}), UNIVERSAL)
    files = [file for file in saved.converted if file.name.startswith("zero/")]
    assert sum(file.optimizer_states for file in files if "step.pt" not in file.name) == 6 * 8_030_261_248
    assert (saved.read - 2 * 8_030_261_248 <= 6 * (8_030_261_248 // 64 + 2 * 128_256 * 4096)).all()


def test_the_files_of_deepspeeds_experts_are_not_known() -> None:
    job = job_of(model="mixtral-8x7b", strategy={"kind": "deepspeed", "stage": 2}, parallelism={"expert": 8})
    with pytest.raises(NotSimulatedError, match="a file per expert"):
        saved_files(job)
