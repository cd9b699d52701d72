"""Which attention and which loss a training runs on."""

from __future__ import annotations

from typing import Any

import pytest

from zsim import Experiment
from zsim.errors import InputError
from zsim.programs.megatron_lm.write import megatron_script
from zsim.specs.cluster.files import load_cluster
from zsim.specs.cluster.gpu import select_attention_variant
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.resolve import resolve


def job_of(cluster: str = "dgx-h100", **training: Any) -> Job:
    return resolve(Experiment(model="gpt2", cluster=cluster, nodes=1, training=training))


def test_a_generation_of_flash_attention_replaces_the_gpus_curve() -> None:
    """The H100's file has FlashAttention-2's curve, and those of 1 and 3 beside it. GPT-2's dropout keeps
    torch from cuDNN's."""
    default, second, third = (job_of(attention=name) for name in (None, "flash2", "flash3"))
    assert default.cluster == second.cluster
    curves = default.cluster.gpu.attention, third.cluster.gpu.attention
    assert curves[0].forward_fraction < curves[1].forward_fraction
    assert third.training.attention == "flash"


@pytest.mark.parametrize(
    ("cluster", "strategy", "attention", "expected"),
    [
        ("dgx-a100-80gb", {"deterministic_mode": True}, None, True),
        ("dgx-a100-80gb", {"deterministic_mode": True, "transformer_impl": "local"}, None, False),
        ("dgx-a100-80gb", {}, None, False),
        ("dgx-a100-80gb", {"deterministic_mode": True}, "flash2", True),
        ("dgx-a100-80gb", {}, "flash2-deterministic", True),
        ("dgx-h100", {"deterministic_mode": True}, None, False),
        ("dgx-h100", {"deterministic_mode": True}, "flash2-deterministic", True),
        ("hgx-b200", {"deterministic_mode": True}, None, True),  # GPT-2 drops scores out
        ("hgx-b200", {"deterministic_mode": True}, "cudnn", False),
        ("hgx-b200", {}, None, False),
    ],
)
def test_deterministic_mode_has_flash_attention_2_where_cudnn_cannot(
    cluster: str, strategy: dict[str, Any], attention: str | None, expected: bool
) -> None:
    experiment = Experiment(
        model="gpt2",
        cluster=cluster,
        nodes=1,
        strategy={"kind": "megatron", **strategy},
        training={"attention": attention} if attention else {},
    )
    assert resolve(experiment).cluster.gpu.attention.is_deterministic is expected


@pytest.mark.parametrize(
    ("cluster", "strategy", "attention", "expected"),
    [
        ("dgx-h100", {"deterministic_mode": True}, None, True),
        ("hgx-h200", {"deterministic_mode": True}, "cudnn", True),
        ("dgx-h100", {"deterministic_mode": True}, "flash2", False),
        ("dgx-h100", {"deterministic_mode": True, "transformer_impl": "local"}, None, False),
        ("dgx-h100", {}, None, False),
        ("dgx-h100", {}, "cudnn-deterministic", True),
        ("hgx-b200", {"deterministic_mode": True}, "cudnn", False),
    ],
)
def test_cudnns_deterministic_backward_writes_scores_on_hopper(
    cluster: str, strategy: dict[str, Any], attention: str | None, expected: bool
) -> None:
    training = {"attention": attention} if attention else {}
    asked = {"kind": "megatron", **strategy}
    job = resolve(Experiment(model="gpt2", cluster=cluster, nodes=1, strategy=asked, training=training))
    assert job.cluster.gpu.attention.writes_scores is expected
    assert job.training.writes_scores is expected


def test_cudnns_deterministic_backward_is_hoppers() -> None:
    with pytest.raises(InputError, match=r"'cudnn-deterministic' with GPU 'b200-sxm-180gb'.*on Hopper alone"):
        job_of("hgx-b200", attention="cudnn-deterministic")


def test_transformer_engine_has_cudnns_attention_on_blackwell() -> None:
    megatron, torch = (
        resolve(Experiment(model="gpt2", cluster="hgx-b200", nodes=1, strategy={"kind": kind})).cluster.gpu
        for kind in ("megatron", "fsdp2")
    )
    assert megatron.attention.backward_fraction == torch.attention.variants["cudnn"].backward_fraction
    assert torch.attention.backward_fraction != megatron.attention.backward_fraction


_ONE_CAUSAL = {"documents": [512], "attention_by_document": False}


