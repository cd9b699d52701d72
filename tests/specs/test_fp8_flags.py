"""Flags and keys of fp8 in Megatron's command lines and recipes, and in torchtitan's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zsim.errors import InputError, NotSimulatedError
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.resolve import resolve
from zsim.specs.formats.export import export_files

LINE = (
    "pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 8 --bf16 --tokenizer-type "
    "NullTokenizer --vocab-size 32000 --use-distributed-optimizer"
)
TITAN = """
[model]
name = "llama3"
flavor = "8B"
converters = ["CONVERTER"]

[training]
local_batch_size = 1
seq_len = 2048

[compile]
enable = true
"""


def of_megatron(flags: str, folder: Path, cluster: str = "dgx-h100") -> Job:
    path = folder / "train.sh"
    path.write_text(f"#!/bin/bash\ntorchrun --nproc_per_node 8 {LINE} {flags}\n")
    return resolve(
        build_experiment({"cluster": cluster, "nodes": 1}, {"strategy.config": str(path)}, origin="test")
    )


def of_titan(folder: Path, converter: str = "float8", more: str = "", cluster: str = "dgx-h100") -> Job:
    path = folder / "titan.toml"
    path.write_text(TITAN.replace("CONVERTER", converter) + more)
    return resolve(
        build_experiment({"cluster": cluster, "nodes": 1}, {"strategy.config": str(path)}, origin="test")
    )


@pytest.mark.parametrize(
    ("flags", "cluster", "recipe"),
    [
        ("--fp8-format hybrid", "dgx-h100", "delayed"),
        ("--fp8-format e4m3 --fp8-recipe tensorwise", "dgx-h100", "current"),
        ("--fp8-format e4m3 --fp8-recipe blockwise", "dgx-h100", "block"),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "hgx-b200", "mxfp8"),
        ("--fp4-format e2m1", "hgx-b200", "nvfp4"),
    ],
)
def test_megatrons_recipes_have_names_of_their_own(
    flags: str, cluster: str, recipe: str, tmp_path: Path
) -> None:
    job = of_megatron(flags, tmp_path, cluster)
    assert (job.training.precision, job.training.fp8.recipe) == ("fp8", recipe)


def test_megatrons_flags_come_back_from_its_script(tmp_path: Path) -> None:
    flags = "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather --first-last-layers-bf16 "
    job = of_megatron(flags + "--num-layers-at-start-in-bf16 2", tmp_path)
    table: Any = job.experiment.strategy
    training = job.experiment.training
    assert (table.fp8_param_gather, training.bf16_first_layers, training.bf16_last_layers) == (True, 2, 1)
    script = export_files(job).files["megatron.sh"]
    for flag in (
        "--fp8-recipe tensorwise", "--fp8-param-gather", "--first-last-layers-bf16",
        "--num-layers-at-start-in-bf16 2 --num-layers-at-end-in-bf16 1",
    ):  # fmt: skip
        assert flag in script
    assert "--tp-only-amax-red" in export_files(
        of_megatron("--fp8-format hybrid --tp-only-amax-red", tmp_path)
    ).files["megatron.sh"]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        ("--fp8-format hybrid --fp4-format e2m1", InputError, "refuses it beside --fp8-format"),
        ("--fp8-format hybrid --fp8-recipe blockwize", InputError, "blockwise"),
        ("--fp8-format hybrid --fp8-recipe custom", NotSimulatedError, "quantizers of one's own"),
        ("--fp8-format hybrid --first-last-layers-bf16", InputError, "Megatron refuses them with delayed"),
        ("--fp8-format hybrid --fp8-recipe mxfp8", InputError, "nearest that it has is 'block'"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    flags: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        of_megatron(flags, tmp_path)


def test_torchtitans_keys_say_the_recipe_and_come_back(tmp_path: Path) -> None:
    rowwise = '\n[quantize.linear.float8]\nrecipe_name = "rowwise"\n'
    job = of_titan(tmp_path, "quantize.linear.float8", rowwise)
    assert job.training.fp8.recipe == "torchao-rowwise"
    assert 'recipe_name = "rowwise"' in export_files(job).files["torchtitan.toml"]
    ready = (
        "\n[float8]\nenable_fsdp_float8_all_gather = true\nprecompute_float8_dynamic_scale_for_fsdp = true\n"
    )
    job = of_titan(tmp_path, more=ready)
    strategy: Any = job.strategy
    assert (job.training.fp8.recipe, strategy.param_dtype, strategy.precomputes_scales) == (
        "torchao-tensorwise", "fp8", True,
    )  # fmt: skip
    assert "precompute_float8_dynamic_scale_for_fsdp = true" in export_files(job).files["torchtitan.toml"]
    job = of_titan(tmp_path, "quantize.linear.mx", cluster="hgx-b200")
    assert job.training.fp8.recipe == "mxfp8"
    assert 'recipe_name = "mxfp8_cublas"' in export_files(job).files["torchtitan.toml"]


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ('[float8]\nrecipe_name = "rowwize"\n', InputError, "rowwise"),
        ('[float8]\nrecipe_name = "rowwise_with_gw_hp"\n', NotSimulatedError, "expected 'rowwise'"),
        (
            '[float8]\nrecipe_name = "rowwise"\nenable_fsdp_float8_all_gather = true\n',
            InputError,
            "torchtitan refuses it with recipe_name 'rowwise'",
        ),
    ],
)
def test_keys_that_torchtitan_refuses_are_refused(
    more: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        of_titan(tmp_path, more="\n" + more)
