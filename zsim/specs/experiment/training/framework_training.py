"""The questions that a framework answers while `[training]` is resolved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar, cast

from zsim.errors import InputError, NotSimulatedError
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.gpu import Gpu
from zsim.specs.experiment.training.lora_table import LoraTable
from zsim.specs.experiment.training.table import LAST_OF_MODULES, AttentionChoice, TrainingTable
from zsim.specs.model.adapters import Adapters
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.experts import ExpertSplit
from zsim.specs.strategy.fp8 import TORCHAO_RECIPES, Fp8, Fp8Recipe
from zsim.specs.strategy.optimizers import OPTIMIZERS, Optimizer, optimizer_of
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.registry import kinds, role_of
from zsim.specs.strategy.table import StrategyConfig, StrategyTable
from zsim.specs.strategy.training import AttentionKind, Checkpointing, LayerKernels, TrainingConfig

Table = TypeVar("Table", bound=StrategyTable)
Config = TypeVar("Config", bound=StrategyConfig)


class FrameworkTraining(Generic[Table, Config]):
    """A framework's part in `[training]`: what it fills in, and what it refuses.

    `TRAINING` in the module `training` of the framework's folder. The answers here are those of a framework
    without anything special, whose layers are torch's.

    `config` is the strategy where its framework resolves it from a file of its own before the training. It is
    None for the others.
    """

    title = ""
    """Its name in sentences."""

    # -- the types of weights ----------------------------------------------------------------------------

    is_under_autocast = False
    """Weights are fp32, and torch.autocast casts at every product."""
    has_autocast = False
    """`training.autocast` may ask for torch.autocast in place of casts of what is gathered."""
    has_stored_dtype = False
    """`training.stored_dtype` may ask for weights, gradients and optimizer states in 16 bits."""
    casts_weights = False
    """Every weight is cast to the type of products, and those that are trained have fp32 masters."""

    def check_stored_dtype(self, training: TrainingConfig, requested: TrainingTable, table: Table) -> None:
        """Raises for settings that are not simulated with weights in `training.stored_dtype`."""

    # -- what `[training]` leaves open -------------------------------------------------------------------

    def fill_training(
        self,
        training: TrainingTable,
        table: Table,
        config: Config | None,
        parallelism: ParallelismConfig,
        cluster: Cluster,
    ) -> TrainingTable:
        """`[training]` with the framework's own defaults, and with the values of its file."""
        return training

    # -- kernels -----------------------------------------------------------------------------------------

    calls_torch_attention = True
    """Attention is torch's scaled_dot_product_attention, which chooses among fused kernels."""

    def choose_attention(
        self, training: TrainingTable, table: Table, gpus: Sequence[Gpu], model: ModelSpec
    ) -> AttentionChoice | None:
        """The generation of fused attention on GPUs of one kind."""
        return training.attention

    def calls_flash_2(self, table: Table) -> bool:
        """Whether the layers call FlashAttention-2 themselves."""
        return False

    def layer_kernels(self, table: Table, parallelism: ParallelismConfig) -> LayerKernels:
        """Whose kernels blocks have."""
        return "torch"

    def has_engine_products(self, table: Table) -> bool:
        """Whether the blocks' products are layers of Transformer Engine."""
        return False

    def overlaps_tensor_reduce(self, table: Table) -> bool:
        """Whether tensor-parallel ranks reduce the gradient of a product's input beneath other work."""
        return True

    # -- fp8 ---------------------------------------------------------------------------------------------

    def default_recipe(self, table: Table) -> Fp8Recipe:
        """The recipe where nothing says one."""
        return "torchao-tensorwise"

    def make_fp8(self, recipe: Fp8Recipe, table: Table) -> Fp8:
        """The recipe as the framework runs it."""
        return Fp8(recipe, recasts_weights=recipe in TORCHAO_RECIPES)

    def fuses_norms(self, table: Table) -> bool:
        """Whether a norm and the product behind it are one layer in fp8."""
        return False

    def check_recipe(self, recipe: Fp8Recipe, training: TrainingTable, table: Table) -> None:
        """Raises for a recipe that the framework lacks."""

    # -- the optimizer -----------------------------------------------------------------------------------

    def check_optimizer(
        self, optimizer: Optimizer, training: TrainingTable, table: Table, config: Config | None
    ) -> None:
        """Raises for an optimizer that the framework refuses, or that is not simulated under it."""

    # -- the batch ---------------------------------------------------------------------------------------

    has_uneven_batches = False
    """Ranks may have micro-batches of different sizes."""
    even_batch_reason = ""
    """Why they may not, in the words of an error."""

    def synchronized_replicas(self, table: Table, config: Config | None, replicas: int, nodes: int) -> int:
        """The number of consecutive replicas that wait for one another in every micro-batch.

        They are those that gather parameters or reduce gradients there.
        """
        return 1

    # -- recomputation -----------------------------------------------------------------------------------

    grouping_strategy = ""
    """Its data parallelism where one checkpoint may be around several layers, in the words of an error."""

    offloads_checkpoints = True
    """`training.checkpoint_offload` may copy the inputs of recomputed blocks to host memory."""
    tiles_mlps = True
    """`training.mlp_tiles` may cut the tokens of MLPs, which are the model's own code."""

    def groups_layers(self, table: Table) -> bool:
        """Whether one checkpoint around several layers is simulated."""
        return False

    def recomputed_modules(
        self,
        modules: tuple[str, ...],
        table: Table,
        parallelism: ParallelismConfig,
        attention: AttentionKind,
    ) -> tuple[str, ...]:
        """The modules, of those that `[training]` names, that run again."""
        return modules

    def check_recomputation(self, policies: Iterable[Checkpointing]) -> None:
        """Raises for a policy that the framework lacks."""

    # -- what is trained ---------------------------------------------------------------------------------

    has_references = False
    """A frozen model's forward beside the trained one's is simulated."""
    unadapted_degrees: tuple[str, ...] = ("tensor", "pipeline", "context")
    """The parallelisms beside which adapters and frozen weights are not simulated."""

    def check_partial_training(
        self, key: str, table: Table, config: Config | None, parallelism: ParallelismConfig
    ) -> None:
        """Raises NotSimulatedError for adapters or frozen weights, which `key` asks for."""
        for name in self.unadapted_degrees:
            if getattr(parallelism, name) > 1:
                raise NotSimulatedError(
                    f"{key}: not simulated with {name} parallelism under strategy '{table.kind}'; expected "
                    f"{name} = 1, or strategy {_kinds_with_all_degrees()}"
                )

    def check_reference(
        self, where: str, reference: str, table: Table, config: Config | None, parallelism: ParallelismConfig
    ) -> None:
        """Raises NotSimulatedError where zsim does not know the forward of a `reference` (copy or base)."""
        kinds = " or ".join(f"'{kind}'" for kind in kinds_where(lambda training: training.has_references))
        raise NotSimulatedError(
            f"{where}: zsim does not simulate a reference's forward with strategy '{table.kind}' yet; "
            f"expected strategy {kinds}"
        )

    def check_any_model(self, where: str) -> None:
        """Raises InputError where a model that was captured, as `where` says, cannot be trained."""

    # -- adapters ----------------------------------------------------------------------------------------

    keeps_originals = True
    """A module that is trained whole beside adapters is a copy, whose original stays."""
    expert_adapters = ""
    """Its adapters on routed experts, where it has some of its own, in the words of an error."""
    merging_strategy = ""
    """How `[strategy]` says it where PEFT may merge adapters into routed experts, in the words of an
    error.
    """

    def check_quantized(self, where: str) -> None:
        """Raises InputError where the layers have no weights in 4 bits, which `where` asks for."""

    def adopt_adapters(
        self, lora: LoraTable, model: ModelSpec, parallelism: ParallelismConfig
    ) -> tuple[ModelSpec, LoraTable]:
        """The model with the products that the framework adapts, and the adapters on them."""
        return model, lora

    def adapt_experts(self, adapters: Adapters, lora: LoraTable, split: ExpertSplit) -> Adapters | None:
        """The adapters with those of the framework's own on routed experts. None for PEFT's."""
        return None

    def check_merged_adapters(self, where: str, config: Config | None) -> None:
        """Raises for adapters that PEFT merges into routed experts' weights, as `where` says."""

    def check_adapted_experts(self, table: Table, split: ExpertSplit) -> None:
        """Raises NotSimulatedError for settings beside adapters of the framework's own on routed experts."""

    # -- releases of transformers ------------------------------------------------------------------------

    def transformers_4_reason(self, table: Table) -> str:
        """Why the job's transformers is older than 5 where nothing says so. Empty if it is not."""
        return ""

    def transformers_4_changes(self, table: Table) -> dict[str, str]:
        """The keys, with values, of a job that left its releases out and ran with transformers 4."""
        return {"training.transformers": LAST_OF_MODULES}

    def single_expert_notes(self, table: Table) -> list[str]:
        """Notes on routed experts that run one by one."""
        return []