@pytest.mark.parametrize(
    ("cluster", "model", "strategy", "training", "variant"),
    [
        ("dgx-h100", "llama-3-8b", {"kind": "fsdp2"}, {}, "cudnn"),
        ("hgx-h200", "llama-3-8b", {"kind": "deepspeed", "stage": 3}, {}, "cudnn"),
        ("dgx-h100", "deepseek-v2-lite", {"kind": "fsdp2"}, {}, "cudnn"),  # 192, values 128
        ("dgx-h100", "llama-3-8b", {"kind": "fsdp2"}, {"attention": "flash"}, None),
        ("dgx-h100", "llama-3-8b", {"kind": "fsdp2"}, {"attention": "flash2"}, None),
        ("dgx-h100", "llama-3-8b", {"kind": "fsdp2"}, {"lengths": {"documents": [512]}}, None),  # a mask
        ("dgx-h100", "llama-3-8b", {"kind": "fsdp2"}, {"lengths": _ONE_CAUSAL}, "cudnn"),
        ("dgx-h100", "gpt2", {"kind": "fsdp2"}, {}, None),  # dropout of 0.1
        ("dgx-h100", "gemma2-9b", {"kind": "fsdp2"}, {}, None),  # 256 wide, softcap
        ("dgx-h100", "mistral-7b", {"kind": "fsdp2"}, {}, None),  # window
        ("dgx-a100-80gb", "llama-3-8b", {"kind": "fsdp2"}, {}, None),
        ("hgx-b200", "llama-3-8b", {"kind": "fsdp2"}, {}, None),
        ("dgx-h100", "gpt2", {"kind": "megatron"}, {}, "cudnn"),
        ("dgx-h100", "gpt2", {"kind": "megatron", "deterministic_mode": True}, {}, "cudnn"),
        ("dgx-h100", "gpt2", {"kind": "megatron"}, {"attention": "flash2"}, None),
        ("dgx-h100", "gpt2", {"kind": "megatron", "transformer_impl": "local"}, {}, None),
        ("dgx-h100", "llama-3-8b", {"kind": "megatron", "engine": "nanotron"}, {}, None),
        ("mi300x-x8", "gpt2", {"kind": "megatron"}, {}, None),
    ],
)
def test_cudnns_attention_runs_where_the_program_takes_it(
    cluster: str, model: str, strategy: dict[str, Any], training: dict[str, Any], variant: str | None
) -> None:
    """Torch 2.11's sdp_utils.cpp and Transformer Engine's `get_attention_backend`; None: the GPU's own."""
    experiment = Experiment(model=model, cluster=cluster, nodes=1, strategy=strategy, training=training)
    chosen = resolve(experiment).cluster.gpu
    own = load_cluster(cluster).gpu
    assert (
        chosen.attention.model_copy(update={"writes_scores": False})
        == (select_attention_variant(own, variant) if variant else own).attention
    )


def test_blackwell_runs_flash_attention_2_about_as_fast_as_hopper() -> None:
    """Of 2,250 TFLOP/s 0.172 forward and 0.148 backward; without dropout of scores deterministic mode keeps
    cuDNN's."""
    model: dict[str, Any] = {"model": "llama-3.2-1b", "cluster": "hgx-b200", "nodes": 1}
    strategy = {"kind": "megatron", "deterministic_mode": True}
    asked = resolve(Experiment(**model, training={"attention": "flash2"})).cluster.gpu.attention
    assert (asked.forward_fraction, asked.backward_fraction) == (0.172, 0.148)
    kept = resolve(Experiment(**model, strategy=strategy)).cluster.gpu.attention
    assert not kept.is_deterministic
    assert kept.backward_fraction == 0.46


def test_a_generation_that_a_gpu_does_not_have_is_an_error() -> None:
    with pytest.raises(InputError, match=r"training.attention: GPU 'a100-sxm-80gb' has no attention variant"):
        job_of("dgx-a100-80gb", attention="flash3")
    with pytest.raises(
        InputError, match=r"'flash2-deterministic' with GPU 'mi300x-192gb'.*CUDA kernel alone"
    ):
        job_of("mi300x-x8", attention="flash2-deterministic")


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({}, "eager"),
        ({"compile": True}, "fused"),
        ({"liger": True}, "fused_linear"),
        ({"liger": True, "cross_entropy": "eager"}, "eager"),
        ({"cross_entropy": "megatron"}, "megatron"),
    ],
)
def test_the_loss_follows_what_the_rest_runs_on_unless_it_is_named(
    training: dict[str, Any], expected: str
) -> None:
    assert job_of(**training).training.cross_entropy == expected


