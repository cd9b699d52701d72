"""The recorded configurations: every setting that changes DeepSpeed's communication, alone and combined with
the settings it interacts with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from validation.record.cases import Recording

SMALL_BUCKETS = {"reduce_bucket_size": 200_000}
STAGE_3 = {
    "stage": 3,
    **SMALL_BUCKETS,
    "stage3_prefetch_bucket_size": 50_000,
    "stage3_param_persistence_threshold": 1_000,
    "stage3_max_reuse_distance": 100_000,
}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
OPTIMIZER_ON_CPU = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
PARAMETERS_ON_CPU = {"offload_param": {"device": "cpu", "pin_memory": False}}


def configuration(
    name: str,
    zero: dict[str, Any],
    *,
    accumulation_steps: int = 1,
    checkpointing: bool = False,
    gradient_clipping: float = 0.0,
    min_ranks: int = 2,
    zero_init: bool = True,
    **top: Any,
) -> Recording:
    """A user's DeepSpeed JSON with the keys `zero` and `top`, and the equivalent experiment; `zero_init`:
    whether it matters not that the recorder's models are built whole."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation_steps,
        "gradient_clipping": gradient_clipping,
        "zero_optimization": zero,
        **top,
    }
    return Recording(
        name,
        "deepspeed",
        {"config": config},
        {"kind": "deepspeed", "config": config, **({} if zero_init else {"zero_init": False})},
        min_ranks=min_ranks,
        accumulation_steps=accumulation_steps,
        checkpointing=checkpointing,
        gradient_clipping=gradient_clipping,
        precision="bf16" if "bf16" in top else "fp32",
    )


def configurations() -> Iterator[tuple[Recording, str]]:
    """(configuration, model), each name once per model."""
    for model in ("even", "uneven"):
        for one in (*stages(), *stage_3()):
            yield one, model
    for one in (*low_precision(), *offloaded()):
        yield one, "even"
    for one in muon():
        yield one, "uneven"


def stages() -> Iterator[Recording]:
    """Stages 0 to 2, and their buckets."""
    yield configuration("stage0", {"stage": 0})
    yield configuration("stage0-clip", {"stage": 0}, gradient_clipping=1.0)
    yield configuration("stage0-prescale", {"stage": 0}, prescale_gradients=True)
    for stage in (1, 2):
        zero = {"stage": stage, **SMALL_BUCKETS}
        overlapped = {**zero, "overlap_comm": True}
        yield configuration(f"stage{stage}", zero)
        yield configuration(f"stage{stage}-default", {"stage": stage})
        yield configuration(f"stage{stage}-tiny-bucket", {"stage": stage, "reduce_bucket_size": 20_000})
        yield configuration(f"stage{stage}-clip", zero, gradient_clipping=1.0)
        yield configuration(f"stage{stage}-checkpointing", zero, checkpointing=True)
        yield configuration(f"stage{stage}-overlap", overlapped)
        yield configuration(f"stage{stage}-accumulate", zero, accumulation_steps=2)
        yield configuration(f"stage{stage}-overlap-accumulate", overlapped, accumulation_steps=3)
        owners = {**zero, "use_multi_rank_bucket_allreduce": False}
        yield configuration(f"stage{stage}-owners", owners)
        yield configuration(f"stage{stage}-owners-overlap", {**owners, "overlap_comm": True})
        yield configuration(f"stage{stage}-round-robin", {**zero, "round_robin_gradients": True})
        yield configuration(f"stage{stage}-owners-round-robin", {**owners, "round_robin_gradients": True})
        yield configuration(f"stage{stage}-all-reduce", {**zero, "reduce_scatter": False})
        yield configuration(f"stage{stage}-loose", {**zero, "contiguous_gradients": False})


