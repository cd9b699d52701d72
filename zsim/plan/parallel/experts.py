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
the ranks first agree on the capacity, which the host reads. Beside tensor parallelism (`drop_tokens`,
`gather_tokens` of moe/mappings.py, after Singh et al. 2023, arXiv 2303.06318) each of its ranks sends its
part of every expert's slots, and all parts are gathered behind the exchange back. Where experts are cut too,
they are also gathered before the products and cut again after them, and every expert has Megatron's two
all-reduces, of its output and of its input's gradient. transformers, kempnerforge: no exchange.

Experts that are modules of their own are those of `deepspeed.moe.layer.MoE` (DeepSpeed 0.19.8
moe/experts.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zsim.cost.kernels.moved_rows import MoveKind
from zsim.operations.experts import Experts
from zsim.operations.grouped_linear import GroupedLinear
from zsim.operations.operation import Role
from zsim.operations.rearrange import Rearrange, SharedOutput
from zsim.operations.router import Router
from zsim.plan.parallel.adapters import add_adapters
from zsim.plan.parallel.expert_modules import (
    pad_quantised_products,
    part_of_stacked,
    row_map_modules,
    sequential_experts,
)
from zsim.plan.parallel.shared_expert_overlap import mark_fork, overlap_shared_experts
from zsim.plan.stage import EXPERT_MODEL, EXPERT_NODE, EXPERT_RAIL
from zsim.specs.model.expert_layer import expert_module_range, has_experts, share_layer_input, shared_output
from zsim.specs.model.spec import (
    Activation,
    Block,
    Exchange,
    ExchangeKind,
    ExchangeLibrary,
    ModelSpec,
    Module,
    Parameter,
)
from zsim.specs.strategy.experts import (
    DEDUPLICATING_DISPATCHERS,
    ExpertSplit,
    expected_partitions,
    partitions_in_turn,
)
from zsim.specs.strategy.parallelism import EXPERT, EXPERT_DATA, EXPERT_TENSOR, TENSOR

# Activations that Megatron multiplies by the scores in the same kernel, by whether they are gated: the fused
# ones of SwiGLU and quick GEGLU (`TEGroupedMLP.bias_act_func`, d98e8a64 core/transformer/moe/experts.py), and
# the squared ReLU with `use_fused_weighted_squared_relu`, as Megatron-Bridge's recipes have it.
_SCORED_IN_ONE_KERNEL = {
    ("silu", True),
    ("swiglu_oai", True),
    ("clamped_quick_gelu", True),
    ("quick_gelu", True),
    ("relu2", False),
}


def expand_experts(model: ModelSpec, split: ExpertSplit) -> ModelSpec:
    """The model of one rank with its routed experts expanded. The model itself if it has none."""
    if not has_experts(model):
        return model
    return model.map_blocks(lambda block: _expand_block(block, split))


def _expand_block(block: Block, split: ExpertSplit) -> Block:
    run = expert_module_range(block)
    if not run:
        return block
    layer_modules = block.modules[run.start : run.stop]
    experts = next(module for module in layer_modules if module.role is Role.EXPERTS)
    router = next(module for module in layer_modules if module.role is Role.ROUTER)
    layer = _Layer(experts, router_of(router, split), split, layer_modules)
    modules = (*block.modules[: run.start], *layer.modules(), *block.modules[run.stop :])
    registration = block.registration
    if registration is not None:
        owners = [
            parameter_owner.name
            for parameter_owner in modules
            if parameter_owner.parameters and parameter_owner.name.startswith(f"{experts.name}.")
        ]
        if split.library.sorts_parameters:
            owners.sort()  # w1, w2, w3
        names = {module.name for module in modules}
        registration = tuple(
            registered
            for name in registration
            for registered in (owners if name == experts.name else [name])
            if registered in names
        )
    expanded = Block(block.kind, modules, registration)
    uses_side_stream = any(module.side_stream for module in modules)
    return mark_fork(expanded, run.start - 1) if uses_side_stream else expanded


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
        assert isinstance(self.experts.op_spec, Experts)
        return self.experts.op_spec

    @property
    def choice(self) -> Router:
        assert isinstance(self.router.op_spec, Router)
        return self.router.op_spec

    @property
    def score(self) -> str:
        """The type of a score that is sent."""
        return "fp32" if self.choice.has_fp32_output else ""

    @property
    def sends_scores(self) -> bool:
        """Whether scores go with the rows to their experts' ranks."""
        return self.split.library.dispatch == "rows and scores"

    @property
    def shared(self) -> SharedOutput:
        """How the output of shared experts is added to the rows' sums. Products between them and the layer's
        width come before that.
        """
        return "none" if self._latent_products else shared_output(self.run)

    @property
    def _latent_products(self) -> list[Module]:
        """The products to and from the width of rows, where that is not the layer's."""
        return [module for module in self.run if module.op_spec.is_duplicated]

    def modules(self) -> list[Module]:
        """The run with all modules that stand for the experts. Megatron runs shared experts first, the others
        where the model has them. Only the first reader of the layer's input keeps it.
        """
        modules: list[Module] = []
        latent = self._latent_products
        for module in self.run:
            if module.role is Role.ROUTER:
                is_replaced = self.split.deals_in_turn and self.split.library.balances_without_gate
                modules += [] if is_replaced else [self.router]
            elif module.role is Role.EXPERTS:
                modules += self._summed_modules()
            elif module not in latent:
                modules.append(module)
        if self.split.library.runs_shared_first:
            routed = (Role.ROUTER, Role.EXPERTS)
            shared = [module for module in self.run if module.role not in routed and module not in latent]
            modules = [*shared, self.router, *self._summed_modules()]
            if self.split.overlaps_shared and shared:
                modules = overlap_shared_experts(
                    shared, self.router, self._summed_modules(), self.experts.name
                )
        return share_layer_input(modules, f"{self.experts.name}.")

    def _summed_modules(self) -> list[Module]:
        """The routed experts with the products to their width and back, and what is added behind those."""
        if not self._latent_products:
            return self._routed_modules()
        entry, exit_product = self._latent_products
        work = Rearrange(
            "add", self.choice.in_features, 0.0, self.split.library.kernels, shared=shared_output(self.run)
        )
        addition = Module(f"{self.experts.name}.sum", work, token_shards=self.experts.token_shards)
        return [entry, *self._routed_modules(), exit_product, addition]

    # -- the way of a row ---------------------------------------------------------------------------------

    def _routed_modules(self) -> list[Module]:
        split, rows = self.split, self.work.top_k * self.split.sent_fraction
        if split.library.dispatch == "slots":
            return self._capacity_slots(rows)
        if split.members == 1 or (split.ranks == 1 and not self.sends_scores):
            products = self._products(rows * split.padding)
            if split.library.sorts_local_rows:
                products = [
                    self._move("sort", 1.0, rows_per_token=rows),
                    *products,
                    self._move("unsort", 1.0, rows_per_token=rows),
                ]
            return [
                self._move("permute", rows, host_waits=split.host_waits),
                *self._row_gradient_sum(rows),
                *products,
                self._move("unpermute", rows, shared=self.shared),
            ]
        if split.dispatcher in DEDUPLICATING_DISPATCHERS:
            return self._library_dispatch()
        return (
            self._all_gather_dispatch() if split.dispatcher == "all-gather" else self._all_to_all_dispatch()
        )

    def _all_gather_dispatch(self) -> list[Module]:
        """[Note: whose dispatch], all-gather."""
        split, members, width = self.split, self.split.members, self.work.in_features
        rows, experts = self.work.top_k / split.ranks * split.imbalance, self.work.num_experts
        return [
            self._layer_exchange("all_gather", None, "map", experts, "bool"),
            self._layer_exchange("all_gather", "reduce_scatter", "scores", experts, self.score),
            self._layer_exchange("all_gather", "reduce_scatter", "tokens", width),
            self._move("permute", rows, rows_per_token=members, host_waits=split.host_waits),
            *self._products(members * rows),
            self._move("unpermute", rows, rows_per_token=members),
            self._layer_exchange("reduce_scatter", "all_gather", "tokens", width, self.score),
            *self._shared_sum(),
        ]

    def _all_to_all_dispatch(self) -> list[Module]:
        """[Note: whose dispatch], all-to-all."""
        split, width, shards = self.split, self.work.in_features, self.split.token_ranks
        sent_rows, computed_rows = (
            self.work.top_k * split.sent_fraction,
            self.work.top_k * split.imbalance * split.tensor,
        )
        exchanged_rows = self.work.top_k * split.exchanged_fraction
        is_shared_by_all = self.sends_scores and split.tensor > 1
        if not self.sends_scores:
            computed_rows = self.work.top_k * split.imbalance
        counts = self._count_exchange()
        modules = [
            self._move("permute", sent_rows, shards=shards),
            *self._row_gradient_sum(sent_rows),
            *counts,
        ]
        modules.append(self._all_to_all("rows", exchanged_rows, width, waits=bool(counts)))
        if self.sends_scores:
            modules.append(self._all_to_all("scores", exchanged_rows, 1, self.score))
        if is_shared_by_all:
            modules.append(self._tensor_exchange("all_gather", "reduce_scatter", computed_rows))
        sorts = not self.sends_scores or self.work.num_experts > split.ranks
        if sorts:
            modules.append(self._move("sort", 1.0, rows_per_token=computed_rows, shards=shards))
        modules += self._products(computed_rows, shards)
        if sorts:
            modules.append(self._move("unsort", 1.0, rows_per_token=computed_rows, shards=shards))
        if is_shared_by_all:
            modules.append(self._tensor_exchange("reduce_scatter", "all_gather", computed_rows, self.score))
        modules.append(self._all_to_all("rows back", exchanged_rows, width, returns=True))
        return [*modules, self._move("unpermute", sent_rows, shared=self.shared)]

    def _capacity_slots(self, rows: float) -> list[Module]:
        """[Note: whose dispatch], DeepSpeed's own layer, with `rows` slots of all experts for each token."""
        split, width, lanes = self.split, self.work.in_features, self.split.token_ranks
        modules: list[Module] = []
        computed = rows / (lanes // split.tensor)
        if split.agrees_on_capacity:
            if split.ranks > 1:
                work = Exchange("all_reduce", None, 0, split.ranks, EXPERT, dtype="int64", numel=1)
                modules.append(self._exchange("all_reduce capacity", work))
            modules.append(self._move("sort", 0.0, host_waits=True))
        modules += [
            self._move("permute", rows),
            *self._lane_exchange(None, "all_gather", "rows' gradients", rows),
        ]
        if lanes > 1:  # its part is contiguous for the exchange
            modules.append(self._lane_copy("drop", rows, shards=lanes))
        if split.ranks > 1:
            modules.append(self._all_to_all("rows", rows, width))
        if split.tensor > 1:
            modules += self._lane_exchange("all_gather", None, "rows", rows)
            modules.append(self._lane_copy("gather rows", rows))
        local = self.work.num_experts // split.ranks
        has_separate_inputs = split.ranks > 1 and local > 1
        if has_separate_inputs:
            modules.append(self._move("sort", 1.0, rows_per_token=computed))
        modules += sequential_experts(
            self.experts, split.library, local, computed / local, has_separate_inputs=has_separate_inputs,
            ranks=split.tensor,
        )  # fmt: skip
        modules.append(self._move("unsort", 1.0, rows_per_token=computed))
        if split.tensor > 1:
            modules += self._lane_exchange(None, "all_gather", "outputs' gradients", rows)
            modules.append(self._lane_copy("drop outputs", rows, shards=lanes))
        if split.ranks > 1:
            modules.append(self._all_to_all("rows back", rows, width, returns=True))
        modules += self._lane_exchange("all_gather", None, "outputs", rows)
        if lanes > 1:
            modules.append(self._lane_copy("gather", rows))
        return [*modules, self._move("unpermute", rows, shared=self.shared)]

    def _lane_copy(self, label: str, rows: float, shards: int = 1) -> Module:
        """The copy of gathered slots into the order of experts, or of a rank's part of them
        (`_gather_tokens`, and `_AllToAll` of what `_drop_tokens` narrows)."""
        move = self._move("unsort", 1.0, rows_per_token=rows, shards=shards)
        return replace(move, name=f"{self.experts.name}.{label}")

    def _lane_exchange(
        self, forward: ExchangeKind | None, backward: ExchangeKind | None, label: str, rows: float
    ) -> list[Module]:
        """The all-gather of the parts that ranks of tensor parallelism have. [] for one rank."""
        lanes = self.split.token_ranks
        work = Exchange(forward, backward, self.work.in_features, lanes, TENSOR)
        return [self._exchange(f"all_gather {label}", work, rows)] if lanes > 1 else []

    def _row_gradient_sum(self, rows: float) -> list[Module]:
        """torchtitan's sum of the rows' gradients, of which each rank that shares an expert's products has a
        part (`TensorParallel`, `ExpertTensorParallel` of distributed/expert_parallel.py)."""
        split = self.split
        if self.sends_scores or split.tensor == 1:
            return []
        work = Exchange(None, "all_reduce", self.work.in_features, split.tensor, EXPERT_TENSOR)
        return [self._exchange("all_reduce rows", work, rows)]

    def _library_dispatch(self) -> list[Module]:
        """[Note: whose dispatch], deepep and hybridep."""
        split, k = self.split, self.work.top_k
        reached = self._reached_partitions(split.ranks) * split.tensor
        received = reached * split.imbalance
        rows = k * split.tensor * split.imbalance / received
        shards = split.token_ranks
        counts = [self._move("sort", 0.0, host_waits=True)] if split.host_waits else []
        return [
            *counts,
            *self._send_tokens(reached),
            *row_map_modules(self.experts, split, received),
            self._move("permute", rows, rows_per_token=received, shards=shards),
            *self._products(received * rows, shards),
            self._move("unpermute", rows, rows_per_token=received, shards=shards),
            *self._return_tokens(reached),
            *self._shared_sum(),
        ]

    def _reached_partitions(self, partitions: int) -> float:
        """Mean number of equal partitions of the experts that hold one of a token's."""
        experts, k, choice = self.work.num_experts, self.work.top_k, self.choice
        if self.split.deals_in_turn:
            return partitions_in_turn(experts, k, partitions)
        return expected_partitions(experts, k, partitions, choice.num_groups, choice.top_groups)

    def _send_tokens(self, reached: float) -> list[Module]:
        """Send a token to every rank that it reaches, across nodes once per node, and on among its ranks.

        Forward makes the rows of the rank's experts, and backward, which adds up a token's gradients on the
        way, the rank's tokens (deepseek-ai/DeepEP 1.2.1 deep_ep/buffer.py, `recv_x` of `dispatch` and
        `combined_x` of `combine`).
        """
        split, group = self.split, self._layer_group()
        received = split.imbalance
        if split.nodes == 1:
            exchange = replace(
                self._library_exchange(split.members, group),
                forward_result=received,
                backward_result=1 / reached,
            )
            return [self._exchange("dispatch tokens", exchange, reached, split.token_ranks)]
        per_node, nodes = split.members // split.nodes, self._reached_partitions(split.nodes)
        forwards = reached * (1 - 1 / per_node) / (nodes * (1 - 1 / split.nodes))
        inter_node = replace(
            self._library_exchange(split.nodes, EXPERT_RAIL, forwards),
            forward_result=0.0 if per_node > 1 else received,
            backward_result=1 / nodes,
        )
        exchanges = [self._exchange("dispatch tokens between nodes", inter_node, nodes, split.token_ranks)]
        if per_node > 1:
            intra_node = replace(
                self._library_exchange(per_node, EXPERT_NODE),
                shares_forwarded_bytes=True,
                forward_result=received,
                backward_result=0.0,
            )
            exchanges.append(self._exchange("dispatch tokens", intra_node, reached, split.token_ranks))
        return exchanges

    def _return_tokens(self, reached: float) -> list[Module]:
        """The way back of `_send_tokens`, whose forward is the other's backward."""
        returned = []
        for module in reversed(self._send_tokens(reached)):
            exchange = module.op_spec
            assert isinstance(exchange, Exchange)
            back = replace(
                exchange,
                forward_result=exchange.backward_result,
                backward_result=exchange.forward_result,
            )
            name = module.name.replace(" dispatch ", " combine ")
            returned.append(replace(module, name=name, op_spec=back))
        return returned

    def _library_exchange(self, ranks: int, group: str, forwards: float = 0.0) -> Exchange:
        work = _all_to_all_exchange(self.work.in_features, ranks, group)
        return replace(work, library=ExchangeLibrary(self.split.dispatcher, forwards))

    def _shared_sum(self) -> list[Module]:
        """The sum with shared experts after the last exchange."""
        return [] if self.shared == "none" else [self._move("add", 0.0, shared=self.shared)]

    def _count_exchange(self) -> list[Module]:
        """The exchange of the rows of each expert. None if all are padded to a capacity."""
        split, experts = self.split, self.work.num_experts
        if not split.host_waits:
            return []
        if self.sends_scores:
            total, group = experts * split.members, self._layer_group()
            work = Exchange("all_gather", None, 0, split.members, group, dtype="int64", numel=total)
            return [self._exchange("all_gather counts", work)]
        dtype = "int32" if split.library.has_int32_counts else "int64"
        work = Exchange("all_to_all", None, 0, split.ranks, EXPERT, dtype=dtype, numel=experts)
        return [self._exchange("all_to_all counts", work)]

    # -- its modules --------------------------------------------------------------------------------------

    def _layer_group(self) -> str:
        """The group of all ranks that share the layer's experts."""
        split = self.split
        if split.tensor > 1 and split.ranks > 1:
            return EXPERT_MODEL
        return EXPERT if split.ranks > 1 else EXPERT_TENSOR

    def _all_to_all(
        self,
        label: str,
        rows: float,
        width: int,
        dtype: str = "",
        *,
        waits: bool = False,
        returns: bool = False,
    ) -> Module:
        split = self.split
        loads = split.loads if len(split.loads) > 1 and split.capacity_factor is None else ()
        work = replace(
            _all_to_all_exchange(width, split.ranks, EXPERT), dtype=dtype, loads=loads, returns=returns
        )
        kind: ExchangeKind | None = None if split.ranks == 1 else "all_to_all"
        exchange = replace(work, forward=kind, backward=kind)
        return replace(
            self._exchange(f"all_to_all {label}", exchange, rows, split.token_ranks), host_waits=waits
        )

    def _layer_exchange(
        self, forward: ExchangeKind, backward: ExchangeKind | None, label: str, width: int, dtype: str = ""
    ) -> Module:
        """Tokens gathered from all ranks that share the layer's experts, or their sums scattered."""
        members = self.split.members
        work = Exchange(forward, backward, width, members, self._layer_group(), dtype=dtype)
        return self._exchange(f"{forward} {label}", work, members)

    def _tensor_exchange(
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
        rows_per_token: float = 1.0,
        shards: int = 1,
        shared: SharedOutput = "none",
        host_waits: bool = False,
    ) -> Module:
        split = self.split
        work = Rearrange(
            kind,
            self.work.in_features,
            rows,
            split.library.kernels,
            shared,
            self.work.num_experts,
            split.padding,
        )
        return Module(
            f"{self.experts.name}.{kind}",
            work,
            token_shards=self.experts.token_shards * shards,
            rows_per_token=float(rows_per_token),
            host_waits=host_waits,
        )

    def _products(self, rows: float, shards: int = 1) -> list[Module]:
        """The experts' two products around their activation, on `rows` rows per token."""
        split, work, name = self.split, self.work, self.experts.name
        hidden, features = work.in_features, work.expert_features // split.tensor
        stacked = [parameter for parameter in self.experts.parameters if "lora_" not in parameter.name]
        downs, ups = (
            [parameter for parameter in stacked if ("down" in parameter.name) == is_down]
            for is_down in (True, False)
        )
        if split.library.separates_gate and work.is_gated:
            first = [self._grouped("w1", hidden, features, ups), self._grouped("w3", hidden, features, ups)]
            first[1] = replace(first[1], shares_input=True)
            last = self._grouped("w2", features, hidden, downs)
        else:
            wide = features * (2 if work.is_gated else 1)
            first = [self._grouped("gate_up_proj", hidden, wide, ups)]
            last = self._grouped("down_proj", features, hidden, downs)
        act = (
            "clamped_quick_gelu" if split.library.clamps_quick_gelu and work.act == "swiglu_oai" else work.act
        )
        is_scored = split.library.scores_activations and (act, work.is_gated) not in _SCORED_IN_ONE_KERNEL
        middle = Module(f"{name}.act_fn", Activation(features, work.is_gated, act, is_scored))
        has_bias = any(parameter.name == "bias" for parameter in last.parameters)
        if has_bias and split.library.scales_biases and split.kernel != "loop":
            assert isinstance(last.op_spec, GroupedLinear)
            in_fp32 = self.choice.has_fp32_output or split.dispatcher in DEDUPLICATING_DISPATCHERS
            last = replace(last, op_spec=replace(last.op_spec, scored_bias_bytes=4 if in_fp32 else 2))
        cut = self.experts.token_shards * shards
        products = [
            replace(product, token_shards=cut, rows_per_token=float(rows))
            for product in (*first, middle, last)
        ]
        return add_adapters(pad_quantised_products(products, split), self.experts, split)

    def _grouped(
        self, name: str, in_features: int, out_features: int, stacked: Sequence[Parameter]
    ) -> Module:
        """A product of all experts of a rank. `stacked` are the model's parameters of which it is a part."""
        split, local = self.split, self.work.num_experts // self.split.ranks
        belongs_to = EXPERT_DATA if split.has_expert_groups else ""
        kinds: list[tuple[str, tuple[int, ...]]] = [("weight", (local, out_features, in_features))]
        if any(len(parameter.shape) == 2 for parameter in stacked):
            kinds.append(("bias", (local, out_features)))
        parameters = tuple(
            part_of_stacked(stacked, parameter_name, shape, belongs_to) for parameter_name, shape in kinds
        )
        has_even_rows = split.pads_to_capacity or split.padding > 1
        work = GroupedLinear(local, in_features, out_features, split.kernel, has_even_rows=has_even_rows)
        return Module(f"{self.experts.name}.{name}", work, parameters)


def _all_to_all_exchange(width: int, ranks: int, group: str) -> Exchange:
    return Exchange("all_to_all", "all_to_all", width, ranks, group)


def router_of(module: Module, split: ExpertSplit) -> Module:
    """The model's router as a framework's code runs it."""
    work = module.op_spec
    assert isinstance(work, Router)
    in_fp32 = work.in_fp32 if split.gate_in_fp32 is None else split.gate_in_fp32
    router = replace(
        work,
        library=split.library.kernels,
        in_fp32=in_fp32 and not split.library.casts_gate_output,
        has_fp32_output=in_fp32,
        has_auxiliary_loss=work.has_auxiliary_loss or split.has_auxiliary_loss,
    )
    return replace(module, op_spec=router)
