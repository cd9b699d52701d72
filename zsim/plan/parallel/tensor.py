"""Tensor parallelism: the model that one of t ranks computes, with the collectives between its modules.

In a block the products that read the residual stream are cut along their outputs ("column"), the product that
writes to it along its inputs ("row"). Heads and features between them belong to one rank each (Shoeybi et al.
2019, "Megatron-LM", arXiv 1909.08053, section 3). With sequence parallelism norms and residuals see 1/t of
the tokens (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2), and an all-gather stands before the
columns, a reduce-scatter after the row, in place of all-reduces.

# [Note: whose collectives]
megatron: column products gather their input again and reduce its gradient beneath their two products. The
loss is computed on a part of the vocabulary (Megatron-Core 0.16.1 core/tensor_parallel/layers.py,
cross_entropy.py). Before Megatron-LM 3.0 (commit 16c90445 of September 2021), and in BigScience's
Megatron-DeepSpeed, the gradient was reduced in line, after both products (mpu/layers.py, mappings.py). torch:
torchtitan's DTensors gather once for all columns (`gather_per_product`: for each) and keep what they
gathered. Nothing overlaps (v0.2.2 models/llama3/infra/parallelize.py; torch 2.13 tensor/parallel/loss.py)
unless `async_tensor`, with which compiled blocks gather in pieces beneath the first column, scatter pieces
beneath the row, and gather the row's output's gradient beneath the product for the input's. The sum of the
columns' gradients is no product, so its scatter is not fused (_inductor/fx_passes/micro_pipeline_tp.py). Of
several sequences what is gathered or scattered is copied (distributed/_functional_collectives.py). nanotron:
like Megatron's products, in line unless `async_tensor`, with which they run on the rank's own rows beneath
the gather too (2411b022 parallel/tensor_parallel/functional.py). autotp: every column product reduces its own
input's gradient, in line or, with `async_tensor` (its `tp_overlap_comm`), beneath the weight's. Embedding and
norms are not cut, and the head's outputs are gathered (DeepSpeed 0.19.8 module_inject/layers.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zsim.operations.operation import Operation, Role
from zsim.operations.sharding import FeatureCut
from zsim.plan.parallel.adapters import output_dimension, resize_parameter, shard_adapter, shard_parameter
from zsim.specs.model.expert_layer import expert_module_range
from zsim.specs.model.prediction import PREDICTION_ENTRY
from zsim.specs.model.spec import (
    Activation,
    Block,
    ChunkedOverlap,
    Embedding,
    Exchange,
    ExchangeKind,
    Linear,
    Loss,
    ModelSpec,
    Module,
    Norm,
    OverlappedCollectives,
    Parameter,
    Tower,
)
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.style import ModelParallelStyle

TENSOR = "tensor"


def tensor_parallel(model: ModelSpec, parallelism: ParallelismConfig) -> ModelSpec:
    """The model of one tensor-parallel rank. For routed experts see `zsim.plan.parallel.experts`."""
    if parallelism.tensor == 1:
        return model
    sharder = _TensorSharder(parallelism, model.vocab_size, model.hidden_size, model.num_kv_heads)
    towers = model.towers
    if parallelism.style.cuts_towers:
        towers = tuple(_shard_tower(tower, parallelism) for tower in towers)
    return replace(
        model.map_blocks(sharder.shard_block),
        before=tuple(sharder.shard_before_blocks(model.before)),
        after=tuple(sharder.shard_after_blocks(model.after)),
        token_shards=sharder.token_shards,
        towers=towers,
    )


def _shard_tower(tower: Tower, parallelism: ParallelismConfig) -> Tower:
    """A tower whose blocks and projector are cut as the language model's, without sequence parallelism and
    overlap (Megatron-Bridge 067f987d models/qwen_vl/modelling_qwen3_vl/transformer_config.py
    `get_vision_model_config`). All ranks have all patches and their embedding.
    """
    unsharded = replace(parallelism, sequence_parallel=False, async_tensor=False)
    sharder = _TensorSharder(unsharded, 0, tower.hidden_size, 1)
    unique = {id(block): sharder.shard_tower_modules(block.modules) for block in tower.blocks}
    blocks = {
        id(block): replace(block, modules=unique[id(block)])
        for block in {id(block): block for block in tower.blocks}.values()
    }
    return replace(
        tower,
        blocks=tuple(blocks[id(block)] for block in tower.blocks),
        after=sharder.shard_tower_modules(tower.after),
    )


@dataclass(frozen=True)
class _TensorSharder:
    """Cuts the modules of one model. The residual stream's tokens are cut into `token_shards` parts."""

    parallelism: ParallelismConfig
    vocab_size: int
    hidden_size: int
    num_kv_heads: int

    @property
    def style(self) -> ModelParallelStyle:
        return self.parallelism.style

    @property
    def ranks(self) -> int:
        return self.parallelism.tensor

    @property
    def token_shards(self) -> int:
        return self.ranks if self.parallelism.sequence_parallel else 1

    @property
    def shards_tokens(self) -> bool:
        return self.token_shards > 1

    @property
    def overlaps(self) -> bool:
        overlap = self.style.tensor_overlap
        if overlap == "always":
            return self.shards_tokens or self.parallelism.overlap_tensor_reduce
        return overlap == "async_tensor" and self.parallelism.async_tensor

    @property
    def cuts_products(self) -> bool:
        """Whether products overlap their own collectives: `--tp-comm-overlap`, torch's asynchronous tensor
        parallelism."""
        return self.style.cuts_products and self.parallelism.async_tensor and self.shards_tokens

    @property
    def runs_local_rows_first(self) -> bool:
        """Whether products run on the rank's own rows while the others' are gathered."""
        return self.style.runs_local_rows_first and self.parallelism.async_tensor and self.shards_tokens

    @property
    def cuts_loss(self) -> bool:
        """Whether the loss sees a part of the vocabulary. Otherwise logits are gathered."""
        return self.style.cuts_vocabulary and self.parallelism.loss_parallel

    def features_per_rank(self, total: int, name: str) -> int:
        """This rank's features of a module with `total`, the largest of all ranks' parts."""
        grain = self.parallelism.tensor_grain
        return self.style.features_of_rank(total, self.ranks, name, self.num_kv_heads, grain)

    def shard(self, module: Module, parameter: Parameter, dimension: int) -> Parameter:
        return resize_parameter(
            parameter, dimension, self.features_per_rank(parameter.shape[dimension], module.name)
        )

    # -- blocks -----------------------------------------------------------------------------------------

    def shard_block(self, block: Block) -> Block:
        """The block with its products cut, and exchanges around each pair of column and row."""
        modules: list[Module] = []
        has_column = has_core = is_row = False
        routed = expert_module_range(block) if self.style.gathers_for_experts else range(0)
        for number, module in enumerate(block.modules):
            work = module.op_spec
            if number in routed:
                modules += self._shard_in_expert_layer(block, number, routed)
            elif module.is_adapter_part:
                modules += shard_adapter(module, self.parallelism, is_row=is_row)
            elif module.role in (Role.ROUTER, Role.EXPERTS) or work.is_gate:
                modules.append(self._shard_tokens(module))
            elif work.is_duplicated:
                before = block.modules[number - 1].op_spec
                modules += self._duplicate(module, is_gathered=before.product_features[0] == _width(work))
            elif isinstance(work, Linear) and module.name == PREDICTION_ENTRY:
                modules += self._prediction_entry(module, work)
            elif isinstance(work, Linear) and not has_core:
                is_row = False
                modules += self._column(module, work, is_first=not has_column)
                has_column = True
            elif isinstance(work, Linear):
                modules += self._row(module, work)
                has_column, has_core, is_row = False, False, True
            elif module.role in (Role.MIXER, Role.ACTIVATION) or work.is_inner:
                parameters = tuple(
                    replace(parameter, summed_over=TENSOR)
                    if work.is_replicated(parameter)
                    else self.shard(module, parameter, 0)
                    for parameter in module.parameters
                )
                modules.append(replace(self._cut_features(module), parameters=parameters))
                has_core = has_core or not (work.is_inner and module.role is Role.OTHER)
            elif isinstance(work, Norm) and has_column:
                modules.append(self._head_norm(module, work))
            else:
                modules.append(self._shard_tokens(module))
        return Block(block.kind, tuple(modules), block.registration)

    def shard_tower_modules(self, modules: Sequence[Module]) -> tuple[Module, ...]:
        """Modules of a tower, cut, with exchanges of rows like those of the module that follows or
        precedes.
        """
        cut, rows = self.shard_block(Block("", tuple(modules))).modules, list[Module]()
        for number, module in enumerate(cut):
            neighbours = (*cut[number:], *reversed(cut[:number]))
            neighbour = next(candidate for candidate in neighbours if candidate.sample_rows)
            if module.role is Role.EXCHANGE:
                module = replace(module, sample_rows=neighbour.sample_rows)
            rows.append(module)
        return tuple(rows)

    def _shard_in_expert_layer(self, block: Block, number: int, run: range) -> list[Module]:
        """A module of a layer with routed experts under torchtitan. The layer's input is gathered before, and
        its gradient is taken as complete. Its output's sum is scattered afterwards. Every rank has the full
        router and all rows. Shared experts are cut, each column with a sum of its input's gradient (0.2.2
        models/llama4/infra/parallelize.py `apply_moe_ep_tp`).
        """
        module, width = block.modules[number], self.hidden_size
        work, modules = module.op_spec, [module]
        if isinstance(work, Linear) and work.out_features > 1:
            is_row = any(
                layer_module.role is Role.ACTIVATION for layer_module in block.modules[run.start : number]
            )
            sharded = self._row(module, work) if is_row else self._column(module, work, is_first=False)
            modules = [
                sharded_module for sharded_module in sharded if sharded_module.role is not Role.EXCHANGE
            ]
            if not is_row:
                modules.insert(0, self._exchange(module.name, None, "all_reduce", width))
        elif module.role is Role.ACTIVATION:
            modules = [self._cut_features(module)]
        if number == run.start:
            gather = [self._exchange(module.name, "all_gather", None, width)] if self.shards_tokens else []
            modules = [*gather, *modules]
        if number == run[-1]:
            reduction: tuple[ExchangeKind, ExchangeKind | None] = (
                ("reduce_scatter", "all_gather") if self.shards_tokens else ("all_reduce", None)
            )
            modules = [*modules, self._exchange(f"{module.name} out", *reduction, width)]
        return modules

    def _column(self, module: Module, work: Linear, *, is_first: bool, is_head: bool = False) -> list[Module]:
        """A product cut along its outputs, after what brings its input together, once for a pair."""
        shares, width = self.ranks, work.in_features
        local = replace(work, out_features=self.features_per_rank(work.out_features, module.name))
        sharded = replace(
            module,
            op_spec=local,
            parameters=tuple(
                self.shard(module, parameter, output_dimension(parameter, work))
                for parameter in module.parameters
            ),
        )
        pieces = None
        if self.cuts_products and not is_head:
            pieces = ChunkedOverlap(shares, "forward", is_symmetric_memory=self.style.has_dtensors)
        if self.runs_local_rows_first and not module.shares_input:
            pieces = ChunkedOverlap(shares, "forward", starts_with_local_rows=True)
        reads_fp8 = not (is_head or work.in_bf16)
        if self.shards_tokens and reads_fp8:
            local = replace(local, input_cast_ranks=shares)
            sharded = replace(sharded, op_spec=local)
        if self.overlaps:
            reduces: ExchangeKind = "reduce_scatter" if self.shards_tokens else "all_reduce"
            beneath = OverlappedCollectives(reduces, self.token_shards)
            product = replace(
                sharded, op_spec=replace(local, overlapped_collectives=beneath, chunked_overlap=pieces)
            )
            if not self.shards_tokens or module.shares_input or pieces is not None:
                return [product]
            gather = self._exchange(module.name, "all_gather", None, width, follows_precision=reads_fp8)
            return [gather, product]
        if self.style.reduces_per_product:
            return [self._exchange(module.name, None, "all_reduce", width), sharded]
        if self.style.reduces_in_line and self.shards_tokens and not module.shares_input:
            beneath = OverlappedCollectives("reduce_scatter", self.token_shards, is_sequential=True)
            product = replace(sharded, op_spec=replace(local, overlapped_collectives=beneath))
            return [self._exchange(module.name, "all_gather", None, width), product]
        repeats = not is_first or module.shares_input
        if repeats and not self.parallelism.gather_per_product:
            return [sharded]
        if pieces is not None:
            reduction = self._exchange(module.name, None, "reduce_scatter", width)
            return [reduction, replace(sharded, op_spec=replace(local, chunked_overlap=pieces))]
        if self.shards_tokens:
            kinds: tuple[ExchangeKind, ExchangeKind] = ("all_gather", "reduce_scatter")
            exchange = self._exchange(
                module.name, *kinds, width, follows_precision=reads_fp8, repeats=repeats
            )
            return [exchange, sharded]
        return [self._exchange(module.name, None, "all_reduce", width), sharded]

    def _row(self, module: Module, work: Linear) -> list[Module]:
        """A product cut along its inputs, before what sums up its outputs."""
        shares = self.ranks
        local = replace(work, in_features=self.features_per_rank(work.in_features, module.name))
        if self.shards_tokens:
            local = replace(local, gradient_cast_ranks=shares)
        sharded = replace(
            module,
            op_spec=local,
            parameters=tuple(
                self._replicate(parameter)
                if len(parameter.shape) == 1
                else self.shard(module, parameter, 1 - output_dimension(parameter, work))
                for parameter in module.parameters
            ),
        )
        if self.cuts_products:
            scattered = self.style.scattered_pieces or shares
            pieces = ChunkedOverlap(
                shares, "backward", scattered, is_symmetric_memory=self.style.has_dtensors
            )
            return [replace(sharded, op_spec=replace(local, chunked_overlap=pieces))]
        if self.runs_local_rows_first:
            pieces = ChunkedOverlap(shares, "backward", starts_with_local_rows=True)
            scatter = self._exchange(module.name, "reduce_scatter", None, work.out_features)
            return [replace(sharded, op_spec=replace(local, chunked_overlap=pieces)), scatter]
        if self.shards_tokens:
            width, reads_fp8 = work.out_features, not work.in_bf16
            return [
                sharded,
                self._exchange(
                    module.name, "reduce_scatter", "all_gather", width, follows_precision=reads_fp8
                ),
            ]
        return [sharded, self._exchange(module.name, "all_reduce", None, work.out_features)]

    def _duplicate(self, module: Module, *, is_gathered: bool) -> list[Module]:
        """A module that all ranks have whole, on its own tokens, or on all of them after a gather of what it
        reads, whose gradient nothing takes (Megatron-LM d98e8a64
        core/transformer/experimental_attention_variant/dsa.py).
        """
        work = module.op_spec
        if isinstance(work, Linear) and not work.reads_all_tokens:
            return [self._shard_tokens(module)]
        replica = replace(module, parameters=tuple(self._replicate(part) for part in module.parameters))
        if not self.shards_tokens or not isinstance(work, Linear) or is_gathered:
            return [replica]
        return [self._exchange(module.name, "all_gather", None, work.in_features), replica]

    def _prediction_entry(self, module: Module, work: Linear) -> list[Module]:
        """The first product of a layer of multi-token prediction, a column whose outputs are gathered. With
        sequence parallelism each rank goes on with its tokens, whose gradient is gathered (Megatron-LM
        d98e8a64 core/transformer/multi_token_prediction.py `_concat_embeddings`).
        """
        backward: ExchangeKind | None = "all_gather" if self.shards_tokens else None
        column = self._column(module, work, is_first=True)
        return [*column, self._exchange(f"{module.name} out", "all_gather", backward, work.out_features)]

    def _cut_features(self, module: Module) -> Module:
        """This rank's part of what is between a column and a row."""

        def features(total: int) -> int:
            return self.features_per_rank(total, module.name)

        cut = FeatureCut(self.ranks, features, is_first_rank=self.style.cuts_unevenly)
        return replace(module, op_spec=module.op_spec.cut_features(cut))

    def _head_norm(self, module: Module, work: Norm) -> Module:
        """A norm of queries or keys: each rank sums its heads' gradient. A norm over all heads is cut."""
        covers_all_heads = all(parameter.numel == work.width for parameter in module.parameters)
        parameters = tuple(
            self.shard(module, parameter, 0) if covers_all_heads else replace(parameter, summed_over=TENSOR)
            for parameter in module.parameters
        )
        width = self.features_per_rank(work.width, module.name)
        return replace(module, op_spec=replace(work, width=width), parameters=parameters)

    def _shard_tokens(self, module: Module) -> Module:
        """A module on the residual stream, with all its parameters, on this rank's own tokens."""
        if not self.shards_tokens:
            return module
        parameters = tuple(self._replicate(parameter) for parameter in module.parameters)
        return replace(module, parameters=parameters, token_shards=self.token_shards)

    def _replicate(self, parameter: Parameter) -> Parameter:
        """A parameter that is not cut. Sequence-parallel ranks sum its gradient."""
        return replace(parameter, summed_over=TENSOR) if self.shards_tokens else parameter

    # -- around the blocks --------------------------------------------------------------------------------

    def shard_before_blocks(self, modules: Sequence[Module]) -> list[Module]:
        """Embeddings: the vocabulary is cut, positions are not. With sequence parallelism the sum is
        scattered where there are no positions, else reduced, and each rank goes on with its part
        (Megatron-Core 0.16.1 core/models/common/embeddings/language_model_embedding.py).
        """
        sharded: list[Module] = []
        tables = [module for module in modules if module.role is Role.EMBEDDING]
        has_positions, is_scattered = len(tables) > 1, not self.shards_tokens
        for module in modules:
            work = module.op_spec
            if isinstance(work, Embedding) and work.rows == self.vocab_size and self.style.cuts_vocabulary:
                rows = replace(work, rows=work.rows // self.ranks)
                parameters = tuple(
                    shard_parameter(parameter, 0, self.ranks) for parameter in module.parameters
                )
                sharded.append(replace(module, op_spec=rows, parameters=parameters))
                if self.shards_tokens and not has_positions:
                    sharded.append(self._exchange(module.name, "reduce_scatter", "all_gather", work.width))
                    is_scattered = True
                else:
                    sharded.append(self._exchange(module.name, "all_reduce", None, work.width))
            elif isinstance(work, Embedding):
                sharded.append(module)
            else:
                if not is_scattered:
                    sharded.append(self._exchange(module.name, None, "all_gather", self.hidden_size))
                    is_scattered = True
                sharded.append(self._shard_tokens(module))
        if not is_scattered:
            sharded.append(self._exchange("positions", None, "all_gather", self.hidden_size))
        return sharded

    def shard_after_blocks(self, modules: Sequence[Module]) -> list[Module]:
        """Final norm, head and loss. The head is a column. The loss sees a part of the vocabulary after three
        sums of a number per token: the maximum, the label's logit, the sum of exponentials. Where logits are
        gathered, every rank has all of them and their loss (torchtitan's `disable_loss_parallel`: the head's
        output is replicated, and its gradient is cut without a call). Multi-token prediction looks its tokens
        up in the part of the vocabulary that the rank has, as before the blocks.
        """
        sharded: list[Module] = []
        for module in modules:
            work = module.op_spec
            if isinstance(work, Linear) and work.out_features == self.vocab_size:
                sharded += self._column(module, work, is_first=True, is_head=True)
                if not self.cuts_loss:
                    padded = max(
                        work.out_features, self.ranks * self.features_per_rank(work.out_features, module.name)
                    )
                    sharded.append(self._exchange(module.name, "all_gather", None, padded))
            elif isinstance(work, Loss):
                if self.cuts_loss:
                    statistics = (f"{module.name} {statistic}" for statistic in ("maximum", "label", "sum"))
                    sharded += [_statistic_reduction(name, self.ranks) for name in statistics]
                    work = replace(work, vocab_size=work.vocab_size // self.ranks)
                sharded.append(replace(module, op_spec=work))
            elif isinstance(work, Activation) and work.width == self.vocab_size and self.cuts_loss:
                sharded.append(replace(module, op_spec=replace(work, width=work.width // self.ranks)))
            elif isinstance(work, Embedding):
                sharded.append(replace(module, op_spec=replace(work, rows=work.rows // self.ranks)))
                kinds: tuple[ExchangeKind, ExchangeKind | None] = ("all_reduce", None)
                kinds = ("reduce_scatter", "all_gather") if self.shards_tokens else kinds
                sharded.append(self._exchange(module.name, *kinds, work.width))
            elif isinstance(work, Linear):
                sharded.append(module)
            else:
                sharded.append(self._shard_tokens(module))
        return sharded

    def _exchange(
        self,
        name: str,
        forward: ExchangeKind | None,
        backward: ExchangeKind | None,
        width: int,
        *,
        follows_precision: bool = False,
        repeats: bool = False,
    ) -> Module:
        kind, copies = forward or backward, self.style.has_dtensors
        work = Exchange(forward, backward, width, self.ranks, follows_precision=follows_precision)
        return Module(f"{name} {kind}", replace(work, repeats=repeats, copies=copies))


def _width(work: Operation) -> int:
    """Features that a product reads."""
    return work.product_features[0]


def _statistic_reduction(name: str, ranks: int) -> Module:
    return Module(name, Exchange("all_reduce", None, 1, ranks, in_fp32=True))
