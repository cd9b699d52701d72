"""ZeRO++'s published runs: what is switched on, and shapes that its gradients can be cut from.

hpZ's groups are one node, as in DeepSpeed's tutorial for the same machines (docs/_tutorials/zeropp.md); the
rest of the runs' configuration is not published, and is DeepSpeed's default. That overlaps, as the tutorial's
example does (`"overlap_comm": true`; it has `"reduce_scatter": false` besides, with which qgZ does not run,
and a bucket of 1e7, which makes the rows 3 % faster still). qgZ in 2023 divided every gradient
among all GPUs, node by node, or failed, so that a shape which the table's collector made up (49B, 138B) and
which does not divide cannot be the one that ran.
"""

from __future__ import annotations

import re
from typing import Any

from zsim.study.published.table import PublishedRun


def is_zeropp(run: PublishedRun) -> bool:
    """The blog's and tutorial's rows, with ZeRO++ or without; and any other row with it."""
    return run.source.startswith("zeropp") or "ZeRO++" in run.text("strategy")


def zeropp_config(run: PublishedRun, gpus_per_node: int) -> dict[str, Any]:
    """The row's `zero_optimization`."""
    text = run.text("strategy")
    block: dict[str, Any] = {"stage": 3}
    if "hpZ" in text:
        block["zero_hpz_partition_size"] = gpus_per_node
    if "qwZ" in text:
        block["zero_quantized_weights"] = True
    if "qgZ" in text:
        block["zero_quantized_gradients"] = True
    return {"zero_optimization": block}


def zeropp_model(run: PublishedRun, config: dict[str, Any], assumptions: list[str]) -> dict[str, Any]:
    """The row's model with Megatron's vocabulary, padded to a multiple of 128 (its
    `--make-vocab-size-divisible-by`), and, where the shape is assumed and qgZ on, the nearest width that is a
    multiple of the number of GPUs, with as many layers as keep the parameters and the heads as long."""
    config = {**config, "vocab_size": -(-int(config["vocab_size"]) // 128) * 128}
    width, gpus = int(config["n_embd"]), run.count("n_gpus") or 1
    if "qgZ" not in run.text("strategy") or not _is_assumed(run) or width % gpus == 0:
        return config
    nearest = max(round(width / gpus), 1) * gpus
    layers = round(int(config["n_layer"]) * (width / nearest) ** 2)
    assumptions.append(f"{layers} layers of {nearest} (qgZ cannot divide {config['n_layer']} of {width})")
    return {
        **config,
        "n_embd": nearest,
        "n_inner": 4 * nearest,
        "n_layer": layers,
        "n_head": nearest * int(config["n_head"]) // width,
    }


def _is_assumed(run: PublishedRun) -> bool:
    named = re.search(r"arch for ([\d/]+)B", run.text("assumed_fields"))
    return named is not None and run.text("model") in {f"GPT-{size}B" for size in named[1].split("/")}
