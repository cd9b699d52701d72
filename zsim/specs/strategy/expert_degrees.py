"""Expert parallelism as `[parallelism]` requests it, completed by a framework's defaults.

Megatron has the products of an expert on as many ranks as tensor parallelism, and brings tokens by
all-gathers (core 0.16.1 training/arguments.py, core/transformer/transformer_config.py,
core/parallel_state.py). DeepSpeed's are in `zsim.frameworks.deepspeed.settings.experts`. torchtitan has
one rank per expert or all of tensor parallelism, and all-to-alls or DeepEP (0.2.2
distributed/parallel_dims.py `_validate`, models/llama4/infra/parallelize.py).
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import numpy as np

from zsim.errors import InputError, NotSimulatedError
from zsim.operations.experts import Experts
from zsim.specs.model.expert_layer import stacked_experts
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.expert_library import TRANSFORMERS
from zsim.specs.strategy.experts import (
    DEDUPLICATING_DISPATCHERS,
    Dispatcher,
    End,
    ExpertImbalance,
    ExpertSplit,
    assumed_load,
    fullest_expert,
    load_expert_spreads,
    rank_loads,
)
from zsim.specs.strategy.parallelism import EXPERT, PIPELINE, ParallelismConfig
from zsim.specs.strategy.parallelism_table import ParallelismTable
from zsim.specs.strategy.requirement import alternatives, phrase

_EXPERT_KEYS = (
    "expert",
    "expert_tensor",
    "dispatcher",
    "capacity_factor",
    "expert_imbalance",
    "expert_padding",
)


def resolve_expert_degrees(
    table: ParallelismTable,
    parallelism: ParallelismConfig,
    library_split: ExpertSplit,
    model: ModelSpec,
    world_size: int,
    tokens: int,
    gpus_per_node: int,
    replicas: int = 1,
    nodes_per_domain: int = 1,
    default_dispatcher: Dispatcher | None = None,
) -> ExpertSplit:
    """The expert split of `library_split`, which says whose experts they are, with the degrees of the table.

    `parallelism` has the other degrees. `tokens` counts those of a rank's micro-batch, and `replicas` is
    `expert_replicas`. `nodes_per_domain` is the number of nodes that one NVLink domain spans. Only HybridEP
    treats these as one node (deepseek-ai/DeepEP, branch hybrid-ep: ranks of an NVLink domain write to each
    other). DeepEP's kernels know nodes of up to 8 GPUs. `default_dispatcher` is the framework's on this
    machine, None for the first of its style.

    Raises InputError for a model without experts, for degrees that do not divide, and for what the framework
    refuses. Raises NotSimulatedError for expert parallelism that zsim lacks.
    """
    experts = stacked_experts(model)
    if experts is None:
        _refuse_keys(table, model)
        return library_split
    _check_library(table, parallelism, library_split, model)
    tensor = _expert_tensor_ranks(table, parallelism, library_split)
    split = replace(library_split, ranks=table.expert, tensor=tensor, capacity_factor=table.capacity_factor)
    _check_divides(split, parallelism, experts, model, world_size, replicas)
    _check_order(split, parallelism, world_size)
    split = replace(split, dispatcher=_resolve_dispatcher(table, parallelism, split, default_dispatcher))
    _check_capacity(split)
    is_hybrid = split.dispatcher == "hybridep"
    is_split = parallelism.style.splits_expert_tokens and split.ranks > 1 and split.tensor == 1
    if split.library.pads_to_fullest:
        if table.expert_imbalance is None:
            return assume_loads(split, experts)
        tokens //= parallelism.token_shards
        return replace(split, padding=_padding_factor(table.expert_imbalance, experts, tokens))
    counts = experts.num_experts, experts.top_k, tokens // parallelism.token_shards
    imbalance = table.expert_imbalance
    if imbalance is not None:
        in_turn = split.library.balances_in_turn and imbalance == 1
        loads = rank_loads(imbalance, split.ranks, *counts)
        split = replace(split, loads=loads, deals_in_turn=in_turn)
    else:
        split = assume_loads(split, experts)
    if split.library.min_capacity:
        lanes = parallelism.tensor if split.library.has_tensor_lanes else 1
        fullest = _fullest_expert_load(table, split.ranks, counts)
        split = _apply_capacity(split, experts, counts[2], fullest, lanes)
    return replace(
        split,
        token_ranks=parallelism.tensor if is_split or split.library.has_tensor_lanes else 1,
        nodes=_count_nodes(
            split, parallelism, world_size, gpus_per_node * (nodes_per_domain if is_hybrid else 1)
        ),
    )


def _apply_capacity(
    split: ExpertSplit, experts: Experts, tokens: int, fullest: float, lanes: int
) -> ExpertSplit:
    """The split with the rows of every expert's capacity over the mean.

    An expert takes `capacity_factor` (1.0 if left out) of `tokens` tokens, in whole rows, and at least
    `min_capacity` of its library. Without dropping it takes those of the fullest expert, which are `fullest`
    times the mean. They are dealt out to `lanes` tensor-parallel ranks (DeepSpeed 0.19.8 moe/sharded_moe.py
    `top1gating`, moe/mappings.py `_drop_tokens`).
    """
    mean = tokens * experts.top_k / experts.num_experts
    if split.agrees_on_capacity:
        rows = fullest * mean
    else:
        rows = mean * (1.0 if split.capacity_factor is None else split.capacity_factor)
    rows_taken = max(ceil(round(rows, 6)), 1 if split.agrees_on_capacity else split.library.min_capacity)
    if split.agrees_on_capacity:
        rows_taken = ceil(rows_taken / lanes) * lanes
    elif rows_taken % lanes:
        raise InputError(
            f"parallelism.capacity_factor: {rows_taken:,} rows of an expert are not dealt out evenly to "
            f"{lanes} tensor-parallel ranks, which {split.library.title} demands; expected a multiple"
        )
    return replace(split, capacity_factor=rows_taken / mean, loads=(1.0,))


def assume_loads(split: ExpertSplit, experts: Experts, end: End = "typical") -> ExpertSplit:
    """The split with the loads of `presets/expert_spreads.toml`, at one end of what was seen.

    Experts that are padded to the fullest have the rows that it has under a trained router, at the high end
    those of a run's first steps. The split is returned unchanged where there are no ranks among which loads
    could differ and no rows that are left out or padded.
    """
    spreads, num_experts = load_expert_spreads(), experts.num_experts
    deviation = spreads.interpolate_deviation(num_experts, end)
    if split.library.pads_to_fullest:
        trained, most = assumed_load(num_experts, num_experts, deviation), num_experts / experts.top_k
        first = spreads.first_steps.share_of_tokens * most if end == "high" else 0.0
        return replace(split, padding=min(most, max(trained, first)), deviation=deviation)
    if split.ranks == 1 and split.capacity_factor is None:
        return split
    room = None if split.pads_to_capacity else split.capacity_factor
    load = assumed_load(split.ranks, num_experts, deviation, room)
    return replace(split, loads=(load,), deviation=deviation)


def assumed_loads_note(split: ExpertSplit, model: ModelSpec) -> str | None:
    """The note on the load that is assumed of a router where nothing is said. None where the load does not
    count.
    """
    experts = stacked_experts(model)
    if experts is None or not split.deviation or split.pads_to_capacity:
        return None
    low, high = (assume_loads(split, experts, end) for end in ("low", "high"))
    if split.library.pads_to_fullest:
        return (
            f"every expert is padded to the fullest's rows, which are taken to be {split.padding:.2f} times "
            f"the mean, as where the router is trained; in the first steps from random weights they may be "
            f"{high.padding:.2f} times: parallelism.expert_imbalance"
        )
    if split.ranks == 1:
        return None
    ends = max(low.loads), max(high.loads)
    return (
        f"the router is taken to be as uneven as others with about {experts.num_experts} experts: in every "
        f"layer the fullest of {split.ranks} expert-parallel ranks has {max(split.loads):.2f} times the mean "
        f"rows ({ends[0]:.2f} to {ends[1]:.2f} were seen); parallelism.expert_imbalance says another, 1 "
        "where balance is forced, as benchmarks do"
    )


def choices_in_turn_note(split: ExpertSplit) -> str | None:
    """The note on experts that are dealt out in turn. None where they are drawn, or where a token is sent to
    each of its experts.
    """
    if not split.deals_in_turn or split.dispatcher not in DEDUPLICATING_DISPATCHERS:
        return None
    return (
        "parallelism.expert_imbalance is 1: tokens have their experts in turn, as where "
        f"{split.library.title} forces balance, so that each is sent to few ranks; a load per rank, all of "
        "them 1, draws the experts"
    )


def assumed_dispatcher_note(table: ParallelismTable, parallelism: ParallelismConfig) -> str | None:
    """The note on the dispatcher that is assumed where nothing is said. None where there is no other, or no
    exchange.
    """
    split, dispatchers = parallelism.experts, parallelism.style.dispatchers
    if table.dispatcher is not None or split.ranks == 1 or len(dispatchers) == 1:
        return None
    others = [repr(name) for name in dispatchers if name != split.dispatcher]
    return (
        f"parallelism.dispatcher is left out: {split.dispatcher!r} is taken, as people run "
        f"{parallelism.style.title} on such a machine; it also has {', '.join(others)}, with which exchanges "
        "may take another time"
    )


def _fullest_expert_load(table: ParallelismTable, ranks: int, counts: tuple[int, int, int]) -> float:
    """Rows of the fullest expert over the mean."""
    if table.expert_imbalance is not None:
        return fullest_expert(table.expert_imbalance, ranks, *counts)
    deviation = load_expert_spreads().interpolate_deviation(counts[0])
    return assumed_load(counts[0], counts[0], deviation)


def _padding_factor(imbalance: ExpertImbalance, experts: Experts, tokens: int) -> float:
    """Rows of the fullest expert over the mean: at most those of every token."""
    max_factor = experts.num_experts / experts.top_k
    fullest = fullest_expert(imbalance, 1, experts.num_experts, experts.top_k, tokens)
    if fullest > max_factor:
        raise InputError(
            f"parallelism.expert_imbalance: the fullest expert has {fullest:g} times the mean, but one of "
            f"{experts.num_experts} experts, of which every token has {experts.top_k}, takes at most "
            f"{max_factor:g} times it"
        )
    return fullest


def _refuse_keys(table: ParallelismTable, model: ModelSpec) -> None:
    for key in _EXPERT_KEYS:
        value = getattr(table, key)
        if value is True or value not in (None, 1, False):
            raise InputError(
                f"parallelism.{key}: found {value!r}, but '{model.name}' has no routed experts; expected it "
                "left out, or a mixture of experts"
            )


def _check_library(
    table: ParallelismTable, parallelism: ParallelismConfig, library_split: ExpertSplit, model: ModelSpec
) -> None:
    """Raises for expert parallelism, and tensor parallelism around experts, that the framework lacks."""
    name = parallelism.style.title
    if library_split.library.pads_to_fullest:
        _check_unsharded(table, parallelism)
    if parallelism.tensor > 1 and library_split.library == TRANSFORMERS:
        raise NotSimulatedError(
            f"parallelism.tensor: found {parallelism.tensor} with '{model.name}', whose routed experts zsim "
            f"splits under {phrase('split experts')} only, not {name}; expected "
            f"{alternatives('split experts')}"
        )
    if parallelism.async_tensor and parallelism.style.gathers_for_experts:
        raise NotSimulatedError(
            f"parallelism.async_tensor: found true with '{model.name}', whose routed experts zsim does not "
            "simulate beside it; expected false"
        )
    library = library_split.library
    if parallelism.tensor > 1 and library.needs_sequence_parallelism and not parallelism.sequence_parallel:
        raise InputError(
            f"parallelism.sequence_parallel: found false with tensor = {parallelism.tensor} and routed "
            f"experts, which {library.title} refuses to train; expected sequence_parallel = true"
        )
    for key in ("expert", "expert_tensor", "dispatcher", "capacity_factor"):
        value = getattr(table, key)
        if library != TRANSFORMERS or value in (None, 1):
            continue
        raise NotSimulatedError(
            f"parallelism.{key}: found {value!r}, which zsim simulates under {phrase('expert parallelism')}; "
            f"expected {alternatives('expert parallelism')}"
        )


def _check_unsharded(table: ParallelismTable, parallelism: ParallelismConfig) -> None:
    """Raises where experts that are padded to the fullest are not complete on every rank."""
    degrees = {
        key: getattr(table, key) for key in ("expert", "expert_tensor", "dispatcher", "capacity_factor")
    }
    for key, value in {**degrees, "tensor": parallelism.tensor}.items():
        if value not in (None, 1):
            raise NotSimulatedError(
                f"parallelism.{key}: found {value!r} with expert_padding, which zsim simulates with all "
                f"experts whole on every rank; expected {key} or expert_padding left out"
            )


def expert_members(
    table: ParallelismTable, parallelism: ParallelismConfig, library_split: ExpertSplit
) -> int:
    """Ranks that share the experts of a layer, as the table asks, with all lanes."""
    has_lanes = library_split.library.has_tensor_lanes
    tensor = _expert_tensor_ranks(table, parallelism, library_split)
    return table.expert * (parallelism.tensor if has_lanes else tensor)


def _expert_tensor_ranks(
    table: ParallelismTable, parallelism: ParallelismConfig, library_split: ExpertSplit
) -> int:
    """Ranks that share an expert's products."""
    requested, tensor, library = table.expert_tensor, parallelism.tensor, library_split.library
    if library.splits_like_products:
        return tensor if requested is None else requested
    if table.expert == 1 and library.splits_with_products:
        if requested not in (None, 1, tensor):
            raise InputError(
                f"parallelism.expert_tensor: found {requested} with expert = 1; {library.title} splits "
                f"experts like the other products: expected {tensor}"
            )
        return tensor
    if library.keeps_products_whole and requested not in (None, 1):
        raise InputError(
            f"parallelism.expert_tensor: found {requested}, but {library.owner} keeps the products of an "
            "expert on one rank; expected 1"
        )
    if requested not in (None, 1, tensor):
        raise InputError(
            f"parallelism.expert_tensor: found {requested}; "
            f"{phrase('parallelism.expert_tensor').format(tensor=tensor)}; the nearest is "
            f"{1 if requested < tensor else tensor}"
        )
    return requested or 1


