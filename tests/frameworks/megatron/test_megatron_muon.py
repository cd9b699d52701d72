"""Megatron's Muon against Megatron-Core itself: who owns what, the products and collectives of a step, and
the bytes of states. Recorded figures are of `python -m validation.megatron_muon FOLDER LATER` with
Megatron-Core 0.16.1 and Emerging-Optimizers 0.1.0, layouts of Megatron-Core 0.18.2."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import zsim
from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.megatron.muon import (
    MuonMatrix,
    MuonTensor,
    assign_by_size,
    make_whole_tensor_layout,
    muon_calls,
    muon_flops,
    transient_bytes,
)
from zsim.frameworks.megatron.settings.muon import MuonOrthogonalization
from zsim.plan.ops import Collective, Kernels, Plan

# Two layers of 64: queries and output 64 x 64, keys and values 32 x 64, gate and up 256 x 64, down 64 x 128;
# five norms, the table and the head 512 x 64.
DENSE = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": False,
}  # fmt: skip
# Four experts: 128 x 64 and 64 x 64 each, and a router of 4 x 64.
MIXTURE = {**DENSE, "model_type": "mixtral", "intermediate_size": 64, "num_local_experts": 4,
           "num_experts_per_tok": 2}  # fmt: skip
MATRICES = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 256 * 64 + 64 * 128)
OTHERS = 5 * 64 + 2 * 512 * 64


def experiment(gpus: int, strategy: dict[str, Any], **more: Any) -> zsim.Experiment:
    training = {"sequence_length": 64, "micro_batch_size": 1, "optimizer": "muon", "precision": "bf16"}
    return zsim.Experiment(
        model=more.pop("model", DENSE), cluster="dgx-h100", gpus=gpus,
        training={**training, **more.pop("training", {})},
        strategy={"kind": "megatron", **strategy}, parallelism=more,
    )  # fmt: skip


def products(plan: Plan) -> Counter[str]:
    """Products of the update by m x k x n, as the recorder counts them."""
    found: Counter[str] = Counter()
    for op in plan.programs[0].ops:
        if op.name.startswith("muon ") and isinstance(op.work, Kernels):
            for kernel in op.work.kernels:
                if kernel.kind == "gemm":
                    m, n, k = kernel.shape
                    found[f"{m}x{k}x{n}"] += kernel.launches
    return found


def calls(plan: Plan) -> Counter[str]:
    """Collectives of the update by group, kind and elements of the whole."""
    size = {"fp32": 4, "bf16": 2}
    found: Counter[str] = Counter()
    for op in plan.programs[0].ops:
        is_own = " of model" in op.name or op.name.startswith("all_gather parameters")
        if isinstance(op.work, Collective) and (is_own or "norm" in op.name):
            numel = op.work.bytes // size[op.work.dtype]
            found[f"{op.work.kind} of {plan.groups[op.work.group].size}: {numel} {op.work.dtype}"] += 1
    return found


def states(plan: Plan) -> int:
    return sum(one.bytes for one in plan.programs[0].resident if one.category == "optimizer_states")


# (GPUs, tensor-parallel ranks, layer-wise, mode) -> the rank with most FLOPs, and most bytes of a rank
RECORDED: list[tuple[int, int, bool, str, dict[str, int], dict[str, int], int]] = [
    (1, 1, False, "blockwise",
     {"64x64x64": 80, "32x64x32": 20, "32x32x32": 20, "32x32x64": 20, "64x256x64": 10, "64x64x256": 10,
      "64x128x64": 10, "64x64x128": 10}, {}, 558336 + 821760),
    (2, 1, True, "blockwise",
     {"64x64x64": 30, "32x64x32": 10, "32x32x32": 10, "32x32x64": 10, "64x128x64": 5, "64x64x128": 5,
      "64x256x64": 10, "64x64x256": 10},
     {"all_reduce of 2: 1 fp32": 1, "all_gather of 2: 139584 bf16": 1}, 360960 + 623616),
    (4, 1, True, "blockwise", {"64x256x64": 10, "64x64x64": 10, "64x64x256": 10},
     {"all_reduce of 4: 1 fp32": 1, "all_gather of 4: 139584 bf16": 1}, 180480 + 311808),
    (2, 2, False, "blockwise",
     {"32x64x32": 20, "32x32x32": 20, "32x32x64": 20, "16x64x16": 20, "16x16x16": 20, "16x16x64": 20,
      "64x128x64": 10, "64x64x64": 40, "64x64x128": 10},
     {"all_reduce of 2: 1 fp32": 1}, 279808 + 412160),
    (2, 2, False, "duplicated",
     {"64x64x64": 80, "32x64x32": 20, "32x32x32": 20, "32x32x64": 20, "64x256x64": 10, "64x64x256": 10,
      "64x128x64": 10, "64x64x128": 10},
     {"all_reduce of 2: 1 fp32": 1, "all_gather of 2: 4096 fp32": 4, "all_gather of 2: 2048 fp32": 4,
      "all_gather of 2: 16384 fp32": 2, "all_gather of 2: 8192 fp32": 2}, 279808 + 412160),
    (2, 2, False, "distributed",
     {"64x32x64": 20, "64x64x64": 80, "64x64x32": 20, "64x16x64": 20, "64x64x16": 20, "64x128x64": 10,
      "64x64x128": 10},
     {"all_reduce of 2: 1 fp32": 13, "all_reduce of 2: 4096 bf16": 60}, 279808 + 412160),
    (4, 2, True, "distributed",
     {"64x32x64": 5, "64x64x64": 40, "64x64x32": 5, "64x16x64": 10, "64x64x16": 10, "64x128x64": 10,
      "64x64x128": 10},
     {"all_reduce of 4: 1 fp32": 1, "all_reduce of 2: 1 fp32": 6, "all_reduce of 2: 4096 bf16": 30,
      "all_gather of 2: 69952 bf16": 1}, 180736 + 312320),
]  # fmt: skip


@pytest.mark.parametrize(("gpus", "tensor", "layer_wise", "mode", "multiplied", "called", "held"), RECORDED)
def test_a_step_is_what_megatron_core_runs(
    gpus: int,
    tensor: int,
    layer_wise: bool,
    mode: str,
    multiplied: dict[str, int],
    called: dict[str, int],
    held: int,
) -> None:
    """Masters and states together are 4 + 4 bytes of a matrix's element, 4 + 8 of all else's."""
    strategy = {"layer_wise_optimizer": layer_wise, "muon_tp_mode": mode}
    plan = zsim.make_plan(experiment(gpus, strategy, tensor=tensor))
    assert products(plan) == multiplied
    assert calls(plan) == called
    assert states(plan) == held


def test_every_expert_and_router_is_a_matrix() -> None:
    """One rank's 4 experts in 2 layers, attention as before, and two routers of 4 x 64."""
    plan = zsim.make_plan(experiment(2, {}, model=MIXTURE))
    assert products(plan) == {
        "64x64x64": 220, "32x64x32": 20, "32x32x32": 20, "32x32x64": 20, "4x64x4": 10, "4x4x4": 10,
        "4x4x64": 10, "64x128x64": 40, "64x64x128": 40,
    }  # fmt: skip
    assert states(plan) == 756992 + 1020416


