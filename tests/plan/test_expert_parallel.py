"""Expert parallelism: groups, bytes by formula, the experts' own gradients, folding."""

from __future__ import annotations

from collections import Counter
from math import comb
from typing import Any

import pytest

from zsim.cost.kernels.kernel import total_flops
from zsim.cost.kernels.moved_rows import INDEX_ADD, SCATTER_ADD, RowPasses
from zsim.cost.kernels.shapes import BatchShape, WorkOptions
from zsim.engine.simulate import simulate_job
from zsim.explain.report_of import report_of
from zsim.plan.checks import check_plan
from zsim.plan.make import make_plan
from zsim.plan.ops import Collective, Kernels, Plan
from zsim.plan.parallel.experts import expand_experts
from zsim.specs.experiment.job import Job, parallelism_label
from zsim.specs.experiment.resolve import resolve
from zsim.specs.experiment.tables import Experiment
from zsim.specs.model.spec import ExchangeLibrary
from zsim.specs.strategy.experts import expected_partitions, partitions_in_turn

LAYERS, HIDDEN, WIDTH, EXPERTS, TOP_K, TOKENS = 2, 256, 64, 16, 4, 512
TINY: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": HIDDEN, "intermediate_size": 512,
    "moe_intermediate_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 1024, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "tie_word_embeddings": False,
}  # fmt: skip
MEGATRON = {"kind": "megatron", "moe_grouped_gemm": True, "moe_permute_fusion": True}
SHARDED = {**MEGATRON, "distributed_optimizer": True}
TITAN = {"kind": "fsdp2", "wrapping": "torchtitan"}
EXPERT_WEIGHTS = LAYERS * EXPERTS * 3 * HIDDEN * WIDTH


def job_of(
    strategy: dict[str, Any],
    parallelism: dict[str, Any],
    gpus: int = 16,
    model: dict[str, Any] = TINY,
    **training: Any,
) -> Job:
    training = {"sequence_length": TOKENS, **training}
    parallelism = {"expert_imbalance": 1.0, **parallelism}
    data: dict[str, Any] = {"model": model, "cluster": "dgx-h100", "gpus": gpus, "training": training}
    return resolve(Experiment(**data, strategy=strategy, parallelism=parallelism))


def calls(plan: Plan, phase: str = "forward", *groups: str) -> Counter[tuple[str, str, int, str]]:
    """Kind, group, bytes and type of the calls of a phase in groups of experts."""
    works = [op.work for op in plan.programs[0].ops if op.phase == phase and isinstance(op.work, Collective)]
    chosen = [work for work in works if work.group in groups or (not groups and "expert" in work.group)]
    return Counter((work.kind, work.group, work.bytes, work.dtype) for work in chosen)


# -- ranks -----------------------------------------------------------------------------------------------


def test_megatrons_second_generator_spans_tensor_context_and_a_part_of_data() -> None:
    """t = 2, c = 2, D = 2, p = 2, e = 4: the example of parallel_state.py. Experts' ranks are one replica's
    tensor and context ranks; replicas of an expert are 4 apart."""
    asked = {
        "tensor": 2, "sequence_parallel": True, "context": 2, "pipeline": 2, "expert": 4, "expert_tensor": 1,
        "dispatcher": "all-to-all",
    }  # fmt: skip
    plan = make_plan(job_of(SHARDED, asked))
    assert plan.groups["expert"].members.tolist() == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
    ]
    assert plan.groups["expert_data"].members[0].tolist() == [0, 4]


def test_experts_tensor_parallel_ranks_are_adjacent() -> None:
    """Left out, an expert's products are on as many ranks as tensor parallelism has."""
    job = job_of(SHARDED, {"tensor": 2, "sequence_parallel": True, "expert": 4, "dispatcher": "all-to-all"})
    assert (job.parallelism.experts.tensor, job.parallelism.experts.ranks) == (2, 4)
    groups = make_plan(job).groups
    assert groups["expert_tensor"].members[0].tolist() == [0, 1]
    assert groups["expert"].members[:2].tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert groups["expert_model"].members[0].tolist() == list(range(8))


# -- bytes -----------------------------------------------------------------------------------------------