def test_layers_have_the_kernels_of_their_megatron() -> None:
    """Megatron-DeepSpeed was forked from Megatron-LM 2; `layer_kernels` says otherwise."""

    def of(kind: str, training: dict[str, Any] | None = None, **strategy: Any) -> str:
        degrees = {"tensor": 2} if kind != "ddp" else {}
        experiment = Experiment(
            model="gpt2", cluster="dgx-h100", nodes=1, strategy={"kind": kind, **strategy},
            parallelism=degrees, training=training or {},
        )  # fmt: skip
        return resolve(experiment).training.layer_kernels

    assert [of("megatron"), of("megatron", version="2.4"), of("deepspeed", stage=1)] == [
        "megatron", "megatron-2", "megatron-2"
    ]  # fmt: skip
    assert of("megatron", engine="nanotron") == "nanotron"
    assert [of("ddp"), of("ddp", {"layer_kernels": "megatron"})] == ["torch", "megatron"]


@pytest.mark.parametrize(
    ("cluster", "attention", "expected"),
    [
        ("hgx-b200", None, "fused"),
        ("hgx-b200", "flash4", "flash"),
        ("dgx-h100", None, "fused"),
        ("dgx-h100", "flash2", "flash"),
        ("dgx-h100", "math", "unfused"),
    ],
)
def test_megatrons_script_asks_for_the_attention_that_was_simulated(
    cluster: str, attention: str | None, expected: str
) -> None:
    job = resolve(
        Experiment(
            model="gpt2",
            cluster=cluster,
            nodes=1,
            strategy={"kind": "megatron"},
            training={"attention": attention} if attention else {},
        )
    )
    assert f"--attention-backend {expected}\n" in megatron_script(job)


@pytest.mark.parametrize(
    ("cluster", "strategy", "attention", "expected"),
    [
        ("dgx-a100-80gb", {"kind": "fsdp2"}, None, True),
        ("dgx-a100-80gb", {"kind": "megatron"}, None, True),
        ("dgx-a100-80gb", {"kind": "megatron"}, "flash1", False),
        ("dgx-h100", {"kind": "fsdp2"}, None, False),
        ("dgx-h100", {"kind": "fsdp2"}, "flash2", True),
        ("dgx-h100", {"kind": "megatron", "engine": "nanotron"}, None, True),
        ("dgx-h100", {"kind": "megatron"}, None, False),
        ("hgx-b200", {"kind": "megatron"}, None, False),
        ("hgx-b200", {"kind": "megatron"}, "flash2", True),
        ("mi300x-x8", {"kind": "fsdp2"}, None, False),
    ],
)
def test_grouped_heads_are_expanded_where_flash_attention_2_runs(
    cluster: str, strategy: dict[str, Any], attention: str | None, expected: bool
) -> None:
    """Before Hopper, where it is asked for, and in engines that call it themselves."""
    training = {} if attention is None else {"attention": attention}
    asked = Experiment(model="llama-3.2-1b", cluster=cluster, nodes=1, strategy=strategy, training=training)
    assert resolve(asked).training.expands_groups is expected


def test_a_key_for_each_query_head_is_not_expanded() -> None:
    """Llama 2 7B has 32 heads of each, Llama 3.2 1B 32 and 8."""
    found = [
        resolve(Experiment(model=model, cluster="dgx-a100-80gb", nodes=1)).training.expands_groups
        for model in ("llama-2-7b", "gpt2", "llama-3.2-1b")
    ]
    assert found == [False, False, True]


PADDED = {"law": "uniform", "low": 64, "high": 1024, "batching": "padded"}


def masked_job(
    cluster: str,
    software: str,
    *,
    lengths: Any = PADDED,
    count: int = 2,
    model: str = "llama-3.2-1b",
    **training: Any,
) -> Job:
    values = {"software": software, "micro_batch_size": count, "sequence_length": 1024, **training}
    if lengths:
        values["lengths"] = lengths
    experiment = Experiment(model=model, cluster=cluster, gpus=1, strategy={"kind": "ddp"}, training=values)
    return resolve(experiment)


@pytest.mark.parametrize(
    ("cluster", "software", "kernel", "mask"),
    [
        ("dgx-a100-80gb", "transformers 4.49, torch 2.5", "efficient", "scores"),
        ("dgx-a100-80gb", "transformers 4.53, torch 2.12", "efficient", "bool"),
        ("dgx-h100", "transformers 4.49, torch 2.5", "efficient", "scores"),
        ("dgx-h100", "transformers 5.0", "cudnn", "bool"),
        ("dgx-a100-80gb", "torch 2.5", None, None),
        ("dgx-a100-80gb", "transformers 4.35", None, None),  # written out, over all pairs anyway
    ],
)
def test_transformers_hands_padded_micro_batches_a_mask_that_flash_attention_does_not_take(
    cluster: str, software: str, kernel: str | None, mask: str | None
) -> None:
    job = masked_job(cluster, software)
    own = load_cluster(cluster).gpu.attention
    expected = own.variants[kernel] if kernel else own
    assert job.training.padding_mask == mask
    assert job.cluster.gpu.attention.backward_fraction == expected.backward_fraction
    assert any("padded micro-batches is given a mask" in note for note in job.notes) == (mask is not None)