def check_whole_layers(where: str, parallelism: ParallelismConfig) -> None:
    """Raises NotSimulatedError for `where` with model parallelism."""
    if not parallelism.is_trivial:
        raise NotSimulatedError(
            f"{where}: not simulated with model parallelism under this strategy; expected data parallelism "
            "alone"
        )


def training_of(kind: str) -> FrameworkTraining[Any, Any]:
    """The part of the framework of a kind."""
    return cast(FrameworkTraining[Any, Any], role_of(kind, "training", "TRAINING"))


def kinds_where(has_trait: Callable[[FrameworkTraining[Any, Any]], bool]) -> list[str]:
    """The kinds of the frameworks with a trait, for the sentences that recommend them."""
    return [kind for kind in kinds() if has_trait(training_of(kind))]


def phrases_of(trait: Callable[[FrameworkTraining[Any, Any]], str]) -> list[str]:
    """The words that frameworks have for a trait, of those that have it."""
    return [words for kind in kinds() if (words := trait(training_of(kind)))]


def _kinds_with_all_degrees() -> str:
    return " or ".join(f"'{kind}'" for kind in kinds_where(lambda training: not training.unadapted_degrees))


_WHERE = "training.optimizer"


def choose_optimizer(
    table: TrainingTable, strategy: StrategyTable, config: StrategyConfig | None
) -> Optimizer:
    """The optimizer, checked against its strategy. `config` is that of `FrameworkTraining`.

    Raises InputError for pairs that the framework refuses, and for keys without effect. Raises
    NotSimulatedError for what zsim lacks.
    """
    optimizer = optimizer_of(table.optimizer)
    if optimizer.strategy not in ("", strategy.kind):
        raise InputError(
            f"{_WHERE}: '{optimizer.name}' of {optimizer.source} reduces gradients itself; found strategy "
            f"'{strategy.kind}', expected '{optimizer.strategy}', or another optimizer"
        )
    _check_keys(table, optimizer)
    training_of(strategy.kind).check_optimizer(optimizer, table, strategy, config)
    return optimizer