def test_an_all_to_all_sends_every_row_there_and_back() -> None:
    """N k rows of h elements in bf16 and their N k scores, in each direction; the counts of 8 x 16
    experts."""
    plan = make_plan(job_of(SHARDED, {"expert": 8, "dispatcher": "all-to-all"}))
    rows, scores = TOKENS * TOP_K * HIDDEN * 2, TOKENS * TOP_K * 2
    assert calls(plan) == {
        ("all_gather", "expert", 8 * EXPERTS * 8, "int64"): LAYERS,
        ("all_to_all", "expert", rows, "bf16"): 2 * LAYERS,
        ("all_to_all", "expert", scores, "bf16"): LAYERS,
    }
    assert calls(plan, "backward", "expert") == {
        ("all_to_all", "expert", rows, "bf16"): 2 * LAYERS,
        ("all_to_all", "expert", scores, "bf16"): LAYERS,
    }


def test_full_recomputation_sends_the_rows_there_and_back_once_more() -> None:
    """Their sum keeps indices, so that the way back is run again, too."""
    plan = make_plan(job_of(TITAN, {"expert": 8}, activation_checkpointing="full"))
    rows = TOKENS * TOP_K * HIDDEN * 2
    assert calls(plan, "recompute", "expert")["all_to_all", "expert", rows, "bf16"] == 2 * LAYERS


GATHERED = {"expert": 8, "dispatcher": "all-gather"}


def test_megatrons_all_gathers_bring_the_tokens_of_all_ranks() -> None:
    """Map (a byte), scores and tokens of 8 ranks; the sum goes back in the type of the scores."""
    plan = make_plan(job_of({**SHARDED, "moe_router_dtype": "fp32"}, GATHERED))
    everyone = 8 * TOKENS
    assert calls(plan) == {
        ("all_gather", "expert", everyone * EXPERTS, "bool"): LAYERS,
        ("all_gather", "expert", everyone * EXPERTS * 4, "fp32"): LAYERS,
        ("all_gather", "expert", everyone * HIDDEN * 2, "bf16"): LAYERS,
        ("reduce_scatter", "expert", everyone * HIDDEN * 4, "fp32"): LAYERS,
    }


def test_ranks_that_share_an_experts_products_gather_its_rows() -> None:
    """N = 256 with two tensor-parallel ranks; N k rows of each are gathered, and their sums scattered."""
    asked = {"tensor": 2, "sequence_parallel": True, "expert": 4, "dispatcher": "all-to-all"}
    plan = make_plan(job_of(SHARDED, asked))
    rows = 256 * TOP_K * HIDDEN * 2
    assert calls(plan, "forward", "expert_tensor", "expert") == {
        ("all_to_all", "expert", rows, "bf16"): 2 * LAYERS,
        ("all_to_all", "expert", 256 * TOP_K * 2, "bf16"): LAYERS,
        ("all_gather", "expert_tensor", 2 * rows, "bf16"): LAYERS,
        ("reduce_scatter", "expert_tensor", 2 * rows, "bf16"): LAYERS,
    }


def test_a_merging_dispatcher_sends_a_token_once_to_every_rank() -> None:
    """Of 8 ranks with 2 of 16 experts a token of 4 reaches 8 (1 - C(14, 4) / C(16, 4))."""
    reached = 8 * (1 - comb(14, 4) / comb(16, 4))
    assert expected_partitions(16, 4, 8) == pytest.approx(reached)
    plan = make_plan(job_of(SHARDED, {"expert": 8, "dispatcher": "deepep"}))
    assert calls(plan) == {("all_to_all", "expert", round(TOKENS * reached) * HIDDEN * 2, "bf16"): 2 * LAYERS}


