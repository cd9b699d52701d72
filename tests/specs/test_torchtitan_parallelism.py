"""torchtitan's degrees, schedules and micro-batches as `[parallelism]`, and back."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

import zsim
from zsim.errors import InputError, NotSimulatedError
from zsim.plan.make import make_plan
from zsim.plan.ops import Collective
from zsim.programs.torchtitan.degree_keys import degrees_of
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.formats.export import export_files

FILE = """
[model]
name = "llama3"
flavor = "8B"

[training]
local_batch_size = 8
seq_len = 8192

[activation_checkpoint]
mode = "none"
"""


def read(folder: Path, *options: str, nodes: int = 4, **overrides: Any) -> Job:
    """The job of the TOML with `--parallelism.` in front of each of the options."""
    path = folder / "train.toml"
    path.write_text(FILE)
    words = " ".join(
        f"--{one}" if "." in one.partition("=")[0] else f"--parallelism.{one}" for one in options
    )
    data = {"cluster": "dgx-h100", "nodes": nodes}
    return resolve(build_experiment(data, {"strategy.config": f"{path} {words}", **overrides}, origin="test"))


def test_tensor_parallelism_has_sequence_parallelism_and_shards_what_is_left(tmp_path: Path) -> None:
    """32 GPUs, 8 of them share a model: 4 replicas, each with 8 sequences."""
    job = read(tmp_path, "tensor_parallel_degree=8")
    assert (job.parallelism.tensor, job.parallelism.sequence_parallel) == (8, True)
    assert (job.data_parallel_size, job.training.micro_batch_size) == (4, 8)
    degrees = ("tensor_parallel_degree=8", "data_parallel_shard_degree=4")
    assert read(tmp_path, *degrees).data_parallel_size == 4
    message = "1 replicas of 8 shards, tensor 8 are 64 GPUs, but the experiment has 32"
    with pytest.raises(InputError, match=message):
        read(tmp_path, "tensor_parallel_degree=8", "data_parallel_shard_degree=8")


def test_a_pipeline_cuts_the_local_batch(tmp_path: Path) -> None:
    """8 sequences in pieces of 2 are 4 micro-batches; 256 sequences on 8 replicas are 4 such pipelines."""
    job = read(tmp_path, "pipeline_parallel_degree=4", "pipeline_parallel_microbatch_size=2")
    assert (job.training.micro_batch_size, job.training.gradient_accumulation_steps) == (2, 4)
    assert (job.parallelism.schedule, job.parallelism.passes) == ("1f1b", 1)
    many = read(
        tmp_path,
        "pipeline_parallel_degree=4",
        "pipeline_parallel_microbatch_size=2",
        "training.global_batch_size=256",
    )
    assert (many.training.gradient_accumulation_steps, many.parallelism.passes) == (16, 4)
    message = "expected a multiple of 4 micro-batches of 2 x 8 replicas of the model"
    with pytest.raises(InputError, match=message):
        read(
            tmp_path,
            "pipeline_parallel_degree=4",
            "pipeline_parallel_microbatch_size=2",
            "training.global_batch_size=100",
        )


def test_micro_batches_after_0_3_are_whole_local_batches(tmp_path: Path) -> None:
    job = read(tmp_path, "pipeline_parallel_degree=4", "num_pp_microbatches=16")
    assert (job.training.micro_batch_size, job.training.gradient_accumulation_steps) == (8, 16)


def test_the_ends_have_a_layer_less_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    """32 layers and 2: 34 on 4 stages are 9, 9, 8, 8, and one less on the ends. Without: 8 each."""
    assert read(tmp_path, "pipeline_parallel_degree=4").parallelism.layers_per_stage == (8, 9, 8, 7)
    even = (
        "pipeline_parallel_degree=4",
        "pipeline_parallel_first_stage_less_layers=0",
        "pipeline_parallel_last_stage_less_layers=0",
    )
    assert read(tmp_path, *even).parallelism.layers_per_stage == (8, 8, 8, 8)


@pytest.mark.parametrize(
    ("name", "own", "virtual"),
    [
        ("1F1B", "1f1b", 1),
        ("GPipe", "gpipe", 1),
        ("interleaved1f1b", "interleaved-1f1b", 2),
        ("LoopedBFS", "looped-bfs", 2),
        ("InterleavedZeroBubble", "interleaved-zero-bubble", 2),
        ("ZBVZeroBubble", "zbv-zero-bubble", 2),
        ("DualPipeV", "dualpipe-v", 2),
    ],
)
def test_every_schedule_of_torch_has_its_name(tmp_path: Path, name: str, own: str, virtual: int) -> None:
    """torch compares names in lower case."""
    job = read(tmp_path, "pipeline_parallel_degree=4", f"pipeline_parallel_schedule={name}")
    assert (job.parallelism.schedule, job.parallelism.virtual_stages) == (own, virtual)


def test_layers_per_stage_give_the_number_of_stages(tmp_path: Path) -> None:
    """34 layers with those of the ends, 3 a stage: 12 stages on 4 ranks, 3 each."""
    interleaved = ("pipeline_parallel_degree=4", "pipeline_parallel_schedule=Interleaved1F1B")
    job = read(tmp_path, *interleaved, "pipeline_parallel_layers_per_stage=3")
    assert job.parallelism.virtual_stages == 3
    with pytest.raises(InputError, match=r"make 7 stages.*a multiple of 4 above it; the nearest that fits"):
        read(tmp_path, *interleaved, "pipeline_parallel_layers_per_stage=5")
    with pytest.raises(InputError, match=r"make 12 stages.*need 4; the nearest that fits is 9"):
        read(tmp_path, "pipeline_parallel_degree=4", "pipeline_parallel_layers_per_stage=3")


def test_split_points_of_old_files_are_layers(tmp_path: Path) -> None:
    points = "pipeline_parallel_split_points=layers.6,layers.15,layers.25"
    assert read(tmp_path, "pipeline_parallel_degree=4", points).parallelism.layers_per_stage == (6, 9, 10, 7)


def test_context_parallelism_gathers_or_rotates(tmp_path: Path) -> None:
    """Its `alltoall` sends K and V from rank to rank; ranks of context also shard parameters."""
    job = read(tmp_path, "context_parallel_degree=4", "training.local_batch_size=1")
    assert (job.parallelism.context, job.parallelism.context_method) == (4, "all-gather")
    assert job.data_parallel_size == 8
    rotates = ("context_parallel_degree=4", "context_parallel_rotate_method=alltoall")
    assert read(tmp_path, *rotates).parallelism.context_method == "p2p"


def test_async_tensor_parallelism_needs_compile(tmp_path: Path) -> None:
    options = ("tensor_parallel_degree=8", "enable_async_tensor_parallel")
    assert read(tmp_path, *options, "compile.enable").parallelism.async_tensor
    with pytest.raises(InputError, match=r"asynchronous tensor parallelism without torch\.compile"):
        read(tmp_path, *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["tensor_parallel_degree=0"], "found 0, expected at least 1"),
        (
            ["pipeline_parallel_degree=2", "pipeline_parallel_schedule=1F2B"],
            "found '1F2B', expected one of 1F1B, GPipe.*did you mean '1F1B'",
        ),
        (
            ["pipeline_parallel_degree=2", "pipeline_parallel_microbatch_size=3"],
            "does not divide training.local_batch_size 8.*the nearest that does is 2",
        ),
        (
            ["context_parallel_degree=2", "context_parallel_rotate_method=ring"],
            "expected one of allgather, alltoall",
        ),
        (
            ["tensor_parallel_degree=2", "data_parallel_shard_degree=1", "data_parallel_replicate_degree=16"],
            "which torchtitan runs as DDP and refuses beside other parallelisms",
        ),
        (
            ["pipeline_parallel_degree=4", "pipeline_parallel_split_points=layers.8"],
            "found 2 stages on 4 pipeline ranks, expected a multiple; the nearest is 4",
        ),
    ],
)
def test_what_torchtitan_refuses_is_refused(tmp_path: Path, options: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(tmp_path, *options)


def test_logits_may_be_gathered(tmp_path: Path) -> None:
    """Read, and written back; Megatron has no such option."""
    found = read(tmp_path, "tensor_parallel_degree=8", "disable_loss_parallel")
    assert not found.parallelism.loss_parallel
    assert degrees_of(found)["disable_loss_parallel"] is True
    data: dict[str, Any] = {"model": "llama-3-8b", "cluster": "dgx-h100", "nodes": 1}
    data |= {"strategy": {"kind": "megatron"}, "parallelism": {"tensor": 2, "loss_parallel": False}}
    with pytest.raises(InputError, match="which torchtitan alone has"):
        resolve(build_experiment(data, {}, origin="test"))


@pytest.mark.parametrize(
    ("strategy", "changes", "message"),
    [
        ({"kind": "megatron"}, {}, "which torch's DTensors alone have"),
        ({"kind": "fsdp2"}, {"tensor": 1}, "expected false, or strategy 'fsdp2' with tensor above 1"),
        ({"kind": "fsdp2"}, {"async_tensor": True}, "found true with async_tensor"),
    ],
)
def test_a_gather_per_product_is_plain_dtensors(
    strategy: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    parallelism = {"tensor": 2, "gather_per_product": True, **changes}
    data: dict[str, Any] = {"model": "llama-3-8b", "cluster": "dgx-h100", "nodes": 1, "strategy": strategy}
    data |= {"parallelism": parallelism, "training": {"compile": True}}
    with pytest.raises((InputError, NotSimulatedError), match=message):
        resolve(build_experiment(data, {}, origin="test"))


def test_gathered_logits_are_whole_on_every_tensor_rank(tmp_path: Path) -> None:
    """8 sequences of 8192 tokens: behind the gather of the head's input (4096 features in bf16), 128,256
    logits in bf16, in place of three numbers per token in fp32."""
    tokens = 8 * 8192
    sent = []
    for option in ("tensor_parallel_degree=8", "disable_loss_parallel"):
        plan = make_plan(read(tmp_path, "tensor_parallel_degree=8", option))
        named = ((op.name, op.work) for op in plan.ops if op.phase == "forward")
        ends = [work.bytes for name, work in named if isinstance(work, Collective) and "blocks" not in name]
        sent.append(ends[-4:])
    assert sent[0] == [2 * tokens * 4096, *(4 * tokens,) * 3]
    assert sent[1][-2:] == [2 * tokens * 4096, 2 * tokens * 128_256]


def test_keys_of_a_parallelism_that_is_off_are_named(tmp_path: Path) -> None:
    notes = " ".join(read(tmp_path, "pipeline_parallel_schedule=GPipe").notes)
    assert "no effect without the parallelism that they belong to: parallelism.pipeline_parallel_sch" in notes


PARALLELISMS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 8},
    "async": {"tensor": 8, "async_tensor": True},
    "pipeline": {"pipeline": 4},
    "passes": {"pipeline": 4, "passes": 2},
    "interleaved": {"pipeline": 4, "schedule": "interleaved-1f1b"},
    "four stages each": {"pipeline": 4, "schedule": "looped-bfs", "virtual_stages": 4},
    "even": {"pipeline": 2, "first_stage_less_layers": 0, "last_stage_less_layers": 0},
    "own split": {"pipeline": 2, "layers_per_stage": [13, 19]},
    "context": {"context": 4},
    "ring": {"context": 4, "context_method": "p2p"},
    "three": {"tensor": 4, "pipeline": 2, "schedule": "zbv-zero-bubble", "context": 2},
}


@pytest.mark.parametrize("name", PARALLELISMS)
@pytest.mark.parametrize("replicate", [1, 2])
def test_what_is_written_is_read_back(tmp_path: Path, name: str, replicate: int) -> None:
    experiment = zsim.Experiment(
        model="llama-3-8b",
        cluster="dgx-h100",
        nodes=8,
        training={
            "gradient_accumulation_steps": 8 if "pipeline" in PARALLELISMS[name] else 1,
            "gradient_clipping": 1.0,
            "compile": name == "async",
        },
        parallelism=PARALLELISMS[name],
        strategy={"kind": "fsdp2", "replicate": replicate},
    )
    job = resolve(experiment)
    exported = export_files(job)
    path = tmp_path / "torchtitan.toml"
    path.write_text(exported.files["torchtitan.toml"])
    back = resolve(build_experiment({"cluster": "dgx-h100"}, {"strategy.config": str(path)}, origin="test"))
    assert back.parallelism == job.parallelism
    assert back.training == job.training
    assert (back.strategy, back.world_size) == (job.strategy, job.world_size)
    assert set(exported.missing) == {"fsdp2.py", "accelerate.yaml"}


def test_0_3_has_asynchronous_products_among_what_is_compiled() -> None:
    experiment = zsim.Experiment(
        model="llama-3-8b",
        cluster="dgx-h100",
        training={"compile": True, "gradient_clipping": 1.0},
        parallelism={"tensor": 8, "async_tensor": True},
        strategy={"kind": "fsdp2"},
    )
    text = export_files(resolve(experiment)).files["torchtitan.toml"]
    assert "--compile.enable_async_tensor_parallel=True" in text
    assert tomllib.loads(text)["parallelism"]["enable_async_tensor_parallel"]


def test_only_degrees_above_one_are_written() -> None:
    experiment = zsim.Experiment(model="llama-3-8b", cluster="dgx-h100", strategy={"kind": "fsdp2"})
    written = tomllib.loads(export_files(resolve(experiment)).files["torchtitan.toml"])
    assert set(written["parallelism"]) == {
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "fsdp_reshard_after_forward",
    }


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"tensor": 8, "sequence_parallel": False}, "always has sequence parallelism"),
        ({"tensor": 8, "gather_per_product": True}, "of one input gather it together"),
        ({"tensor": 8, "order": "tp-cp-pp-dp"}, "its mesh has one order"),
        ({"context": 2, "context_method": "all-to-all"}, "and exchanges no heads"),
    ],
)
def test_what_torchtitan_cannot_be_told_is_said(table: dict[str, Any], why: str) -> None:
    experiment = zsim.Experiment(
        model="llama-3-8b", cluster="dgx-h100", nodes=8, parallelism=table, strategy={"kind": "fsdp2"}
    )
    assert why in export_files(resolve(experiment)).missing["torchtitan.toml"]
