"""Megatron's part in `[training]`, and that of the engines with its data parallelism.

Recomputation is as in Megatron-Core 0.16.1 (`core/transformer/transformer_config.py`,
`transformer_layer.py`). Core runs a fused core of attention again. Megatron-LM before Core did not checkpoint
it (`megatron/model/transformer.py` of core 0.4).

Sources of Transformer Engine's fused attention: pytorch/attention.py, then
pytorch/attention/dot_product_attention/utils.py `get_attention_backend`,
common/fused_attn/fused_attn.cpp `nvte_get_fused_attn_backend`.

Megatron-Bridge's adapters are on Megatron's own products. See also [Note: adapters on experts] of
`zsim.specs.model.expert_adapters`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from zsim.errors import InputError, NotSimulatedError
from zsim.frameworks.megatron.settings.config import MegatronConfig, is_before_3, is_core, is_core_since
from zsim.frameworks.megatron.settings.table import CLIP_GRAD, MegatronTable
from zsim.operations.mixers.gated_delta import GatedDelta
from zsim.operations.operation import operations_of
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.gpu import Gpu
from zsim.specs.experiment.training.attention import (
    HOPPER,
    has_cudnn_attention,
    has_dropped_scores,
    is_before,
    is_hopper,
)
from zsim.specs.experiment.training.framework_training import FrameworkTraining
from zsim.specs.experiment.training.lora_table import LoraTable
from zsim.specs.experiment.training.table import AttentionChoice, TrainingTable
from zsim.specs.model.adapters import ALL_LINEAR, Adapters
from zsim.specs.model.expert_layer import has_experts
from zsim.specs.model.fusion import FUSED_PRODUCTS, fuse_named_products
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.experts import ExpertSplit
from zsim.specs.strategy.fp8 import TORCHAO_RECIPES, Fp8, Fp8Recipe
from zsim.specs.strategy.optimizers import Optimizer
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.training import AttentionKind, Checkpointing, CrossEntropy, LayerKernels

_BLACKWELL = 10.0  # compute capability
_FULL_RECOMPUTATION = {"checkpoint_is_reentrant": True, "checkpoint_stops_early": False}
_OPTIMIZERS = ("adamw", "adam", "sgd", "sgd_momentum", "adamw-bf16", "lion", "muon")
_CORE_OF_ATTENTION = "core_attn"
_GRADIENT_SHARDING = ("optim_grads", "optim_grads_params")


class MegatronTraining(FrameworkTraining[MegatronTable, MegatronConfig]):
    """Layers of its own, whose kernels, loss and recomputation are those of a release."""

    title = "Megatron"
    casts_weights = True
    calls_torch_attention = False
    grouping_strategy = "Megatron's DDP"
    even_batch_reason = "Megatron has one --micro-batch-size, which shapes all its messages"
    unadapted_degrees = ()
    has_references = True
    keeps_originals = False
    expert_adapters = "adapters of Megatron-Bridge on linear_fc1 and linear_fc2"

    def check_reference(
        self,
        where: str,
        reference: str,
        table: MegatronTable,
        config: MegatronConfig | None,
        parallelism: ParallelismConfig,
    ) -> None:
        """Every stage has its part of the reference, which runs before the model in the same step of the
        pipeline (ms-swift 4.6 megatron/trainers/dpo_trainer.py).
        """
        for key, is_on in (
            ("fsdp_sharding", table.fsdp_sharding is not None),
            ("overlap_expert_parallel", table.overlap_expert_parallel),
            ("engine 'nanotron'", table.engine == "nanotron"),
            ("cuda_graph", bool(table.cuda_graph)),
        ):
            if is_on:
                raise NotSimulatedError(f"{where}: not simulated with strategy.{key}; expected it left out")

    def fill_training(
        self,
        training: TrainingTable,
        table: MegatronTable,
        config: MegatronConfig | None,
        parallelism: ParallelismConfig,
        cluster: Cluster,
    ) -> TrainingTable:
        """`[training]` with fused kernels (`layer_kernels` says which), a loss that works in place, gradients
        clipped at 1, and checkpoints that run everything again.

        The latter are `CheckpointFunction` of core tensor_parallel/random.py, as in nanotron and InternEvo.
        An engine other than "megatron" keeps `compile` as it is.
        """
        is_megatron = table.engine == "megatron"
        default_loss: CrossEntropy = (
            "megatron" if is_core_since(table.version) and is_megatron else "megatron-before-0.8"
        )
        changes: dict[str, Any] = {
            "compile": training.compile or is_megatron,
            "gradient_clipping": CLIP_GRAD
            if training.gradient_clipping is None
            else training.gradient_clipping,
            "cross_entropy": training.cross_entropy or ("fused_linear" if training.liger else default_loss),
            **_FULL_RECOMPUTATION,
        }
        if _limits_connections(table, parallelism, cluster):
            changes["device_max_connections"] = 1
        kept_keys = {*_FULL_RECOMPUTATION, "device_max_connections"} & training.model_fields_set
        return training.model_copy(
            update={key: value for key, value in changes.items() if key not in kept_keys}
        )

    def choose_attention(
        self, training: TrainingTable, table: MegatronTable, gpus: Sequence[Gpu], model: ModelSpec
    ) -> AttentionChoice | None:
        if table.deterministic_mode:
            _check_deterministic_mixers(model)
        if not table.runs_transformer_engine:
            return training.attention
        return choose_engine_attention(
            training.attention, gpus, model, deterministic=table.deterministic_mode
        )

    def calls_flash_2(self, table: MegatronTable) -> bool:
        """nanotron and InternEvo do."""
        return table.engine != "megatron"

    def layer_kernels(self, table: MegatronTable, parallelism: ParallelismConfig) -> LayerKernels:
        if table.engine != "megatron":
            return table.engine
        if is_before_3(table.version):
            return "megatron-2"
        name = "megatron-0.19" if is_core_since(table.version, (0, 19)) else "megatron"
        return name if table.rope_fusion else f"{name}-eager-rope"

    def has_engine_products(self, table: MegatronTable) -> bool:
        return table.runs_transformer_engine

    def overlaps_tensor_reduce(self, table: MegatronTable) -> bool:
        return not is_before_3(table.version)

    def default_recipe(self, table: MegatronTable) -> Fp8Recipe:
        """The default of `--fp8-recipe`, on every GPU."""
        return "delayed" if table.engine == "megatron" else super().default_recipe(table)

    def make_fp8(self, recipe: Fp8Recipe, table: MegatronTable) -> Fp8:
        return Fp8(
            recipe,
            keeps_weights=table.engine == "megatron",
            recasts_weights=super().make_fp8(recipe, table).recasts_weights,
            has_quantized_weights=table.fp8_param_gather,
            sums_amaxes_over="tensor" if table.tp_only_amax_red else "all",
        )

    def fuses_norms(self, table: MegatronTable) -> bool:
        return table.engine == "megatron"

    def check_recipe(self, recipe: Fp8Recipe, training: TrainingTable, table: MegatronTable) -> None:
        check_engine_recipe(recipe, training, table)

    def check_optimizer(
        self,
        optimizer: Optimizer,
        training: TrainingTable,
        table: MegatronTable,
        config: MegatronConfig | None,
    ) -> None:
        _check_optimizer(optimizer.name, table)

    def synchronized_replicas(
        self, table: MegatronTable, config: MegatronConfig | None, replicas: int, nodes: int
    ) -> int:
        shards_gradients = table.fsdp_sharding in _GRADIENT_SHARDING
        return max(1, replicas // table.optimizer_instances) if shards_gradients else 1

    offloads_checkpoints = False
    tiles_mlps = False

    def groups_layers(self, table: MegatronTable) -> bool:
        """Whether parameters stay whole, so that a group needs no gathers of its own."""
        return table.fsdp_sharding is None

    def recomputed_modules(
        self,
        modules: tuple[str, ...],
        table: MegatronTable,
        parallelism: ParallelismConfig,
        attention: AttentionKind,
    ) -> tuple[str, ...]:
        if not is_core(table.version) and attention == "flash":
            modules = tuple(name for name in modules if name != _CORE_OF_ATTENTION)
        if _keeps_norm(table, parallelism):
            modules = tuple("input_layernorm" if name == "layernorm" else name for name in modules)
        return modules

    def check_recomputation(self, policies: Iterable[Checkpointing]) -> None:
        """Refuses torch's selective checkpointing, which Megatron's flag has no value for."""
        if "selective-op" in policies:
            raise InputError(
                "training.activation_checkpointing: found 'selective-op', which is torch's; Megatron's "
                "--recompute-granularity has 'selective' (of recompute_modules, e.g. [\"mlp\"]) and 'full'"
            )

    def check_any_model(self, where: str) -> None:
        raise InputError(
            f"strategy.kind: found 'megatron', but {where}, and Megatron trains layers of its own; "
            "expected ddp, fsdp1, fsdp2 or deepspeed"
        )

    def check_quantized(self, where: str) -> None:
        raise InputError(
            f"{where}: found 'nf4' under Megatron, whose layers have no 4-bit weights; "
            "expected strategy 'ddp', 'fsdp1', 'fsdp2' or 'deepspeed'"
        )

    def adopt_adapters(
        self, lora: LoraTable, model: ModelSpec, parallelism: ParallelismConfig
    ) -> tuple[ModelSpec, LoraTable]:
        if not uses_bridge(lora, model, parallelism):
            return model, lora
        return adapt_products(lora, model, parallelism)

    def adapt_experts(self, adapters: Adapters, lora: LoraTable, split: ExpertSplit) -> Adapters | None:
        return adapt_experts(adapters, lora, split)

    def check_adapted_experts(self, table: MegatronTable, split: ExpertSplit) -> None:
        example = 'training.lora.targets = ["linear_qkv", "linear_proj"]'
        if split.tensor > 1:
            raise NotSimulatedError(
                f"parallelism.expert_tensor: found {split.tensor} with adapters on experts, which zsim does "
                f"not cut among ranks; expected 1, or {example}"
            )
        settings = {
            "fsdp_sharding": table.fsdp_sharding,
            "overlap_expert_parallel": table.overlap_expert_parallel,
        }
        for key, value in settings.items():
            if value:
                raise NotSimulatedError(
                    f"strategy.{key}: found {value!r} with adapters on routed experts, which zsim does "
                    f"not simulate; expected it left out, or {example}"
                )


def _limits_connections(table: MegatronTable, parallelism: ParallelismConfig, cluster: Cluster) -> bool:
    """Whether CUDA_DEVICE_MAX_CONNECTIONS has to be 1.

    Megatron's arguments.py asserts it before Blackwell if tensor or context parallelism is on (core 0.16.1
    `validate_args`).
    """
    is_parallel = parallelism.tensor * parallelism.context > 1
    if not is_parallel or table.engine == "nanotron" or table.fsdp_sharding is not None:
        return False
    capabilities = [gpu.compute_capability for gpu in cluster.gpus if gpu.compute_capability is not None]
    return bool(capabilities) and min(capabilities) < _BLACKWELL


def _keeps_norm(table: MegatronTable, parallelism: ParallelismConfig) -> bool:
    """Whether the norm before the router is an output of the router's CUDA graph, and therefore not
    recomputed.

    Megatron then recomputes only the norm before attention (core 0.16.1 core/transformer/transformer_layer.py
    `can_recompute_pre_mlp_layernorm_for_cudagraph`).
    """
    graphs = table.cuda_graph_modules
    is_inside = "moe_preprocess" in graphs and parallelism.experts.dispatcher == "all-to-all"
    return "moe_router" in graphs and not is_inside


def _check_optimizer(name: str, table: MegatronTable) -> None:
    """Checks an optimizer as Megatron-Core 0.16.1 to 0.19.0 does.

    Sources: training/arguments.py (`--optimizer`) and core/optimizer/distrib_optimizer.py, whose assertion
    names Lion from 0.19 on. Its Muon is checked in zsim/frameworks/megatron/settings/muon.py.
    """
    where = "training.optimizer"
    if name == "muon" and table.engine != "megatron":
        raise InputError(
            f"{where}: 'muon' belongs to engine 'megatron', found '{table.engine}'; expected 'adamw'"
        )
    if name not in _OPTIMIZERS:
        raise InputError(f"{where}: Megatron has no '{name}'; expected one of {', '.join(_OPTIMIZERS)}")
    if name == "adamw-bf16" and not table.distributed_optimizer:
        raise InputError(
            f"{where}: Megatron keeps moments in bf16 only with --use-precision-aware-optimizer, which "
            "needs the distributed optimizer; expected strategy.distributed_optimizer = true, or 'adamw'"
        )
    release = (0, 19) if table.distributed_optimizer else (0, 17)
    is_of_megatron = table.engine == "megatron" and table.fsdp_sharding is None
    if name == "lion" and not (is_of_megatron and is_core_since(table.version, release)):
        suffix = " with the distributed optimizer" if table.distributed_optimizer else ""
        raise InputError(
            f"{where}: Megatron-Core has 'lion'{suffix} from {release[0]}.{release[1]} on; found "
            f"strategy.version '{table.version}', expected a newer one under Megatron's own data "
            "parallelism, or 'adamw'"
        )


TRAINING = MegatronTraining()


def _check_deterministic_mixers(model: ModelSpec) -> None:
    """Raises NotSimulatedError for Gated DeltaNet, whose rule is a loop over chunks in torch then
    (Megatron-LM d98e8a64 core/ssm/gated_delta_net/gdn.py).
    """
    modules = (module for block in model.unique_blocks for module in block.modules)
    if operations_of(modules, GatedDelta):
        raise NotSimulatedError(
            f"strategy.deterministic_mode: found true with '{model.name}', whose Gated DeltaNet Megatron "
            "then computes in a loop over chunks, which zsim does not simulate; expected false"
        )


_TORCHAO_EQUIVALENTS: dict[Fp8Recipe, Fp8Recipe] = {
    "torchao-tensorwise": "current",
    "torchao-rowwise": "block",
}


def choose_engine_attention(
    requested: AttentionChoice | None, gpus: Sequence[Gpu], model: ModelSpec, *, deterministic: bool
) -> AttentionChoice | None:
    """The generation of fused attention that Transformer Engine 1.2 to 2.18 chooses.

    It takes cuDNN's on Hopper, from 2.0 on also on Blackwell, in preference to FlashAttention-3 even where
    that is installed. In deterministic mode it takes FlashAttention-2's deterministic backward before Hopper.
    It also does on Blackwell where scores are dropped out, since cuDNN's deterministic backward there does
    not support that. On Blackwell, cuDNN's deterministic backward is assumed to be as fast as its other one,
    and to be available (cuDNN 9.18.1). On Hopper see `zsim.cost.rates.deterministic`.
    """
    is_default = requested in (None, "flash")
    is_flash_2 = is_default or requested == "flash2"
    has_cudnn = has_cudnn_attention(gpus)
    is_older = all(gpu.vendor == "nvidia" and is_before(gpu, HOPPER) for gpu in gpus)
    is_refused = has_cudnn and not is_hopper(gpus) and has_dropped_scores(model)
    if deterministic and is_flash_2 and (is_older or is_refused):
        return "flash2-deterministic"
    is_cudnn = is_default or requested == "cudnn"
    if deterministic and is_cudnn and has_cudnn and is_hopper(gpus):
        return "cudnn-deterministic"
    return "cudnn" if is_default and has_cudnn else requested


def check_engine_recipe(recipe: Fp8Recipe, training: TrainingTable, table: MegatronTable) -> None:
    """Raises for a recipe that Megatron lacks, and for settings beside one."""
    is_megatron = table.engine == "megatron"
    if is_megatron and recipe in TORCHAO_RECIPES:
        raise InputError(
            f"training.fp8_recipe: found '{recipe}' with strategy 'megatron', whose layers are Transformer "
            f"Engine's; the nearest that it has is '{_TORCHAO_EQUIVALENTS[recipe]}'"
        )
    if not is_megatron and training.fp8_recipe is not None:
        raise InputError(
            f"training.fp8_recipe: found '{recipe}', but engine '{table.engine}' has no recipes; expected "
            "engine 'megatron'"
        )
    if recipe == "delayed" and training.bf16_first_layers + training.bf16_last_layers:
        raise InputError(
            "training.bf16_first_layers, bf16_last_layers: Megatron refuses them with delayed scales, which "
            "are summed up once for all layers; the nearest recipe that takes them is 'current'"
        )
    if table.fp8_param_gather and recipe == "nvfp4":
        raise NotSimulatedError(
            "strategy.fp8_param_gather: zsim does not simulate weights that are kept in fp4 yet; expected "
            "false, or fp8_recipe 'mxfp8'"
        )


def uses_bridge(lora: LoraTable, model: ModelSpec, parallelism: ParallelismConfig) -> bool:
    """Whether the adapters are Megatron-Bridge's, on Megatron's own products.

    They are if they have one of its names, if the job has model parallelism, or where a mixture of experts
    has no names.
    """
    targets = lora.targets if isinstance(lora.targets, tuple) else ()
    is_named = any(name.rpartition(".")[2] in FUSED_PRODUCTS for name in targets)
    is_all = lora.targets in (None, ALL_LINEAR) and has_experts(model)
    return is_named or is_all or not parallelism.is_trivial


def adapt_products(
    lora: LoraTable, model: ModelSpec, parallelism: ParallelismConfig
) -> tuple[ModelSpec, LoraTable]:
    """The model with Megatron's products, and the adapters on them. Without names the adapters are on all
    four products (Megatron-Bridge 0.6.0 peft/lora.py).

    Each tensor-parallel rank has a part of both weights (`ParallelLinearAdapter`, peft/utils.py).
    """
    is_default = lora.targets in (None, ALL_LINEAR)
    targets = FUSED_PRODUCTS if is_default else lora.targets
    names = targets if isinstance(targets, tuple) else ()
    model = fuse_named_products(model)
    others = (name for name in names if name.rpartition(".")[2] not in FUSED_PRODUCTS)
    unknown = next((name for name in others if not _has_product(model, name)), None)
    if unknown or not names:
        origin = "beside names of Megatron" if parallelism.is_trivial else "with Megatron's parallelisms"
        raise InputError(
            f"training.lora.targets: found {(unknown or lora.targets)!r} {origin}, whose layers "
            f"have the products {', '.join(FUSED_PRODUCTS)}; expected some of these"
        )
    if lora.rank % parallelism.tensor or any(r % parallelism.tensor for r in lora.rank_pattern.values()):
        raise InputError(
            f"training.lora.rank: found {lora.rank}, which the {parallelism.tensor} tensor-parallel ranks "
            "do not divide; the nearest that they do is "
            f"{max(1, round(lora.rank / parallelism.tensor)) * parallelism.tensor}"
        )
    if parallelism.async_tensor:
        raise NotSimulatedError(
            "parallelism.async_tensor: found true with training.lora, which zsim does not simulate; "
            "expected false"
        )
    model_targets = [
        name for name in names if _has_product(model, name) or (has_experts(model) and "_fc" in name)
    ]
    return model, lora.model_copy(update={"targets": tuple(model_targets) if is_default else names})


def adapt_experts(adapters: Adapters, lora: LoraTable, split: ExpertSplit) -> Adapters | None:
    """The adapters with those on routed experts, one for all that run together or one for each. None without
    a target that experts have.
    """
    if not any("linear_fc" in target for target in adapters.targets):
        return None
    if lora.target_parameters:
        raise InputError(
            f"training.lora.target_parameters: found {lora.target_parameters[0]!r} beside Megatron's "
            "targets; Megatron-Bridge adapts experts by linear_fc1 and linear_fc2, expected it left out"
        )
    shares = lora.share_expert_adapters and split.kernel != "loop"
    return replace(adapters, experts="shared" if shares else "each")


def _has_product(model: ModelSpec, name: str) -> bool:
    return any(module.name.rpartition(".")[2] == name for block in model.blocks for module in block.modules)
