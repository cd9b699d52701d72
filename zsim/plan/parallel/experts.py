"""Mixture-of-experts layers as one rank runs them: what stands for `Experts`, and its exchanges.

# [Note: whose dispatch]
Of N tokens a rank has, each goes to k experts; e ranks have E/e experts each, whose products t ranks share.
megatron, all-gather: the map of tokens to experts, the scores and the tokens of all e t ranks are gathered,
each rank takes the rows of its experts, and their sums are reduce-scattered in the scores' type. all-to-all:
the counts are gathered and read by the host; N k rows and their scores go to their experts' ranks, are
gathered among the t, sorted by expert, and go back the same way (Megatron-Core 0.16.1
core/transformer/moe/token_dispatcher.py). Where an expert has a capacity, that many rows of each sender go.
torchtitan (0.2.2 distributed/expert_parallel.py `ExpertParallel`): an all-to-all of counts, which the host
reads, then one of rows, which are padded and sorted in one gather; scores stay at home.
transformers: no exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zsim.specs.model.experts import Experts, GroupedLinear, Rearrange, Router
from zsim.specs.model.spec import (
    Activation,
    Block,
    Exchange,
    Linear,
    ModelSpec,
    Module,
    Norm,
    Parameter,
    Residual,
)
from zsim.specs.strategy.experts import EXPERT, EXPERT_MODEL, EXPERT_TENSOR, ExpertSplit


def has_experts(model: ModelSpec) -> bool:
    """Whether any layer routes tokens to experts."""
    return any(isinstance(module.work, Experts) for block in model.blocks for module in block.modules)


def with_experts(model: ModelSpec, split: ExpertSplit) -> ModelSpec:
    """The model of one rank with its routed experts as what runs; the model itself if it has none."""
    if not has_experts(model):
        return model
    blocks = {id(block): _expanded(block, split) for block in model.blocks}
    return replace(model, blocks=tuple(blocks[id(block)] for block in model.blocks))


def _expanded(block: Block, split: ExpertSplit) -> Block:
    place = next((n for n, one in enumerate(block.modules) if isinstance(one.work, Experts)), None)
    if place is None:
        return block
    first, end = _run(block.modules, place)
    layer = _Layer(block.modules[place], split, block.modules[first:end])
    modules = (*block.modules[:first], *layer.modules(), *block.modules[end:])
    registration = block.registration
    if registration is not None:
        owners = [one.name for one in modules if one.parameters and isinstance(one.work, GroupedLinear)]
        registration = tuple(
            one for name in registration for one in (owners if name == layer.experts.name else [name])
        )
    return Block(block.kind, modules, registration)


def _run(modules: Sequence[Module], place: int) -> tuple[int, int]:
    """The first and the end of the modules of a layer of experts: between the norm before and the residual
    behind."""
    first = max(n for n in range(place) if isinstance(modules[n].work, Norm | Residual)) + 1
    end = next(n for n in range(place, len(modules)) if isinstance(modules[n].work, Norm | Residual))
    return first, end


@dataclass(frozen=True)
class _Layer:
    """One layer of experts: the module of all `experts`, and its `run` with router and shared experts."""

    experts: Module
    split: ExpertSplit
    run: tuple[Module, ...]

    @property
    def work(self) -> Experts:
        assert isinstance(self.experts.work, Experts)
        return self.experts.work

    @property
    def is_megatron(self) -> bool:
        return self.split.library.startswith("megatron")

    def modules(self) -> list[Module]:
        """The run with all that stands for the experts; Megatron runs shared experts first, the others where
        the model has them. Only the first reader of the layer's input keeps it."""
        router = [self._router(one) for one in self.run if isinstance(one.work, Router)]
        shared = [one for one in self.run if not isinstance(one.work, Router | Experts)]
        routed = self._routed()
        ordered: list[Module] = []
        if self.is_megatron:
            ordered = [*shared, *router, *routed]
        else:
            for one in self.run:
                if isinstance(one.work, Router):
                    ordered += router
                elif isinstance(one.work, Experts):
                    ordered += routed
                else:
                    ordered.append(one)
        return _keeping_input_once(ordered, self.experts.name)

    def _router(self, module: Module) -> Module:
        work, split = module.work, self.split
        assert isinstance(work, Router)
        in_fp32 = work.in_fp32 if split.gate_in_fp32 is None else split.gate_in_fp32
        own = replace(
            work,
            library=split.library,
            in_fp32=in_fp32 and not self.is_megatron,
            has_fp32_output=in_fp32,
            has_auxiliary_loss=work.has_auxiliary_loss or split.has_auxiliary_loss,
        )
        return replace(module, work=own)

    def _shared(self) -> str:
        products = [one.work for one in self.run if isinstance(one.work, Linear)]
        if not products:
            return "none"
        return "gated" if any(work.out_features == 1 for work in products) else "added"

    # -- the way of a row ---------------------------------------------------------------------------------

    def _routed(self) -> list[Module]:
        split, k = self.split, self.work.top_k
        if split.members == 1:
            taken = k if split.capacity_factor is None else k * min(split.imbalance, split.capacity_factor)
            rows = k * split.capacity_factor if split.pads_to_capacity and split.capacity_factor else taken
            rows = float(rows if split.capacity_factor is not None else k)
            return [
                self._move("permute", rows, host_waits=split.host_waits),
                *self._products(rows),
                self._move("unpermute", rows, shares=True),
            ]
        if self.is_megatron and split.dispatcher == "all-gather":
            return self._gathered()
        return self._exchanged()

    def _gathered(self) -> list[Module]:
        """[Note: whose dispatch], all-gather."""
        split, members, width = self.split, self.split.members, self.work.in_features
        group = EXPERT_MODEL if split.tensor > 1 else EXPERT
        score = "fp32" if self._has_fp32_scores() else ""
        own = self.work.top_k / split.ranks * split.imbalance

        def exchange(what: str, elements: int, dtype: str, backward: bool) -> Module:
            kind = "reduce_scatter" if backward else None
            work = Exchange("all_gather", kind, elements, members, group, dtype=dtype)  # type: ignore[arg-type]
            return self._module(f"all_gather {what}", work, rows=members)

        back = Exchange("reduce_scatter", "all_gather", width, members, group, dtype=score)
        return [
            exchange("map", self.work.num_experts, "bool", False),
            exchange("scores", self.work.num_experts, score, True),
            exchange("tokens", width, "", True),
            self._move("permute", own, seen=members, host_waits=split.host_waits),
            *self._products(members * own),
            self._move("unpermute", own, seen=members, shares=True),
            self._module("reduce_scatter tokens", back, rows=members),
        ]

    def _exchanged(self) -> list[Module]:
        """[Note: whose dispatch], all-to-all."""
        split, width, titan = self.split, self.work.in_features, not self.is_megatron
        sent = self.work.top_k * self._sent()
        received = self.work.top_k * split.imbalance
        computed = received * split.tensor
        has_shares = self._shared() != "none"
        counts = self._counts()
        there = self._all_to_all("rows", sent, width, "", waits=bool(counts))
        found = [self._move("permute", sent), *counts, there]
        if self.is_megatron:
            score = "fp32" if self._has_fp32_scores() else ""
            found.append(self._all_to_all("scores", sent, 1, score, waits=False))
        if split.tensor > 1:
            found.append(self._among("all_gather", computed))
        sorts = titan or self.work.num_experts > split.ranks
        found += [self._move("sort", 1.0, seen=computed)] if sorts else []
        found += self._products(computed)
        found += [self._move("unsort", 1.0, seen=computed)] if sorts else []
        if split.tensor > 1:
            found.append(self._among("reduce_scatter", computed))
        found.append(self._all_to_all("rows back", sent, width, "", waits=False, returns=True))
        return [*found, self._move("unpermute", sent, shares=has_shares)]

    def _sent(self) -> float:
        """Rows that a rank sends for each of its tokens' choices."""
        capacity = self.split.capacity_factor
        if capacity is None:
            return 1.0
        return capacity if self.split.pads_to_capacity else min(1.0, capacity)

    def _counts(self) -> list[Module]:
        """The exchange of the rows of each expert; none if all are padded to a capacity."""
        split, experts = self.split, self.work.num_experts
        if not split.host_waits:
            return []
        if self.is_megatron:
            group = EXPERT_MODEL if split.tensor > 1 else EXPERT
            total = experts * split.members
            work = Exchange("all_gather", None, 0, split.members, group, dtype="int64", numel=total)
            return [self._module("all_gather counts", work)]
        work = Exchange("all_to_all", None, 0, split.ranks, EXPERT, dtype="int64", numel=experts)
        return [self._module("all_to_all counts", work)]

    def _all_to_all(
        self, what: str, rows: float, width: int, dtype: str, *, waits: bool, returns: bool = False
    ) -> Module:
        split = self.split
        loads = split.loads if len(split.loads) > 1 and split.capacity_factor is None else ()
        work = Exchange(
            "all_to_all", "all_to_all", width, split.ranks, EXPERT, dtype=dtype, loads=loads, returns=returns
        )
        return replace(self._module(f"all_to_all {what}", work, rows=rows), host_waits=waits)

    def _among(self, kind: str, rows: float) -> Module:
        """Rows gathered among the ranks that share an expert's products, or their sums scattered."""
        ranks, width = self.split.tensor, self.work.in_features
        if kind == "all_gather":
            work = Exchange("all_gather", "reduce_scatter", width, ranks, EXPERT_TENSOR)
        else:
            dtype = "fp32" if self._has_fp32_scores() else ""
            work = Exchange("reduce_scatter", "all_gather", width, ranks, EXPERT_TENSOR, dtype=dtype)
        return self._module(f"{kind} rows", work, rows=rows)

    def _has_fp32_scores(self) -> bool:
        routers = [one for one in self.run if isinstance(one.work, Router)]
        work = self._router(routers[0]).work
        return isinstance(work, Router) and work.has_fp32_output

    # -- its modules --------------------------------------------------------------------------------------

    def _module(self, name: str, work: Exchange, *, rows: float = 1.0) -> Module:
        shards = self.experts.token_shards
        return Module(f"{self.experts.name} {name}", work, token_shards=shards, rows_per_token=float(rows))

    def _move(
        self, kind: str, rows: float, *, seen: float = 1.0, shares: bool = False, host_waits: bool = False
    ) -> Module:
        shared = self._shared() if shares else "none"
        work = Rearrange(kind, self.work.in_features, rows, self.split.library, shared)  # type: ignore[arg-type]
        return Module(
            f"{self.experts.name}.{kind}",
            work,
            token_shards=self.experts.token_shards,
            rows_per_token=float(seen),
            host_waits=host_waits,
        )

    def _products(self, rows: float) -> list[Module]:
        """The experts' two products around their activation, on `rows` rows per token."""
        split, work, name = self.split, self.work, self.experts.name
        hidden, features = work.in_features, work.expert_features // split.tensor
        local = work.num_experts // split.ranks
        downs = [one for one in self.experts.parameters if "down" in one.name]
        ups = [one for one in self.experts.parameters if "down" not in one.name]
        wide = features * (2 if work.is_gated else 1)
        if split.library == "torchtitan" and work.is_gated:
            first = [
                self._grouped("w1", hidden, features, local, rows, ups, 2),
                replace(self._grouped("w3", hidden, features, local, rows, ups, 2), shares_input=True),
            ]
            last = self._grouped("w2", features, hidden, local, rows, downs)
        else:
            first = [self._grouped("gate_up_proj", hidden, wide, local, rows, ups)]
            last = self._grouped("down_proj", features, hidden, local, rows, downs)
        act = Activation(features, work.is_gated, work.act)
        shards = self.experts.token_shards
        middle = Module(f"{name}.act_fn", act, token_shards=shards, rows_per_token=float(rows))
        return [*first, middle, last]

    def _grouped(
        self,
        name: str,
        given: int,
        made: int,
        local: int,
        rows: float,
        stacked: Sequence[Parameter],
        parts: int = 1,
    ) -> Module:
        """A product of all experts of a rank. `stacked`: the parameters of all experts and ranks, of which
        this product is one of `parts`."""
        split = self.split
        has_bias = any(len(one.shape) == 2 for one in stacked)
        kinds = [("weight", (local, made, given)), *([("bias", (local, made))] if has_bias else [])]
        trainable = all(one.trainable for one in stacked)
        parameters = tuple(Parameter(one, shape, trainable=trainable) for one, shape in kinds)
        return Module(
            f"{self.experts.name}.{name}",
            GroupedLinear(local, given, made, split.kernel),
            parameters,
            token_shards=self.experts.token_shards,
            rows_per_token=float(rows),
        )


def _keeping_input_once(modules: Sequence[Module], experts: str) -> list[Module]:
    """The modules of a layer, of which the first that reads the layer's input keeps it: the router, the gate
    of shared experts, and the products before their activation."""
    found: list[Module] = []
    is_kept = False
    for number, module in enumerate(modules):
        is_reader = isinstance(module.work, Router) or (
            isinstance(module.work, Linear) and not _follows_activation(modules, number)
        )
        if is_reader:
            module = replace(module, shares_input=is_kept)
            is_kept = True
        found.append(module)
    return found


def _follows_activation(modules: Sequence[Module], number: int) -> bool:
    before = [one for one in modules[:number] if not isinstance(one.work, Exchange)]
    return bool(before) and isinstance(before[-1].work, Activation)