def _check_divides(
    split: ExpertSplit,
    parallelism: ParallelismConfig,
    experts: Experts,
    model: ModelSpec,
    world_size: int,
    replicas: int,
) -> None:
    for key, degree, count, dimension in (
        ("expert", split.ranks, experts.num_experts, "routed experts"),
        ("expert_tensor", split.tensor, experts.expert_features, "features of an expert"),
    ):
        if count % degree:
            divisors = [divisor for divisor in range(1, count + 1) if count % divisor == 0]
            nearest = min(divisors, key=lambda divisor: abs(divisor - degree))
            raise InputError(
                f"parallelism.{key}: found {degree}, which does not divide the {count:,} {dimension} of "
                f"'{model.name}'; the nearest that does is {nearest}"
            )
    stage_ranks = world_size // parallelism.pipeline
    key, lanes = "expert_tensor", split.tensor
    if split.library.has_tensor_lanes:
        key, lanes = "tensor", parallelism.tensor
    if stage_ranks % (split.ranks * lanes * replicas):
        replica_phrase = f" in {replicas} replicas" if replicas > 1 else ""
        raise InputError(
            f"parallelism.expert: {split.ranks} ranks x {key} {lanes} do not divide the "
            f"{stage_ranks:,} GPUs of a pipeline stage{replica_phrase}; expected a product that does"
        )