def _check_keys(table: TrainingTable, optimizer: Optimizer) -> None:
    if table.optimizer_implementation != "fused" and not optimizer.is_torch_list:
        raise InputError(
            f"training.optimizer_implementation: '{optimizer.name}' of {optimizer.source} has one "
            "implementation; leave the key out"
        )
    if table.paged_states not in (None, "gpu") and not optimizer.is_paged:
        paged_names = ", ".join(candidate.name for candidate in OPTIMIZERS.values() if candidate.is_paged)
        raise InputError(
            f"training.paged_states: the states of '{optimizer.name}' are not paged; expected {_WHERE} to be "
            f"one of {paged_names}"
        )
    if table.stochastic_rounding and not (optimizer.rounds_stochastically and table.stored_dtype == "bf16"):
        rounding_names = ", ".join(
            candidate.name for candidate in OPTIMIZERS.values() if candidate.rounds_stochastically
        )
        raise InputError(
            "training.stochastic_rounding: found true, expected stored_dtype = 'bf16' and one of "
            f"{rounding_names}: torchao rounds so where it writes bf16 weights"
        )


def check_stored_types(training: TrainingConfig, table: TrainingTable, strategy: StrategyTable) -> None:
    """Raises InputError for an `autocast` or `stored_dtype` of `[training]` that its strategy does not have.

    Raises NotSimulatedError for settings that zsim lacks with weights that are kept in 16 bits.
    """
    framework = training_of(strategy.kind)
    low = "bf16" if training.precision == "fp8" else training.precision
    if training.autocast and (not framework.has_autocast or low == "fp32"):
        raise InputError(
            f"training.autocast: found true with strategy '{strategy.kind}' in {low}; expected "
            f"{_alternatives(kinds_where(lambda candidate: candidate.has_autocast))} in bf16 or fp16 "
            f"({' and '.join(_titles_under_autocast())} is under autocast anyway)"
        )
    if training.stored_dtype == "fp32":
        return
    if not framework.has_stored_dtype:
        kinds = kinds_where(lambda candidate: candidate.has_stored_dtype)
        raise InputError(
            f"training.stored_dtype: strategy '{strategy.kind}' has its own; expected {_alternatives(kinds)}"
        )
    framework.check_stored_dtype(training, table, strategy)
    if training.stored_dtype != low:
        raise InputError(
            f"training.stored_dtype: found '{training.stored_dtype}' with precision {training.precision}; "
            "expected 'fp32', or precision bf16 or fp8"
        )


def _titles_under_autocast() -> list[str]:
    return phrases_of(lambda framework: framework.title if framework.is_under_autocast else "")


def _alternatives(kinds: list[str]) -> str:
    *others, last = (f"'{kind}'" for kind in kinds)
    return f"{', '.join(others)} or {last}" if others else last