def test_torchtitan_forces_balance_in_turn_so_that_a_token_reaches_few_ranks() -> None:
    """Token t has experts 4 t to 4 t + 3 of 16: of 8 ranks with 2 each it reaches 2, of 4 with 4 one. With 3
    experts a token starts at any: it reaches 2 of 8 ranks, and of 4 ranks 1 or 2. Megatron draws scores:
    8 (1 - C(14, 4) / C(16, 4)), as where a list says that every rank has as many rows."""
    assert partitions_in_turn(16, 4, 8) == 2
    assert partitions_in_turn(16, 4, 4) == 1
    assert partitions_in_turn(16, 3, 8) == 2
    assert partitions_in_turn(16, 3, 4) == 1.5  # starts 0 and 1 of 4 reach one, 2 and 3 two
    drawn = 8 * (1 - comb(14, 4) / comb(16, 4))
    for strategy, loads, reached in ((TITAN, 1, 2), (SHARDED, 1, drawn), (TITAN, [1] * 8, drawn)):
        job = job_of(strategy, {"expert": 8, "dispatcher": "deepep", "expert_imbalance": loads})
        assert any("have their experts in turn" in note for note in job.notes) == (reached == 2)
        plan = make_plan(job)
        sizes = {
            num_bytes
            for kind, group, num_bytes, _ in calls(plan)
            if (kind, group) == ("all_to_all", "expert")
        }
        assert sizes == {round(TOKENS * reached) * HIDDEN * 2}


@pytest.mark.parametrize(("gpus", "degree", "library"), [(8, 8, "deepep"), (16, 16, "hybridep")])
def test_a_merging_dispatcher_makes_rows_on_the_way_there_and_tokens_on_the_way_back(
    gpus: int, degree: int, library: str
) -> None:
    """Dispatch makes a row for every rank that a token reaches, 1.5 times as many on the fullest rank, and
    what comes back is added up to the rank's own tokens, in forward behind the experts and in backward before
    them. Between nodes rows are in the library's buffers."""
    job = job_of(SHARDED, {"expert": degree, "dispatcher": library, "expert_imbalance": 1.5}, gpus=gpus)
    block = expand_experts(job.model, job.parallelism.experts).blocks[0]
    shape, options = BatchShape(1, TOKENS), WorkOptions()
    token = TOKENS * HIDDEN * 2
    reached = expected_partitions(EXPERTS, TOP_K, degree)
    made = {"dispatch": [0, 0], "combine": [0, 0]}
    for module in block.modules:
        for way in made:
            if f" {way} tokens" in module.name:
                seen = shape.seen_by(module)
                made[way][0] += module.op_spec.forward_extra_bytes(module, seen, options)
                made[way][1] += module.op_spec.backward_extra_bytes(module, seen, options)
    received = 1.5 * reached * token
    assert made["dispatch"] == pytest.approx([received, token], rel=2e-3)
    assert made["combine"] == pytest.approx([token, received], rel=2e-3)


def test_across_nodes_it_sends_a_token_once_to_every_node() -> None:
    """Two nodes of 8 experts: 2 (1 - C(8, 4) / C(16, 4)), half of which stays; meanwhile 7/8 of what goes to
    the ranks is passed on inside nodes."""
    plan = make_plan(job_of(SHARDED, {"expert": 16, "dispatcher": "hybridep"}))
    nodes, ranks = 2 * (1 - comb(8, 4) / comb(16, 4)), 16 * (1 - comb(15, 4) / comb(16, 4))
    size = round(TOKENS * nodes) * HIDDEN * 2
    assert calls(plan) == {("all_to_all", "expert_rail", size, "bf16"): 2 * LAYERS}
    works = [op.work for program in plan.programs for op in program.ops]
    exchanges = [one for one in works if isinstance(one, Collective) and one.group == "expert_rail"]
    assert {one.library for one in exchanges} == {ExchangeLibrary("hybridep", ranks * 7 / 8 / (nodes / 2))}
    assert plan.groups["expert_rail"].members[0].tolist() == [0, 8]
    assert plan.groups["expert_node"].members[0].tolist() == list(range(8))


def test_groups_of_experts_limit_the_nodes_that_a_token_reaches() -> None:
    """DeepSeek-V3: 8 of 256 experts, of 4 of 8 groups: with a group per node at most 4 nodes, nearly all."""
    assert expected_partitions(256, 8, 8, 8, 4) == pytest.approx(4 * (1 - comb(96, 8) / comb(128, 8)))
    assert 3.5 < expected_partitions(256, 8, 8, 8, 4) < 4 < expected_partitions(256, 8, 8)


