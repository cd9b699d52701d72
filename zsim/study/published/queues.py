"""Under which CUDA_DEVICE_MAX_CONNECTIONS a published run ran, as far as its framework or its scripts say.

The variable came to Megatron-LM on 14 October 2022 (commit bdd97312: tensor parallelism asserts it), and into
its launch scripts on 17 February 2023 (7625a9d2: examples/pretrain_gpt.sh exports 1). Microsoft's
Megatron-DeepSpeed had neither before it merged them on 4 July 2023 (9e72d571); examples/azure of 11 July 2022
(62bc4562), with which the Azure runs were made, and the tree of June 2023, with which ZeRO++'s were, do not
name it, nor does any file of DeepSpeed or of its tutorials. nanotron has exported 1 from its first commit
(run_train.py, slurm_launcher.py). PyTorch, composer, torchtitan, Accelerate and transformers leave it alone.
"""

from __future__ import annotations

import re

from zsim.specs.strategy.training import DEFAULT_CONNECTIONS
from zsim.study.published.table import PublishedRun


def device_max_connections(run: PublishedRun) -> int:
    """1 where the run's launch scripts export it, else CUDA's default."""
    software = run.text("software")
    if "nanotron" in software:
        return 1
    is_megatron = re.search(r"Megatron-(LM|Core)", software) and "Megatron-DeepSpeed" not in software
    return 1 if is_megatron and run.text("date") >= "2023-03" else DEFAULT_CONNECTIONS