@pytest.mark.parametrize(
    ("lengths", "count", "attention", "expected"),
    [
        (PADDED, 2, None, "scores"),
        (PADDED, 1, None, None),  # every token of its only sequence is real
        ({**PADDED, "pad_to": 1024}, 1, None, "scores"),
        ({"documents": [512], "batching": "padded"}, 4, None, None),
        ({"documents": [512, 300], "batching": "padded"}, 4, None, "scores"),
        ({"documents": [2048, 1500], "batching": "padded"}, 4, None, None),  # all are cut
        ({"law": "constant", "mean": 512, "batching": "padded", "pad_to": 64}, 1, None, None),
        ({"law": "constant", "mean": 500, "batching": "padded", "pad_to": 64}, 1, None, "scores"),
        ({**PADDED, "batching": "packed"}, 2, None, None),
        (None, 2, None, None),
        (PADDED, 2, "flash2", None),
        (PADDED, 2, "efficient", "scores"),
    ],
)
def test_no_mask_is_made_where_nothing_is_padded(
    lengths: Any, count: int, attention: Any, expected: str | None
) -> None:
    chosen = {"attention": attention} if attention else {}
    job = masked_job("dgx-a100-80gb", "transformers 4.49, torch 2.5", lengths=lengths, count=count, **chosen)
    assert job.training.padding_mask == expected
    runs = load_cluster("dgx-a100-80gb").gpu.attention
    curve = runs.variants["efficient"] if expected else runs
    assert job.cluster.gpu.attention.forward_fraction == curve.forward_fraction


@pytest.mark.parametrize(
    ("model", "release", "kind", "mask"),
    [
        ("llama-3.2-1b", "4.37", "flash", None),
        ("llama-3.2-1b", "4.38", "flash", "scores"),
        ("llama-3.2-1b", "4.39.3", "flash", "scores"),
        ("llama-3.2-1b", "4.40", "flash", None),
        ("gemma-2b", "4.38.2", "flash", "scores"),
        ("mistral-7b", "4.38", "flash", None),
        ("mistral-7b", "4.36", "math", None),
        ("gpt2", "4.41", "math", None),
        ("gpt2", "4.42", "flash", None),
        ("bloom-7b1", "5.24", "math", None),
        *((name, "4.48", "math", None) for name in ("t5-large", "pegasus-large")),
        ("mbart-large-50", "4.44", "math", None),
        ("mbart-large-50", "4.45", "flash", None),
        ("pegasus-large", "4.53", "flash", None),
        ("t5-large", "5.15", "flash", None),
    ],
)
def test_attention_of_a_release_is_that_of_its_model(
    model: str, release: str, kind: str, mask: str | None
) -> None:
    """transformers 4.38 and 4.39 hand a mask of every batch to Llama and Gemma (#30070). Its models got
    scaled_dot_product_attention one by one."""
    job = masked_job("dgx-a100-80gb", f"transformers {release}, torch 2.5", lengths=None, model=model)
    assert (job.training.attention, job.training.padding_mask) == (kind, mask)
    assert any("is given a mask" in note for note in job.notes) == (mask is not None)


@pytest.mark.parametrize(
    ("software", "lengths", "kind", "mask"),
    [
        ("transformers 5.0", None, "flash", None),
        ("transformers 5.0", PADDED, "flash", "bool"),
        ("transformers 4.35", None, "math", None),
        ("transformers 4.49, torch 1.13", None, "math", None),
    ],
)
def test_before_ampere_the_memory_efficient_kernel_runs(
    software: str, lengths: Any, kind: str, mask: str | None
) -> None:
    """T4's file has its curve. There is no FlashAttention to choose."""
    job = masked_job("aws-g4dn", software, lengths=lengths, precision="fp16")
    assert (job.training.attention, job.training.padding_mask) == (kind, mask)
    assert job.cluster.gpu.attention == load_cluster("aws-g4dn").gpu.attention
    with pytest.raises(InputError, match="does not support 'flash'"):
        masked_job("aws-g4dn", software, precision="fp16", attention="flash")


def test_a_gpu_whose_file_has_no_such_curve_runs_its_own() -> None:
    """AMD's kernel for masks is the one without (AOTriton), and H100's curves, which its file extends, are
    not its own."""
    job = masked_job("mi300x-x8", "transformers 4.49, torch 2.5")
    assert job.training.padding_mask == "scores"
    assert job.cluster.gpu.attention == load_cluster("mi300x-x8").gpu.attention