def _check_order(split: ExpertSplit, parallelism: ParallelismConfig, world_size: int) -> None:
    """Raises InputError where the ranks of a stage's experts would be those of several stages.

    Megatron-Core core/parallel_state.py `initialize_model_parallel` asserts the same.
    """
    if parallelism.pipeline == 1:
        return
    expert_mesh = replace(parallelism, experts=split).expert_mesh(world_size)
    stages = parallelism.mesh(world_size).coordinate(PIPELINE)
    if not np.array_equal(stages, expert_mesh.coordinate(PIPELINE)):
        ranks = parallelism.tensor * parallelism.context
        raise InputError(
            f"parallelism.order: {split.members} ranks share the experts and {ranks} the other layers, whose "
            "stages are on the same ranks only where the pipeline comes last; expected 'tp-cp-dp-pp'"
        )


def _resolve_dispatcher(
    table: ParallelismTable, parallelism: ParallelismConfig, split: ExpertSplit, default: Dispatcher | None
) -> Dispatcher:
    dispatchers = parallelism.style.dispatchers
    dispatcher = table.dispatcher or default or dispatchers[0]
    name = parallelism.style.title
    if dispatcher not in dispatchers:
        raise InputError(
            f"parallelism.dispatcher: {name} has no '{dispatcher}'; expected "
            f"{' or '.join(repr(candidate) for candidate in dispatchers)}"
        )
    if dispatcher in DEDUPLICATING_DISPATCHERS and split.members == 1:
        raise InputError(
            f"parallelism.dispatcher: found '{dispatcher}' with expert = 1, which {name} refuses; expected "
            "expert above 1"
        )
    if (
        dispatcher in DEDUPLICATING_DISPATCHERS
        and not split.library.splits_like_products
        and split.tensor > 1
    ):
        raise InputError(
            f"parallelism.dispatcher: found '{dispatcher}' with expert_tensor = {split.tensor}, which "
            f"{split.library.title} refuses; expected expert_tensor = 1"
        )
    return dispatcher