def stage_3() -> Iterator[Recording]:
    """Stage 3: prefetching, keeping parameters, reducing."""
    yield configuration("stage3", STAGE_3)
    yield configuration("stage3-default", {"stage": 3})
    yield configuration("stage3-accumulate", STAGE_3, accumulation_steps=2)
    yield configuration("stage3-checkpointing", STAGE_3, checkpointing=True)
    yield configuration("stage3-checkpointing-accumulate", STAGE_3, checkpointing=True, accumulation_steps=3)
    yield configuration("stage3-clip", STAGE_3, gradient_clipping=1.0)
    changes: dict[str, dict[str, Any]] = {
        "no-reuse": {"stage3_max_reuse_distance": 0},
        "one-by-one": {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0},
        "short-prefetch": {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 10_000},
        "live": {"stage3_max_reuse_distance": 50_000, "stage3_max_live_parameters": 300_000},
        "few-live": {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 100_000},
        "sequential": {"stage3_allgather_sequential": True},
        "fetch-by-all-reduce": {"stage3_use_all_reduce_for_fetch_params": True},
        "nothing-persistent": {"stage3_param_persistence_threshold": 0},
        "much-persistent": {"stage3_param_persistence_threshold": 40_000},
        "persistent-limit": {
            "stage3_param_persistence_threshold": 40_000,
            "stage3_model_persistence_threshold": 70_000,
        },
        "tiny-bucket": {"reduce_bucket_size": 20_000},
        "all-reduce": {"reduce_scatter": False},
        "loose": {"contiguous_gradients": False},
        "no-overlap": {"overlap_comm": False},
        "sub-groups": {"sub_group_size": 100_000},
        "sanity": {"enable_sanity_checks": True},
        "leaf-mlp": {"leaf_module": {"name_suffixes": ["mlp"]}},
        "plain-linear": {"memory_efficient_linear": False},
    }
    for name, change in changes.items():
        yield configuration(f"stage3-{name}", {**STAGE_3, **change})
    yield configuration(
        "stage3-short-prefetch-checkpointing", {**STAGE_3, **changes["short-prefetch"]}, checkpointing=True
    )
    attention = {"leaf_module": {"name_suffixes": ["self_attn"]}}
    yield configuration("stage3-leaf-attention", {**STAGE_3, **attention}, checkpointing=True)
    yield configuration("stage3-hpz", {**STAGE_3, "zero_hpz_partition_size": 2}, min_ranks=4)


def low_precision() -> Iterator[Recording]:
    """bf16 (fp16 does not run on this accelerator), and the dtypes in which gradients are accumulated and
    communicated."""
    for stage in (0, 1, 2, 3):
        zero = STAGE_3 if stage == 3 else {"stage": stage, **(SMALL_BUCKETS if stage else {})}
        yield configuration(f"stage{stage}-bf16", zero, **BF16)
        yield configuration(f"stage{stage}-bf16-accumulate", zero, accumulation_steps=2, **BF16)
        yield configuration(f"stage{stage}-bf16-clip", zero, gradient_clipping=1.0, **BF16)
        yield configuration(f"stage{stage}-fp32-sent", zero, communication_data_type="fp32", **BF16)
        if stage:
            summed: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}, **BF16}
            yield configuration(f"stage{stage}-fp32-summed", zero, accumulation_steps=2, **summed)


def offloaded() -> Iterator[Recording]:
    """Optimizer states and parameters in host memory."""
    for stage in (1, 2, 3):
        zero = STAGE_3 if stage == 3 else {"stage": stage, **SMALL_BUCKETS}
        offload = {**zero, **OPTIMIZER_ON_CPU}
        yield configuration(f"stage{stage}-offload", offload)
        yield configuration(f"stage{stage}-offload-clip", offload, gradient_clipping=1.0)
        yield configuration(f"stage{stage}-offload-accumulate", offload, accumulation_steps=2)
        yield configuration(f"stage{stage}-offload-bf16", offload, accumulation_steps=2, **BF16)
    every = {**STAGE_3, **OPTIMIZER_ON_CPU, **PARAMETERS_ON_CPU}
    yield configuration("stage3-offload-all", every)
    yield configuration("stage3-offload-all-accumulate", every, accumulation_steps=2)
    yield configuration("stage3-offload-parameters", {**STAGE_3, **PARAMETERS_ON_CPU})
    yield configuration(
        "stage3-offload-sub-groups", {**STAGE_3, **OPTIMIZER_ON_CPU, "sub_group_size": 100_000}
    )
    hpz = {**STAGE_3, "zero_hpz_partition_size": 2}
    yield configuration("stage3-hpz-offload-parameters", {**hpz, **PARAMETERS_ON_CPU}, min_ranks=4)
    yield configuration(
        "stage3-hpz-offload-all", {**hpz, **OPTIMIZER_ON_CPU, **PARAMETERS_ON_CPU}, min_ranks=4,
        accumulation_steps=2,
    )  # fmt: skip


def muon() -> Iterator[Recording]:
    """DeepSpeed's own Muon, of a model whose matrices the ranks do not share evenly; it sorts whole ones."""
    params = {"lr": 1e-3, "torch_adam": True}  # what updates the others sends nothing
    own: dict[str, Any] = {"optimizer": {"type": "Muon", "params": params}}
    for stage in (1, 2):
        zero = {"stage": stage, **SMALL_BUCKETS}
        yield configuration(f"stage{stage}-muon", zero, **own)
        yield configuration(f"stage{stage}-muon-bf16", zero, accumulation_steps=2, **own, **BF16)
    zero = {**STAGE_3, "reduce_scatter": False}
    own["zero_init"] = False
    yield configuration("stage3-muon", zero, **own)
    yield configuration("stage3-muon-bf16", zero, accumulation_steps=2, **own, **BF16)
    yield configuration("stage3-muon-sub-groups", {**zero, "sub_group_size": 100_000}, **own)
