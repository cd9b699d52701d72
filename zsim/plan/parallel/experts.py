"""Mixture-of-experts layers as one rank runs them: the modules that stand for `Experts`, and their exchanges.

# [Note: whose dispatch]
Of N tokens a rank has, each goes to k experts. e ranks have E/e experts each, whose products t ranks share.
megatron, all-gather: the map of tokens to experts, the scores and the tokens of all e t ranks are gathered,
each rank takes the rows of its experts, and their sums are reduce-scattered in the scores' type. all-to-all:
the counts are gathered and read by the host. N k rows and their scores go to their experts' ranks, are
gathered among the t, sorted by expert, and go back the same way (Megatron-Core 0.16.1
core/transformer/moe/token_dispatcher.py). Where an expert has a capacity, that many rows of each sender go.
deepep, hybridep: a token goes once to every rank that has an expert of its (t ranks for each), across nodes
once to every node, whose GPUs pass it on meanwhile. Rows are made, and summed up, there
(`MoEFlexTokenDispatcher`; deepseek-ai/DeepEP 1.2.1 csrc/kernels/layout.cu, internode.cu). The host waits.
torchtitan (0.2.2 distributed/expert_parallel.py `ExpertParallel`): an all-to-all of counts, which the host
reads, then one of rows, which are padded and sorted in one gather. Scores are not sent. Tensor-parallel ranks
that all have the layer's tokens each send a part of them, or, where they share the experts' products, all.
DeepSpeed's AutoEP (0.19.8 module_inject/auto_ep_layer.py) does the same, and sorts rows also where no other
rank has experts. DeepSpeed's own layer (moe/sharded_moe.py `MOELayer`): every expert has a row for each slot
of its capacity, filled or not, in an all-to-all of equal parts and one back. Its experts are modules that run
one after the other on slices of what arrived, which are copied where they are not contiguous. Without a limit
the ranks first agree on the capacity, which the host reads. transformers, kempnerforge: no exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.dataclass import dataclass
from zsim.plan.parallel.expert_adapters import with_adapters_on
from zsim.plan.parallel.expert_modules import (
    experts_one_by_one,
    map_of_rows,
    padded_when_quantised,
    part_of,
    router_of,
)
from zsim.plan.parallel.shared_beside import beside_exchanges, with_fork
from zsim.plan.stage import EXPERT_MODEL, EXPERT_NODE, EXPERT_RAIL
from zsim.specs.model.expert_run import expert_run, has_experts, keeping_input_once, shared_output
from zsim.specs.model.experts import Experts, GroupedLinear, MoveKind, Rearrange, Router, SharedOutput
from zsim.specs.model.spec import (
    Activation,
    Block,
    Exchange,
    ExchangeKind,
    ModelSpec,
    Module,
    Parameter,
)
from zsim.specs.model.works import ExchangeLibrary
from zsim.specs.strategy.experts import MERGING, ExpertSplit, parts_reached
from zsim.specs.strategy.mesh import EXPERT, EXPERT_DATA, EXPERT_TENSOR


def with_experts(model: ModelSpec, split: ExpertSplit) -> ModelSpec:
    """The model of one rank with its routed experts expanded. The model itself if it has none."""
    if not has_experts(model):
        return model
    return model.with_each_block(lambda block: _expanded(block, split))


def _expanded(block: Block, split: ExpertSplit) -> Block:
    run = expert_run(block)
    if not run:
        return block
    inside = block.modules[run.start : run.stop]
    experts = next(one for one in inside if isinstance(one.work, Experts))
    router = next(one for one in inside if isinstance(one.work, Router))
    layer = _Layer(experts, router_of(router, split), split, inside)
    modules = (*block.modules[: run.start], *layer.modules(), *block.modules[run.stop :])
    registration = block.registration
    if registration is not None:
        owners = [one.name for one in modules if one.parameters and one.name.startswith(f"{experts.name}.")]
        if split.library == "autoep":
            owners.sort()  # w1, w2, w3, as `GroupedExperts` registers them
        registration = tuple(
            one for name in registration for one in (owners if name == experts.name else [name])
        )
    whole = Block(block.kind, modules, registration)
    is_beside = any(one.side for one in modules)
    return with_fork(whole, run.start - 1) if is_beside else whole


@dataclass(frozen=True)
class _Layer:
    """One layer of experts."""

    experts: Module
    router: Module
    split: ExpertSplit
    run: tuple[Module, ...]
    """The modules that hold experts and router, with shared experts."""

    @property
    def work(self) -> Experts:
        assert isinstance(self.experts.work, Experts)
        return self.experts.work

    @property
    def choice(self) -> Router:
        assert isinstance(self.router.work, Router)
        return self.router.work

    @property
    def score(self) -> str:
        """The type of a score that is sent."""
        return "fp32" if self.choice.has_fp32_output else ""

    @property
    def shared(self) -> SharedOutput:
        """How the output of shared experts is added."""
        return shared_output(self.run)

    def modules(self) -> list[Module]:
        """The run with all modules that stand for the experts. Megatron runs shared experts first, the others
        where the model has them. Only the first reader of the layer's input keeps it.
        """
        found: list[Module] = []
        for one in self.run:
            if isinstance(one.work, Router):
                found.append(self.router)
            elif isinstance(one.work, Experts):
                found += self._routed()
            else:
                found.append(one)
        if self.split.is_megatron:
            shared = [one for one in self.run if not isinstance(one.work, Router | Experts)]
            found = [*shared, self.router, *self._routed()]
            if self.split.overlaps_shared and shared:
                found = beside_exchanges(shared, self.router, self._routed(), self.experts.name)
        return keeping_input_once(found, f"{self.experts.name}.")

    # -- the way of a row ---------------------------------------------------------------------------------

    def _routed(self) -> list[Module]:
        split, rows = self.split, self.work.top_k * self.split.sent
        if split.library == "deepspeed-moe":
            return self._slots(rows)
        if split.members == 1 or (split.ranks == 1 and not split.is_megatron):
            found = self._products(rows * split.padding)
            if split.library == "autoep":
                found = [self._move("sort", 1.0, seen=rows), *found, self._move("unsort", 1.0, seen=rows)]
            return [
                self._move("permute", rows, host_waits=split.host_waits),
                *self._summed(rows),
                *found,
                self._move("unpermute", rows, shared=self.shared),
            ]
        if split.dispatcher in MERGING:
            return self._merged()
        return self._gathered() if split.dispatcher == "all-gather" else self._exchanged()

    def _gathered(self) -> list[Module]:
        """[Note: whose dispatch], all-gather."""
        split, members, width = self.split, self.split.members, self.work.in_features
        own, experts = self.work.top_k / split.ranks * split.imbalance, self.work.num_experts
        return [
            self._among_all("all_gather", None, "map", experts, "bool"),
            self._among_all("all_gather", "reduce_scatter", "scores", experts, self.score),
            self._among_all("all_gather", "reduce_scatter", "tokens", width),
            self._move("permute", own, seen=members, host_waits=split.host_waits),
            *self._products(members * own),
            self._move("unpermute", own, seen=members),
            self._among_all("reduce_scatter", "all_gather", "tokens", width, self.score),
            *self._added(),
        ]

    def _exchanged(self) -> list[Module]:
        """[Note: whose dispatch], all-to-all."""
        split, width, shards = self.split, self.work.in_features, self.split.token_ranks
        sent, computed = self.work.top_k * split.sent, self.work.top_k * split.imbalance * split.tensor
        exchanged = self.work.top_k * split.exchanged
        is_shared_by_all = split.is_megatron and split.tensor > 1
        if not split.is_megatron:
            computed = self.work.top_k * split.imbalance
        counts = self._counts()
        found = [self._move("permute", sent, shards=shards), *self._summed(sent), *counts]
        found.append(self._all_to_all("rows", exchanged, width, waits=bool(counts)))
        if split.is_megatron:
            found.append(self._all_to_all("scores", exchanged, 1, self.score))
        if is_shared_by_all:
            found.append(self._among_tensor("all_gather", "reduce_scatter", computed))
        sorts = not split.is_megatron or self.work.num_experts > split.ranks
        if sorts:
            found.append(self._move("sort", 1.0, seen=computed, shards=shards))
        found += self._products(computed, shards)
        if sorts:
            found.append(self._move("unsort", 1.0, seen=computed, shards=shards))
        if is_shared_by_all:
            found.append(self._among_tensor("reduce_scatter", "all_gather", computed, self.score))
        found.append(self._all_to_all("rows back", exchanged, width, returns=True))
        return [*found, self._move("unpermute", sent, shared=self.shared)]

    def _slots(self, rows: float) -> list[Module]:
        """[Note: whose dispatch], DeepSpeed's own layer, with `rows` slots of all experts for each token."""
        split, width, found = self.split, self.work.in_features, []
        if split.agrees_on_capacity:
            if split.ranks > 1:
                work = Exchange("all_reduce", None, 0, split.ranks, EXPERT, dtype="int64", numel=1)
                found.append(self._exchange("all_reduce capacity", work))
            found.append(self._move("sort", 0.0, host_waits=True))
        found.append(self._move("permute", rows))
        if split.ranks > 1:
            found.append(self._all_to_all("rows", rows, width))
        local = self.work.num_experts // split.ranks
        is_apart = split.ranks > 1 and local > 1
        if is_apart:
            found.append(self._move("sort", 1.0, seen=rows))
        found += experts_one_by_one(self.experts, local, rows / local, is_apart=is_apart)
        found.append(self._move("unsort", 1.0, seen=rows))
        if split.ranks > 1:
            found.append(self._all_to_all("rows back", rows, width, returns=True))
        return [*found, self._move("unpermute", rows, shared=self.shared)]

    def _summed(self, rows: float) -> list[Module]:
        """torchtitan's sum of the rows' gradients, of which each rank that shares an expert's products has a
        part (`TensorParallel`, `ExpertTensorParallel` of distributed/expert_parallel.py)."""
        split = self.split
        if split.is_megatron or split.tensor == 1:
            return []
        work = Exchange(None, "all_reduce", self.work.in_features, split.tensor, EXPERT_TENSOR)
        return [self._exchange("all_reduce rows", work, rows)]

    def _merged(self) -> list[Module]:
        """[Note: whose dispatch], deepep and hybridep."""
        split, choice, k = self.split, self.choice, self.work.top_k
        groups = choice.num_groups, choice.top_groups
        reached = parts_reached(self.work.num_experts, k, split.ranks, *groups) * split.tensor
        got = reached * split.imbalance
        rows = k * split.tensor * split.imbalance / got
        shards = split.token_ranks
        counts = [self._move("sort", 0.0, host_waits=True)] if split.host_waits else []
        return [
            *counts,
            *self._to_ranks("dispatch", reached),
            *map_of_rows(self.experts, split, got),
            self._move("permute", rows, seen=got, shards=shards),
            *self._products(got * rows, shards),
            self._move("unpermute", rows, seen=got, shards=shards),
            *reversed(self._to_ranks("combine", reached)),
            *self._added(),
        ]

    def _to_ranks(self, name: str, reached: float) -> list[Module]:
        """Send a token to every rank that it reaches, across nodes once per node, and on among its ranks."""
        split, group = self.split, self._whole_group()
        if split.nodes == 1:
            whole = self._by_library(split.members, group)
            return [self._exchange(f"{name} tokens", whole, reached, split.token_ranks)]
        choice, per_node = self.choice, split.members // split.nodes
        nodes = parts_reached(
            self.work.num_experts, self.work.top_k, split.nodes, choice.num_groups, choice.top_groups
        )
        forwards = reached * (1 - 1 / per_node) / (nodes * (1 - 1 / split.nodes))
        between = self._by_library(split.nodes, EXPERT_RAIL, forwards)
        found = [self._exchange(f"{name} tokens between nodes", between, nodes, split.token_ranks)]
        if per_node > 1:
            inside = replace(self._by_library(per_node, EXPERT_NODE), is_beneath=True)
            found.append(self._exchange(f"{name} tokens", inside, reached, split.token_ranks))
        return found

    def _by_library(self, ranks: int, group: str, forwards: float = 0.0) -> Exchange:
        work = _both(self.work.in_features, ranks, group)
        return replace(work, library=ExchangeLibrary(self.split.dispatcher, forwards))

    def _added(self) -> list[Module]:
        """The sum with shared experts after the last exchange."""
        return [] if self.shared == "none" else [self._move("add", 0.0, shared=self.shared)]

    def _counts(self) -> list[Module]:
        """The exchange of the rows of each expert. None if all are padded to a capacity."""
        split, experts = self.split, self.work.num_experts
        if not split.host_waits:
            return []
        if split.is_megatron:
            total, group = experts * split.members, self._whole_group()
            work = Exchange("all_gather", None, 0, split.members, group, dtype="int64", numel=total)
            return [self._exchange("all_gather counts", work)]
        dtype = "int32" if split.library == "autoep" else "int64"
        work = Exchange("all_to_all", None, 0, split.ranks, EXPERT, dtype=dtype, numel=experts)
        return [self._exchange("all_to_all counts", work)]

    # -- its modules --------------------------------------------------------------------------------------

    def _whole_group(self) -> str:
        """The group of all ranks that share the layer's experts."""
        split = self.split
        if split.tensor > 1 and split.ranks > 1:
            return EXPERT_MODEL
        return EXPERT if split.ranks > 1 else EXPERT_TENSOR

    def _all_to_all(
        self,
        what: str,
        rows: float,
        width: int,
        dtype: str = "",
        *,
        waits: bool = False,
        returns: bool = False,
    ) -> Module:
        split = self.split
        loads = split.loads if len(split.loads) > 1 and split.capacity_factor is None else ()
        work = replace(_both(width, split.ranks, EXPERT), dtype=dtype, loads=loads, returns=returns)
        kind: ExchangeKind | None = None if split.ranks == 1 else "all_to_all"
        made = replace(work, forward=kind, backward=kind)
        return replace(self._exchange(f"all_to_all {what}", made, rows, split.token_ranks), host_waits=waits)

    def _among_all(
        self, forward: ExchangeKind, backward: ExchangeKind | None, what: str, width: int, dtype: str = ""
    ) -> Module:
        """Tokens gathered from all ranks that share the layer's experts, or their sums scattered."""
        members = self.split.members
        work = Exchange(forward, backward, width, members, self._whole_group(), dtype=dtype)
        return self._exchange(f"{forward} {what}", work, members)

    def _among_tensor(
        self, forward: ExchangeKind, backward: ExchangeKind, rows: float, dtype: str = ""
    ) -> Module:
        """Rows gathered among the ranks that share an expert's products, or their sums scattered."""
        width, ranks = self.work.in_features, self.split.tensor
        return self._exchange(
            f"{forward} rows", Exchange(forward, backward, width, ranks, EXPERT_TENSOR, dtype=dtype), rows
        )

    def _exchange(self, name: str, work: Exchange, rows: float = 1.0, shards: int = 1) -> Module:
        return Module(
            f"{self.experts.name} {name}",
            work,
            token_shards=self.experts.token_shards * shards,
            rows_per_token=float(rows),
        )

    def _move(
        self,
        kind: MoveKind,
        rows: float,
        *,
        seen: float = 1.0,
        shards: int = 1,
        shared: SharedOutput = "none",
        host_waits: bool = False,
    ) -> Module:
        split = self.split
        work = Rearrange(
            kind, self.work.in_features, rows, split.library, shared, self.work.num_experts, split.padding
        )
        return Module(
            f"{self.experts.name}.{kind}",
            work,
            token_shards=self.experts.token_shards * shards,
            rows_per_token=float(seen),
            host_waits=host_waits,
        )

    def _products(self, rows: float, shards: int = 1) -> list[Module]:
        """The experts' two products around their activation, on `rows` rows per token."""
        split, work, name = self.split, self.work, self.experts.name
        hidden, features = work.in_features, work.expert_features // split.tensor
        stacked = [one for one in self.experts.parameters if "lora_" not in one.name]
        downs, ups = ([one for one in stacked if ("down" in one.name) == which] for which in (True, False))
        if split.library in ("torchtitan", "autoep") and work.is_gated:
            first = [self._grouped("w1", hidden, features, ups), self._grouped("w3", hidden, features, ups)]
            first[1] = replace(first[1], shares_input=True)
            last = self._grouped("w2", features, hidden, downs)
        else:
            wide = features * (2 if work.is_gated else 1)
            first = [self._grouped("gate_up_proj", hidden, wide, ups)]
            last = self._grouped("down_proj", features, hidden, downs)
        act = "clamped_quick_gelu" if split.is_megatron and work.act == "swiglu_oai" else work.act
        middle = Module(f"{name}.act_fn", Activation(features, work.is_gated, act))
        has_bias = any(one.name == "bias" for one in last.parameters)
        if has_bias and split.is_megatron and split.kernel == "streams":
            assert isinstance(last.work, GroupedLinear)
            in_fp32 = self.choice.has_fp32_output or split.dispatcher in MERGING
            last = replace(last, work=replace(last.work, scored_bias_bytes=4 if in_fp32 else 2))
        cut = self.experts.token_shards * shards
        seen = [replace(one, token_shards=cut, rows_per_token=float(rows)) for one in (*first, middle, last)]
        return with_adapters_on(padded_when_quantised(seen, split), self.experts, split)

    def _grouped(self, name: str, given: int, made: int, stacked: Sequence[Parameter]) -> Module:
        """A product of all experts of a rank. `stacked` are the model's parameters of which it is a part."""
        split, local = self.split, self.work.num_experts // self.split.ranks
        belongs_to = EXPERT_DATA if split.has_own_ranks else ""
        kinds: list[tuple[str, tuple[int, ...]]] = [("weight", (local, made, given))]
        if any(len(one.shape) == 2 for one in stacked):
            kinds.append(("bias", (local, made)))
        parameters = tuple(part_of(stacked, one, shape, belongs_to) for one, shape in kinds)
        work = GroupedLinear(local, given, made, split.kernel)
        return Module(f"{self.experts.name}.{name}", work, parameters)


def _both(width: int, ranks: int, group: str) -> Exchange:
    return Exchange("all_to_all", "all_to_all", width, ranks, group)