def _check_capacity(split: ExpertSplit) -> None:
    if split.library.min_capacity:
        if split.agrees_on_capacity and split.capacity_factor is not None:
            raise InputError(
                f"parallelism.capacity_factor: found {split.capacity_factor:g} with strategy.drops_tokens "
                "false, which takes every row; expected one of them left out"
            )
        return
    if split.capacity_factor is None:
        if split.pads_to_capacity:
            raise InputError(
                "strategy.moe_pad_to_capacity: found true without parallelism.capacity_factor, which "
                f"{split.library.title} refuses; expected a factor, as in 1.0"
            )
        return
    if not split.library.drops_tokens:
        is_named = split.library != TRANSFORMERS
        name = split.library.title if is_named else phrase("parallelism.capacity_factor")
        raise InputError(
            f"parallelism.capacity_factor: found {split.capacity_factor:g}, but {name} drops no tokens; "
            "expected it left out"
        )
    if split.dispatcher != "all-to-all":
        raise InputError(
            f"parallelism.capacity_factor: found {split.capacity_factor:g} with dispatcher "
            f"'{split.dispatcher}'; {split.library.title} drops tokens with 'all-to-all' only"
        )


def _count_nodes(
    split: ExpertSplit, parallelism: ParallelismConfig, world_size: int, gpus_per_node: int
) -> int:
    """Nodes of so many GPUs on which the ranks of one expert-parallel group are."""
    expert_parallelism = replace(parallelism, experts=split)
    group = expert_parallelism.expert_mesh(world_size).groups(EXPERT)[0]
    return len({int(rank) // gpus_per_node for rank in group})