def test_experts_are_owned_by_the_ranks_that_have_them() -> None:
    """Four ranks, two of each expert: everything else is gathered over four, a rank's experts over two. The
    fullest rank has 360,960 + 623,616 bytes; zsim takes the fullest of dense tensors and of experts."""
    plan = zsim.make_plan(experiment(4, {"layer_wise_optimizer": True}, model=MIXTURE, expert=2))
    assert calls(plan) == {
        "all_reduce of 4: 1 fp32": 1, "all_gather of 4: 90944 bf16": 1, "all_gather of 2: 49152 bf16": 1,
    }  # fmt: skip
    assert states(plan) == 360960 + 623616


def test_without_layers_of_owners_every_rank_has_all_states() -> None:
    found = states(zsim.make_plan(experiment(4, {})))
    assert found == 8 * MATRICES + 12 * OTHERS
    lion = {"version": "0.17.1", "muon_scalar_optimizer": "lion"}
    assert states(zsim.make_plan(experiment(4, lion))) == 8 * MATRICES + 8 * OTHERS


def tensors(numels: tuple[int, ...]) -> dict[str, list[MuonTensor]]:
    named = {str(number): numel for number, numel in enumerate(numels)}
    return {name: [MuonTensor(name, numel, MuonMatrix(1, numel))] for name, numel in named.items()}


SIZES = (1000, 64, 300, 4096, 100, 8192, 64, 640)


