"""Tensor, pipeline and context parallelism as torch has it, with torchtitan's defaults.

Sources: torchtitan v0.2.2 `config/job_config.py`, `distributed/pipeline_parallel.py`, and
`distributed/context_parallel.py` (`apply_cp_to_attention_module`, which gives every layer FlexAttention where
one has a window). Of other mixers it cuts Gated DeltaNet's heads (torchtitan b5bcd76c
models/qwen3_5/parallelize.py, which raises NotImplementedError for context parallelism).

Programs that patch transformers' attention have Ulysses under any of torch's engines, which shard over all
ranks all the same. As DeepSpeed's it repeats heads of K and V, gathers the tokens' positions in every layer,
and exchanges heads in line (verl b178a3cd models/transformers/monkey_patch.py
`_ulysses_flash_attention_forward`, utils/ulysses.py, ms-swift 4.6 sequence_parallel/ulysses.py, prime-rl
559b4477 trainer/models/layers/ulysses_attn.py).

Routed experts are sharded by torch as torchtitan does it, NeMo AutoModel or KempnerForge. Sources: torchtitan
0.2.2 `models/moe/moe.py` and `distributed/expert_parallel.py`, and `kempnerforge/model/moe.py` at 5666d0d1.
Passes are counted as [Note: rows that move] of `zsim.cost.kernels.moved_rows` says.

Sources of the settings that torch refuses with its pipelines and its asynchronous tensor parallelism:
torchtitan v0.2.2 distributed/tensor_parallel.py, and torch 2.13 _inductor/fx_passes/micro_pipeline_tp.py,
which knows gathers and scatters.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.cost.kernels.moved_rows import (
    INDEX_ADD,
    SCATTER_ADD,
    SORTED_INDEX_PUT,
    TRANSFORMER_ENGINE_KERNELS,
    ExpertKernelSet,
    MoveCost,
    RowPasses,
)
from zsim.errors import InputError, NotSimulatedError
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.expert_library import ExpertLibrary
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.parallelism_table import ParallelismTable
from zsim.specs.strategy.style import ModelParallelStyle
from zsim.specs.strategy.training import TrainingConfig

TORCH = ModelParallelStyle(
    title="torchtitan",
    has_dtensors=True,
    is_sequence_parallel=True,
    cuts_products=True,
    sums_adapters_partially=True,
    gathers_for_experts=True,
    reads_schedule_files=True,
    has_passes=True,
    missing_end_layers=1,
    has_zigzag=True,
    masks_windows=True,
    dispatchers=("all-to-all", "deepep"),
    splits_expert_tokens=True,
    tensor_mixers=("Gated DeltaNet",),
)
ULYSSES = replace(
    TORCH,
    title="Ulysses",
    has_zigzag=False,
    masks_windows=False,
    context_library="ulysses",
    context_methods=("all-to-all",),
    repeats_kv_heads_in_context=True,
)
DATA_PARALLEL = replace(TORCH, splits_models=False)
"""Of engines whose data parallelism is simulated alone."""


# models/moe/moe.py, utils.py: a gather, the scores' product through fp32 and back, a copy with a row of zeros
# at its end, and a gather that pads every expert's rows to a multiple of 8. Afterwards the same two the other
# way round, and a sum. torch.compile leaves them: `apply_compile` (models/llama4/infra/parallelize.py) wraps
# the children of a block with experts one by one, of its MoE module the router, the shared experts and the
# products of the routed ones, but neither `MoE.forward`, which moves the rows, nor the dispatch (issue 1940).
_TORCHTITAN_KERNELS = ExpertKernelSet(
    "torchtitan",
    permute=MoveCost(RowPasses(0, 16, 24), RowPasses(1, 19, 20, SCATTER_ADD + SORTED_INDEX_PUT), kept_rows=2),
    unpermute=MoveCost(RowPasses(1, 6, 6), RowPasses(0, 4, 4)),
    unordered_rows="activations",
)
# distributed/deepep/deepep.py, same release, behind DeepEP's dispatch: masks pick the rows of the rank's
# experts (see `MASKED_MAP`), and one index_select copies them. Back: a product with the scores in the
# activations' type and a scatter that adds into zeros. Backward gathers, multiplies by the scores, makes the
# scores' gradient of a product and its sum, and adds rows by index into zeros. Qwen3, DeepSeek-V3 and gpt-oss
# multiply behind the experts (models/qwen3/__init__.py `score_before_experts=False`), as here; Llama 4 before
# them, at the same passes.
_TORCHTITAN_DEEPEP_KERNELS = ExpertKernelSet(
    "torchtitan, DeepEP",
    permute=MoveCost(RowPasses(0, 2, 1), RowPasses(1, 0, 2, INDEX_ADD)),
    unpermute=MoveCost(RowPasses(1, 2, 4, SCATTER_ADD), RowPasses(0, 8, 5), kept_rows=1),
    unordered_rows="activations",
)
# `grouped_expert_forward_packed`, R rows of E experts, padded to p R: a gather, zeros of p R, every expert's
# rows copied into them. Back: every expert's copied into zeros of R, a product with the scores, zeros and a
# sum by indices. Backward of a copy into a slice clones the gradient of the full tensor, once per expert,
# takes the slice of it and leaves zeros there. Backward of reading a slice writes zeros of the full tensor,
# which are added up: per expert 2 R and 4 p R on the way back, 2 p R and 4 R before.
_KEMPNERFORGE_KERNELS = ExpertKernelSet(
    "kempnerforge",
    permute=MoveCost(
        RowPasses(0, 4, 20, padded_rows=1, launches_per_expert=1),
        RowPasses(
            1, 6, 8, SORTED_INDEX_PUT, rows_per_expert=4, padded_rows_per_expert=2, launches_per_expert=8
        ),
    ),
    unpermute=MoveCost(
        RowPasses(1, 5, 5, SCATTER_ADD, launches_per_expert=1),
        RowPasses(0, 15, 6, rows_per_expert=2, padded_rows_per_expert=4, launches_per_expert=9),
        kept_rows=1,
    ),
    unordered_rows="activations",
)

TORCHTITAN = ExpertLibrary(
    name="torchtitan",
    title="torchtitan",
    owner="torchtitan",
    kernels=_TORCHTITAN_KERNELS,
    dispatch="rows",
    splits_with_products=True,
    separates_gate=True,
    balances_in_turn=True,  # `_debug_force_load_balance_routing`
)
TORCHTITAN_DEEPEP = replace(TORCHTITAN, kernels=_TORCHTITAN_DEEPEP_KERNELS)
# components/moe/layers.py of 0.2.0: `GroupedExpertsDeepEP`, `FakeBalancedGate`. Scores are a factor in the
# compiled kernel of the activation.
AUTOMODEL = ExpertLibrary(
    name="automodel",
    title="NeMo AutoModel",
    owner="NeMo AutoModel",
    kernels=TRANSFORMER_ENGINE_KERNELS,
    dispatch="rows",
    scales_biases=True,
    balances_in_turn=True,
    balances_without_gate=True,
)
KEMPNERFORGE = ExpertLibrary(
    name="kempnerforge",
    title="KempnerForge",
    owner="KempnerForge",
    kernels=_KEMPNERFORGE_KERNELS,
    pads_to_fullest=True,
    waits_for_counts=True,
)


_SPLIT_BACKWARDS = ("interleaved-zero-bubble", "zbv-zero-bubble", "dualpipe-v")


def check_torch_split(model: ModelSpec, training: TrainingConfig, parallelism: ParallelismConfig) -> None:
    """Raises InputError for parallelism that torch refuses, and NotSimulatedError for checkpoints of which it
    recomputes a block once per parameter.
    """
    _check_async(training, parallelism)
    _check_split_backward(training, parallelism)
    if parallelism.pipeline > 1 and model.is_tied:
        raise InputError(
            f"parallelism.pipeline: found {parallelism.pipeline}, but '{model.name}' ties its head to "
            "its embedding, and torchtitan's pipelines share no weight; expected pipeline = 1, or "
            "strategy 'megatron'"
        )


def _check_async(training: TrainingConfig, parallelism: ParallelismConfig) -> None:
    if not parallelism.async_tensor:
        return
    if parallelism.tensor == 1:
        raise InputError("parallelism.async_tensor: has no effect with tensor = 1; expected tensor above 1")
    if not training.compile:
        raise InputError(
            "parallelism.async_tensor: torch.compile makes it, and training.compile is false; expected "
            "training.compile = true"
        )
    if not parallelism.sequence_parallel:
        raise InputError(
            "parallelism.async_tensor: torch.compile fuses all-gathers and reduce-scatters with products, "
            "not all-reduces; expected sequence_parallel = true"
        )


def _check_split_backward(training: TrainingConfig, parallelism: ParallelismConfig) -> None:
    """Each parameter's gradient is a graph task of its own where a schedule splits backward
    (`stage_backward_weight` of torch 2.13 distributed/pipelining/_backward.py), and a checkpoint recomputes
    per graph task (utils/checkpoint.py), or, with selective contexts, raises at the second."""
    policies = {training.activation_checkpointing, *training.block_checkpointing} - {"none"}
    if parallelism.pipeline == 1 or parallelism.schedule not in _SPLIT_BACKWARDS or not policies:
        return
    what = (
        f"training.activation_checkpointing: found '{min(policies)}' with schedule '{parallelism.schedule}'"
    )
    if "selective-op" in policies:
        raise InputError(
            f"{what}, whose backward is in two parts; torch takes selective checkpoints through one backward "
            "only; expected 'none'"
        )
    raise NotSimulatedError(
        f"{what}, whose backward is in two parts: torch recomputes a block for each of its parameters, which "
        "zsim does not simulate; expected 'none', or schedule 'interleaved-1f1b'"
    )


def context_style(requested: ParallelismTable) -> ModelParallelStyle:
    """Ulysses where ranks exchange heads for tokens, and torchtitan's parallelism otherwise."""
    return ULYSSES if requested.context > 1 and requested.context_method == "all-to-all" else TORCH


UNSHARDED = "DDP"  # what any framework is on one GPU, where nothing is sharded