def test_a_part_of_several_groups_is_reached_by_any_of_them() -> None:
    """4 of 8 groups of one expert, all 4 of them: two parts of 4 groups are both reached but where all 4 are
    in one, 2 of 70 ways; four parts of 2 groups are missed each in C(6, 4) = 15 of 70."""
    assert expected_partitions(8, 4, 2, 8, 4) == pytest.approx(2 - 2 / 70)
    assert expected_partitions(8, 4, 4, 8, 4) == pytest.approx(4 * (1 - 15 / 70))
    assert expected_partitions(256, 8, 1, 8, 4) == 1


def test_rows_up_to_a_capacity_need_no_counts() -> None:
    """1.25 times the mean for every expert, filled up: more bytes, no exchange of counts, no host that waits.
    Without filling up as many rows go as are routed."""
    asked = {"expert": 8, "dispatcher": "all-to-all", "capacity_factor": 1.25}
    padded = make_plan(job_of({**SHARDED, "moe_pad_to_capacity": True}, asked))
    rows = TOKENS * TOP_K * HIDDEN * 2
    assert calls(padded)["all_to_all", "expert", rows * 5 // 4, "bf16"] == 2 * LAYERS
    assert not any(kind == "all_gather" for kind, *_ in calls(padded))
    assert not any(op.host_waits for op in padded.programs[0].ops if op.phase == "forward")
    dropping = make_plan(job_of(SHARDED, asked))
    assert calls(dropping)["all_to_all", "expert", rows, "bf16"] == 2 * LAYERS


def test_torchtitan_exchanges_counts_and_rows_and_waits_for_the_counts() -> None:
    plan = make_plan(job_of(TITAN, {"expert": 8}))
    rows = TOKENS * TOP_K * HIDDEN * 2
    assert calls(plan, "forward", "expert") == {
        ("all_to_all", "expert", EXPERTS * 8, "int64"): LAYERS,
        ("all_to_all", "expert", rows, "bf16"): 2 * LAYERS,
    }
    assert sum(bool(op.host_waits) for op in plan.ops if op.phase == "forward") == LAYERS


def test_torchtitan_splits_the_tokens_of_tensor_ranks_or_the_products() -> None:
    """Borrowed ranks send half of the gathered tokens each; with expert_tensor = 2 both send all."""
    rows = TOKENS * TOP_K * HIDDEN * 2
    borrowed = make_plan(job_of(TITAN, {"expert": 8, "tensor": 2}))
    assert calls(borrowed, "forward", "expert")["all_to_all", "expert", rows // 2, "bf16"] == 2 * LAYERS
    shared = make_plan(job_of(TITAN, {"expert": 4, "tensor": 2, "expert_tensor": 2}))
    assert calls(shared, "forward", "expert")["all_to_all", "expert", rows, "bf16"] == 2 * LAYERS


# -- imbalance -------------------------------------------------------------------------------------------


def products(plan: Plan) -> float:
    works = [op.work for op in plan.programs[0].ops if "mlp.experts" in op.name]
    return sum(total_flops(work.kernels) for work in works if isinstance(work, Kernels))


def test_the_fullest_rank_counts() -> None:
    """1.5 times the rows: 1.5 times the FLOPs, and an all-to-all in which one rank receives 1.5 times its
    part, and sends it back."""
    even, uneven = (
        make_plan(job_of(SHARDED, {"expert": 8, "dispatcher": "all-to-all", "expert_imbalance": factor}))
        for factor in (1.0, 1.5)
    )
    assert products(uneven) == pytest.approx(1.5 * products(even))
    sent = [op.work for op in uneven.ops if op.name.endswith("0.mlp.experts all_to_all rows")]
    back = [op.work for op in uneven.ops if op.name.endswith("0.mlp.experts all_to_all rows back")]
    (there,), (home,) = sent, back
    assert isinstance(there, Collective)
    assert isinstance(home, Collective)
    assert there.split_sizes is not None
    assert home.split_sizes is not None
    part = TOKENS * TOP_K * HIDDEN * 2 // 8
    assert there.split_sizes[3][0] == 1.5 * part
    assert home.split_sizes == tuple(zip(*there.split_sizes, strict=True))
    assert sum(map(sum, there.split_sizes)) == pytest.approx(64 * part, abs=64)


@pytest.mark.parametrize(
    ("asked", "fullest"),
    [
        ([3, 1, 1, 1, 1, 1, 0, 0], 3.0),
        ([2, 2, *[1] * 12, 0, 0], 2.0),
        ("loss-free-3b", 1.04),
        ("seed:3", 1.014),
    ],
)
def test_imbalance_is_a_list_a_published_spread_or_drawn(asked: Any, fullest: float) -> None:
    """Of ranks, or of experts (two a rank); of 16,384 rows by chance one rank has 1.4 percent more."""
    job = job_of(SHARDED, {"expert": 8, "dispatcher": "all-to-all", "expert_imbalance": asked})
    loads = job.parallelism.experts.loads
    assert loads[0] == pytest.approx(fullest, abs=0.001)
    assert sum(loads) == pytest.approx(8)


# -- gradients -------------------------------------------------------------------------------------------


def test_megatrons_experts_have_a_buffer_of_their_own() -> None:
    """fp32 gradients of an eighth of the experts over the two ranks that hold them, the rest over all 16."""
    job = job_of(SHARDED, {"expert": 8})
    plan = make_plan(job)
    rest = job.model.numel - EXPERT_WEIGHTS
    assert calls(plan, "backward", "data", "expert_data") == {
        ("reduce_scatter", "data", 4 * rest, "fp32"): 1,
        ("reduce_scatter", "expert_data", EXPERT_WEIGHTS // 8 * 4, "fp32"): 1,
    }
    assert calls(plan, "optimizer", "data", "expert_data") == {
        ("all_reduce", "data", 4, "fp32"): 1,
        ("all_gather", "data", 2 * rest, "bf16"): 1,
        ("all_gather", "expert_data", EXPERT_WEIGHTS // 8 * 2, "bf16"): 1,
    }


def test_states_are_sharded_over_each_ones_own_ranks() -> None:
    """6 + 12 / d bytes, d = 16 for the rest and 2 for experts."""
    job = job_of(SHARDED, {"expert": 8})
    peak = report_of(simulate_job(job), 0.0).to_dict()["peak_bytes"]["gpu"]
    experts, rest = EXPERT_WEIGHTS // 8, job.model.numel - EXPERT_WEIGHTS
    assert peak["parameters"] == 2 * (experts + rest)
    assert peak["gradients"] == 4 * (experts + rest)
    assert peak["optimizer_states"] == pytest.approx(12 * (experts / 2 + rest / 16), rel=1e-3)


def test_norms_of_experts_that_are_not_sharded_are_summed_over_their_ranks() -> None:
    plan = make_plan(job_of(MEGATRON, {"expert": 8}))
    assert calls(plan, "optimizer", "expert_stages") == {("all_reduce", "expert_stages", 4, "fp32"): 1}


def test_torchtitans_experts_are_a_group_inside_their_block() -> None:
    """Sharded over the ranks that hold them, gathered twice a step, reduced once; cut on their features where
    experts are fewer than ranks."""
    plan = make_plan(job_of(TITAN, {"expert": 8}))
    one = EXPERT_WEIGHTS // LAYERS // 8
    assert calls(plan, "forward", "expert_data") == {("all_gather", "expert_data", 2 * one, "bf16"): LAYERS}
    assert calls(plan, "backward", "expert_data")["reduce_scatter", "expert_data", 4 * one, "fp32"] == LAYERS
    wide = make_plan(job_of(TITAN, {"expert": 16}, 64))
    assert calls(wide, "forward", "expert_data") == {("all_gather", "expert_data", one, "bf16"): LAYERS}


@pytest.mark.parametrize(
    ("frozen", "sums"),
    [([], [4]), (["model.embed_tokens"], [4]), (["model.layers.*.mlp.experts*"], [])],
)
def test_stages_without_experts_sum_their_norm_too(frozen: list[str], sums: list[int]) -> None:
    """Their optimizer for experts has no parameters, but the others wait for its sum, if they train any."""
    model = {**TINY, "num_hidden_layers": 4, "mlp_only_layers": [0, 1]}
    split = {"expert": 2, "pipeline": 2}
    plan = make_plan(job_of(MEGATRON, split, 8, model, gradient_accumulation_steps=2, frozen=frozen))
    check_plan(plan)
    assert sums_of_experts(plan) == [sums, sums]


def test_experts_that_all_ranks_have_are_in_the_norm_of_all_else() -> None:
    split = {"tensor": 2, "sequence_parallel": True, "pipeline": 2}
    assert sums_of_experts(make_plan(job_of(MEGATRON, split, 8))) == [[], []]


def sums_of_experts(plan: Plan) -> list[list[int]]:
    """Bytes of the sums over experts of all stages, by pipeline rank."""
    return [
        [
            work.bytes
            for op in program.ops
            if isinstance(work := op.work, Collective) and work.group == "expert_stages"
        ]
        for program in plan.programs
    ]


@pytest.mark.parametrize(
    ("wrapping", "is_tied"), [("torchtitan", True), ("torchtitan-0.1", False), ("blocks:2", False)]
)
def test_experts_are_a_group_inside_their_block_however_the_rest_is_wrapped(
    wrapping: str, is_tied: bool
) -> None:
    """Where the root has embedding and head, as of tied weights, and where a unit has two blocks."""
    job = job_of(
        {**TITAN, "wrapping": wrapping}, {"expert": 8}, model={**TINY, "tie_word_embeddings": is_tied}
    )
    one = EXPERT_WEIGHTS // LAYERS // 8
    plan = make_plan(job)
    assert calls(plan, "forward", "expert_data") == {("all_gather", "expert_data", 2 * one, "bf16"): LAYERS}
    assert calls(plan, "backward", "expert_data")["reduce_scatter", "expert_data", 4 * one, "fp32"] == LAYERS


def test_the_next_blocks_experts_are_gathered_ahead() -> None:
    """The block before the one that waits for it names it, since the host waits for counts in between."""
    names = [
        op.name
        for op in make_plan(job_of(TITAN, {"expert": 8})).ops
        if op.name.startswith("all_gather model")
    ]
    assert names[:4] == [
        "all_gather model.layers.0",
        "all_gather model.layers.1",
        "all_gather model.layers.1.mlp.experts",
        "all_gather model.layers.0.mlp.experts",
    ]


# -- folding ---------------------------------------------------------------------------------------------

FOLDED: tuple[tuple[dict[str, Any], dict[str, Any], int], ...] = (
    (SHARDED, {"expert": 8}, 64),
    (SHARDED, {"expert": 16, "dispatcher": "all-to-all"}, 64),
    (SHARDED, {"expert": 16, "dispatcher": "deepep"}, 32),
    (SHARDED, {"expert": 8, "dispatcher": "all-to-all", "expert_imbalance": 1.5}, 32),
    (SHARDED, {"expert": 8, "tensor": 2, "sequence_parallel": True, "dispatcher": "all-to-all"}, 32),
    (SHARDED, {"expert": 4, "context": 2, "pipeline": 2, "dispatcher": "all-to-all"}, 32),
    (TITAN, {"expert": 8}, 32),
    (TITAN, {"expert": 8, "tensor": 2, "context": 2}, 32),
    ({**TITAN, "replicate": 2}, {"expert": 8}, 32),
    (TITAN, {"expert": 4, "pipeline": 2}, 16),
)


@pytest.mark.parametrize(("strategy", "parallelism", "gpus"), FOLDED)
def test_folded_ranks_take_as_long_as_all(
    strategy: dict[str, Any], parallelism: dict[str, Any], gpus: int
) -> None:
    job = job_of(strategy, parallelism, gpus, activation_checkpointing="full", gradient_accumulation_steps=2)
    folded, unfolded = (report_of(simulate_job(job, unfold=unfold), 0.0) for unfold in (False, True))
    assert folded.step_seconds == pytest.approx(unfolded.step_seconds, rel=1e-9)
    assert folded.to_dict()["simulation"]["rank_classes"] <= parallelism.get("pipeline", 1)


def test_the_report_says_how_experts_are_spread() -> None:
    assert parallelism_label(job_of(SHARDED, {"expert": 8})) == "DP 16, EP 8"
    report = report_of(simulate_job(job_of(SHARDED, {"expert": 8})), 0.0).to_dict()
    found = report["experiment"]["parallelism"]
    assert {key: found[key] for key in ("expert", "expert_tensor", "dispatcher", "capacity_factor")} == {
        "expert": 8, "expert_tensor": 1, "dispatcher": "all-to-all", "capacity_factor": None,
    }  # fmt: skip
    assert report["model"]["active_parameters"] == report["model"]["parameters"] - EXPERT_WEIGHTS * 3 // 4


@pytest.mark.parametrize(
    ("experimental", "permute_fusion", "launches", "waits"),
    [(False, True, (31, 22), True), (True, True, (1, 1), False), (True, False, (31, 22), True)],
)
def test_behind_deepep_masks_make_the_map_and_the_host_waits_for_them(
    experimental: bool, permute_fusion: bool, launches: tuple[int, int], waits: bool
) -> None:
    """Two layers: the host waits for the lengths of each one's masks forward and backward, unless a fused
    kernel makes the map, which Megatron has among its experimental ones."""
    table = {**MEGATRON, "moe_permute_fusion": permute_fusion, "enable_experimental": experimental}
    plan = make_plan(job_of(table, {"expert": 8, "dispatcher": "deepep"}))
    maps = [op for op in plan.programs[0].ops if ".map" in op.name]
    assert [op.phase for op in maps] == ["forward"] * 2 + ["backward"] * 2
    assert [op.launches for op in maps] == [launches[0]] * 2 + [launches[1]] * 2
    assert [bool(op.host_waits) for op in maps] == [waits] * 4


def test_torchtitan_copies_rows_once_behind_deepep_and_scatters_them_back() -> None:
    """A rank's rows are read and written by one gather, where torchtitan's own exchange takes 16 passes over
    them; the sum behind the experts adds up every row, and so does the gather's backward. Masks pick the
    rows, and the host waits for them."""
    names = ("deepep", "all-to-all")
    merged, rows = (job_of(TITAN, {"expert": 8, "dispatcher": name}).parallelism.experts for name in names)
    assert (merged.builds_map_with_masks, rows.builds_map_with_masks) == (True, False)
    permute, unpermute = (
        merged.library.kernels.move(kind, is_compiled=True) for kind in ("permute", "unpermute")
    )
    assert permute.forward == RowPasses(0, 2, 1)
    assert permute.backward.added == INDEX_ADD
    assert unpermute.forward.added == SCATTER_ADD
    assert rows.library.kernels.move("permute", is_compiled=True).forward.rows == 16


def test_automodel_moves_rows_by_transformer_engine_and_leaves_experts_alone() -> None:
    """Forced balance takes the place of the gate, so nothing of it runs. FSDP2 neither gathers, copies nor
    reduces the experts of one rank: autograd adds the gradients of a second micro-batch to the first, which
    are read twice and written. Gate and up projections of 2 experts are 2 x 2 x 64 x 256 elements in bf16.
    The blocks stay gathered from forward to backward."""
    job = job_of(
        {"kind": "fsdp2", "wrapping": "automodel"},
        {"expert": 8, "dispatcher": "deepep"},
        gpus=8, gradient_accumulation_steps=2, stored_dtype="bf16",
    )  # fmt: skip
    kernels = job.parallelism.experts.library.kernels
    assert kernels.move("permute", is_compiled=False).forward == RowPasses(0, 2, 3)
    assert kernels.move("unpermute", is_compiled=False).forward == RowPasses(1, 1, 1)
    plan = make_plan(job)
    check_plan(plan)
    ops = plan.programs[0].ops
    assert not [op.name for op in ops if ".gate" in op.name and "_proj" not in op.name]
    moved = [op.name.split()[0] for op in ops if op.name.endswith("mlp.experts") and " " in op.name]
    assert moved == ["accumulate"] * 2 * LAYERS
    added = next(op.work for op in ops if op.name.startswith("accumulate gradients"))
    assert isinstance(added, Kernels)
    assert sum(kernel.hbm_bytes for kernel in added.kernels) in {
        3 * 2 * 2 * n * WIDTH * HIDDEN for n in (1, 2)
    }
    gathers = [op.name for op in ops if isinstance(op.work, Collective) and op.work.kind == "all_gather"]
    assert len(gathers) == 2 * (LAYERS + 2)


def test_hybridep_makes_no_map() -> None:
    plan = make_plan(job_of(MEGATRON, {"expert": 8, "dispatcher": "hybridep"}))
    assert not [op for op in plan.programs[0].ops if ".map" in op.name]