@pytest.mark.parametrize(
    ("numels", "bucket", "ranks", "end", "places"),
    [
        (SIZES, None, 2, 16384, [(12288, 13288), (14464, 14528), (13952, 14252), (8192, 12288),
                                 (14272, 14372), (0, 8192), (14400, 14464), (13312, 13952)]),
        (SIZES * 2, 6000, 4, 32768, [
            (28672, 29672), (30848, 30912), (30336, 30636), (24576, 28672), (30656, 30756), (8192, 16384),
            (22656, 22720), (29696, 30336), (20480, 21480), (30784, 30848), (22144, 22444), (16384, 20480),
            (22464, 22564), (0, 8192), (22592, 22656), (21504, 22144)]),
        ((4096, 4096, 4096), 4096, 4, 16384, [(8192, 12288), (4096, 8192), (0, 4096)]),
    ],
)  # fmt: skip
def test_buckets_of_whole_matrices_are_laid_out_as_by_megatron_core(
    numels: tuple[int, ...], bucket: int | None, ranks: int, end: int, places: list[tuple[int, int]]
) -> None:
    """One bucket each: the second fills up to 0.9 of what its largest takes on four ranks."""
    buffer, owned = make_whole_tensor_layout(tensors(numels), bucket, ranks, 0)
    assert [(one.start, one.end) for one in buffer.buckets] == [(0, end)]
    assert [buffer.ranges[str(number)] for number in range(len(numels))] == places
    shard = end // ranks
    assert [{int(one.name) for one in rank} for rank in owned] == [
        {number for number, (start, _) in enumerate(places) if start // shard == rank}
        for rank in range(ranks)
    ]


def test_a_bucket_is_closed_when_it_is_full() -> None:
    """In the order of backward: 3 and 2 (1,100 elements are 1,000 or more, and 0.9 of 2 x 600), then 1, 0."""
    buffer, _ = make_whole_tensor_layout(tensors((700, 500, 500, 600)), 1000, 2, 5)
    assert [(one.number, one.names, one.numel) for one in buffer.buckets] == [
        (5, ("3", "2"), 2 * 640), (6, ("1", "0"), 2 * 704),
    ]  # fmt: skip


def test_owners_go_up_and_down_by_size() -> None:
    """Megatron's example: ten tensors on four ranks, from the smallest."""
    every = [one for found in tensors(tuple(range(1, 11))).values() for one in found]
    owned = [[int(one.name) for one in rank] for rank in assign_by_size(every, 4)]
    assert owned == [[0, 7, 8], [1, 6, 9], [2, 5], [3, 4]]


def test_from_0_18_on_matrices_and_all_else_have_buffers_of_their_own() -> None:
    """Two ranks. Matrices, the largest first: 256 x 64 twice, one each; 128 x 64 (queries, keys, values),
    64 x 128, 64 x 64, twice each: 36,864 elements on a rank. All else is cut: 33,088 rounded up to a multiple
    of 64 behind every norm; 32,768 elements are the head's."""
    strategy = {"version": "0.18.2", "distributed_optimizer": True}
    plan = zsim.make_plan(experiment(2, strategy))
    sizes = {
        (op.work.kind, op.work.bytes)
        for op in plan.programs[0].ops
        if isinstance(op.work, Collective) and op.work.bytes > 4
    }
    rest, matrices = 5 * 64 + 2 * 512 * 64, 2 * 36864
    padded = -(-rest // 128) * 128
    assert sizes == {("reduce_scatter", 4 * padded), ("reduce_scatter", 4 * matrices),
                     ("all_gather", 2 * padded), ("all_gather", 2 * matrices)}  # fmt: skip
    assert states(plan) == 8 * 36864 + 12 * (padded // 2)
    norms = [op for op in plan.programs[0].ops if op.name == "all_reduce gradient norm"]
    assert len(norms) == 2


def test_from_0_18_on_experts_matrices_are_laid_out_for_the_ranks_that_have_them() -> None:
    """Four ranks, two of each expert. Of dense matrices the fullest rank has one of 128 x 64; a rank's two
    experts of two layers, 12,288 elements each, are shared by two; a quarter of 65,856 rounded up is cut."""
    strategy = {"version": "0.18.2", "distributed_optimizer": True}
    plan = zsim.make_plan(experiment(4, strategy, model=MIXTURE, expert=2))
    assert states(plan) == 8 * (8192 + 24576) + 12 * (65920 // 4)


def test_0_17_gathers_buckets_from_their_owners_during_forward() -> None:
    strategy = {
        "version": "0.17.1", "layer_wise_optimizer": True, "overlap_grad_reduce": True,
        "overlap_param_gather": True, "bucket_size": 40_000,
    }  # fmt: skip
    plan = zsim.make_plan(experiment(2, strategy))
    gathers = [op for op in plan.programs[0].ops if op.name.startswith("all_gather parameters")]
    assert {op.phase for op in gathers} == {"forward"}
    reduced = [op for op in plan.programs[0].ops if op.name.startswith("all_reduce bucket")]
    assert len(gathers) == len(reduced) > 2
    both = [sum(op.work.bytes for op in ops if isinstance(op.work, Collective)) for ops in (gathers, reduced)]
    assert both == [2 * (MATRICES + OTHERS), 4 * (MATRICES + OTHERS)]


def test_work_of_one_matrix() -> None:
    """256 x 1,024 in five rounds: 5 (4 m^2 n + 2 m^3) FLOPs; cut along its columns over 4 ranks, together: X
    X^T and B X are a quarter each, the square is whole, and X X^T of 256^2 bf16 is summed five times. Bytes
    around: decay 8, momentum 12, norm and division 12, casts 12, two scales 16, the sum 12."""
    whole = MuonMatrix(256, 1024, sharded_dimension=1)
    assert muon_flops(whole, MuonOrthogonalization(), 4) == 5 * (4 * 256**2 * 1024 + 2 * 256**3)
    calls = muon_calls(whole, MuonOrthogonalization(), 4)
    moved = sum(one.hbm_bytes for call in calls for one in call.kernels if one.kind == "optimizer")
    assert moved == 256 * 1024 * 72
    part, together = MuonMatrix(256, 256, sharded_dimension=1), MuonOrthogonalization("distributed")
    assert muon_flops(part, together, 4) == 5 * (4 * 256**2 * 256 + 2 * 256**3)
    sums = [call.bytes for call in muon_calls(part, together, 4) if call.collective]
    assert sums == [4, *[2 * 256 * 256] * 5]
    in_tf32 = [
        one for call in muon_calls(whole, MuonOrthogonalization(dtype="tf32"), 1) for one in call.kernels
    ]
    assert {one.dtype for one in in_tf32 if one.kind == "gemm"} == {"tf32"}
    assert sum(one.hbm_bytes for one in in_tf32 if one.kind == "optimizer") == 256 * 1024 * 60


def test_distributed_ranks_multiply_along_the_side_that_is_whole() -> None:
    """Keys of 64 x 1,024 cut along their rows: X X^T is 1,024 x 1,024 though 64 would do."""
    calls = list(
        muon_calls(MuonMatrix(64, 1024, sharded_dimension=0), MuonOrthogonalization("distributed"), 2)
    )
    assert max(call.bytes for call in calls) == 2 * 1024 * 1024


def test_temporaries_of_one_matrix() -> None:
    """Alone 12 bytes an element; with Nesterov's sum 16; gathered from 4 ranks 8 of the whole, and 6; of
    parts of 2 : 1 : 1, which are copied first, 4 of all and 12 of the half, then 12 of all, joined."""
    numel = 64 * 32
    assert transient_bytes(MuonMatrix(64, 32), MuonOrthogonalization(), 1) == 12 * numel
    assert transient_bytes(MuonMatrix(64, 32), MuonOrthogonalization(nesterov=True), 1) == 16 * numel
    assert (
        transient_bytes(MuonMatrix(64, 32, sharded_dimension=0), MuonOrthogonalization("duplicated"), 4)
        == 14 * 4 * numel
    )
    assert transient_bytes(MuonMatrix(64, 32, (32, 16, 16)), MuonOrthogonalization(), 1) == 12 * numel


@pytest.mark.parametrize(
    ("strategy", "more", "sentence"),
    [
        ({"version": "0.15.3"}, {}, "has 'muon' from 0.16 on; found strategy.version '0.15.3'"),
        ({"version": "0.17.1", "distributed_optimizer": True}, {}, "0.17.1 refuses 'muon' with the distr"),
        ({"overlap_grad_reduce": True}, {}, "overlap_grad_reduce: Megatron-Core 0.16.1 refuses it"),
        ({"version": "0.17.1", "overlap_grad_reduce": True}, {}, "expected false, strategy.layer_wise_opt"),
        ({}, {"training": {"precision": "fp16"}}, "refuses it with fp16"),
        ({"muon_num_ns_steps": 6}, {}, "takes multiples of its 5 coefficients"),
        ({"muon_scalar_optimizer": "lion"}, {}, "'lion', which Megatron-Core has from 0.17 on"),
        ({"muon_nesterov": True}, {"training": {"optimizer": "adamw"}}, "muon_nesterov: belongs to training"),
        ({"engine": "nanotron"}, {}, "'muon' belongs to engine 'megatron'"),
    ],
)
def test_what_megatron_refuses_is_refused(
    strategy: dict[str, Any], more: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        zsim.make_plan(experiment(2, strategy, **more))


def test_marks_of_latent_attention_are_not_guessed() -> None:
    with pytest.raises(NotSimulatedError, match="which dimension is cut is not known of multi-head latent"):
        zsim.make_plan(
            experiment(
                2, {"muon_tp_mode": "duplicated"}, model="deepseek-v2-lite", tensor=2, sequence_parallel=True
            )
        )
