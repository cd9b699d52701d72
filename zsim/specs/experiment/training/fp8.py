"""The recipe of fp8 training that an experiment asks for, checked against its GPU and framework.

The model's products then know how fp8 training treats them: which weights are quantised, which norm writes
what a product reads, and which layers stay in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from zsim.errors import InputError, ZsimError
from zsim.operations.operation import Role
from zsim.specs.cluster.gpu import Gpu
from zsim.specs.experiment.training.framework_training import training_of
from zsim.specs.experiment.training.table import TrainingTable
from zsim.specs.model.spec import Block, Linear, ModelSpec, Module, Norm
from zsim.specs.strategy.fp8 import TORCHAO_RECIPES, TRANSFORMER_ENGINE_RECIPES, Fp8, Fp8Recipe
from zsim.specs.strategy.parallelism import ParallelismConfig
from zsim.specs.strategy.table import StrategyTable
from zsim.specs.strategy.training import TrainingConfig


def mark_fp8_layers(
    model: ModelSpec, *, first_in_bf16: int = 0, last_in_bf16: int = 0, fuses_norms: bool = False
) -> ModelSpec:
    """The model with the weights of its blocks' products marked, and with products in bf16 in the blocks at
    its ends.

    `fuses_norms` makes a norm and the product after it one layer, as Transformer Engine's LayerNormLinear.
    """
    count = len(model.blocks)
    marked_blocks: dict[tuple[int, bool], Block] = {}
    blocks = []
    for number, block in enumerate(model.blocks):
        is_end = number < first_in_bf16 or number >= count - last_in_bf16
        key = id(block), is_end
        if key not in marked_blocks:
            marked_blocks[key] = (
                _keep_block_in_bf16(block) if is_end else _quantize_block(block, fuses_norms=fuses_norms)
            )
        blocks.append(marked_blocks[key])
    return replace(model, blocks=tuple(blocks))


def unmark_fp8_layers(model: ModelSpec) -> ModelSpec:
    """The model as it was before `mark_fp8_layers`."""
    return model.map_blocks(lambda block: replace(block, modules=tuple(map(_unmark_module, block.modules))))


def _unmark_module(module: Module) -> Module:
    parameters = tuple(replace(parameter, in_fp8=False) for parameter in module.parameters)
    return replace(module, op_spec=module.op_spec.unmark_fp8(), parameters=parameters)


def _keep_block_in_bf16(block: Block) -> Block:
    modules = [replace(module, op_spec=module.op_spec.keep_in_bf16()) for module in block.modules]
    return replace(block, modules=tuple(modules))


def _quantize_block(block: Block, *, fuses_norms: bool) -> Block:
    modules: list[Module] = []
    for module in block.modules:
        op_spec = module.op_spec
        if isinstance(op_spec, Linear) and op_spec.takes_fp8 and not module.is_adapter_product:
            marked = tuple(
                replace(parameter, in_fp8=True) if len(parameter.shape) == 2 else parameter
                for parameter in module.parameters
            )
            before = modules[-1].op_spec if modules else None
            if fuses_norms and isinstance(before, Norm):
                modules[-1] = replace(modules[-1], op_spec=replace(before, writes_fp8=True))
                op_spec = replace(op_spec, follows_norm=True)
            module = replace(module, op_spec=op_spec, parameters=marked)
        modules.append(module)
    return replace(block, modules=tuple(modules))


# The least compute capability of each recipe: Transformer Engine 2.17 pytorch/quantization.py
# (`_compute_fp8_support` and those after it), torchtitan v0.2.2 components/quantization/float8.py.
_MIN_CAPABILITIES: dict[Fp8Recipe, float] = {"block": 9.0, "mxfp8": 10.0, "nvfp4": 10.0}
_FP8_MIN_CAPABILITY, _TRANSPOSES_UNTIL = 8.9, 10.0
_CONSUMER_BLACKWELL = (12.0, 13.0)  # no mxfp8, and operands along one direction only
_FALLBACKS: tuple[Fp8Recipe, ...] = ("mxfp8", "block", "current")


def infer_fp8_precision(table: TrainingTable) -> TrainingTable:
    """`[training]` with precision "fp8" where a recipe is set and no precision.

    Raises InputError for keys of fp8 with another precision.
    """
    if table.fp8_recipe is not None and table.precision is None:
        return table.model_copy(update={"precision": "fp8"})
    for key in ("fp8_recipe", "bf16_first_layers", "bf16_last_layers"):
        if getattr(table, key) and table.precision != "fp8":
            label = f"'{table.precision}'" if table.precision else "none"
            raise InputError(
                f"training.{key}: found {getattr(table, key)!r} with training.precision {label}, where no "
                "product is cast; expected precision 'fp8', or no such key"
            )
    return table


def resolve_fp8(
    table: TrainingTable, strategy: StrategyTable, gpu: Gpu, model: ModelSpec
) -> tuple[Fp8, ModelSpec, Sequence[str]]:
    """The recipe, the model with its fp8 products marked, and notes on what a GPU makes of the recipe.

    Raises InputError for a recipe that the GPU or the framework lacks.
    """
    framework = training_of(strategy.kind)
    recipe = table.fp8_recipe or framework.default_recipe(strategy)
    framework.check_recipe(recipe, table, strategy)
    _check_gpu(recipe, gpu)
    notes = []
    if recipe == "block" and (gpu.compute_capability or 0.0) >= _MIN_CAPABILITIES["mxfp8"]:
        notes.append(
            f"fp8_recipe 'block': GPU '{gpu.name}' computes it as mxfp8, with scales that are its own"
        )
    layers = len(model.blocks)
    first, last = table.bf16_first_layers, table.bf16_last_layers
    if first + last > layers:
        raise InputError(
            f"training.bf16_first_layers: found {first}, and {last} at the end, of {layers} layers; expected "
            f"at most {layers} together"
        )
    fp8 = replace(framework.make_fp8(recipe, strategy), transposes=_transposes(gpu))
    fuses_norms = framework.fuses_norms(strategy)
    model = mark_fp8_layers(model, first_in_bf16=first, last_in_bf16=last, fuses_norms=fuses_norms)
    return fp8, model, notes


def recipes_of(table: TrainingTable, strategy: StrategyTable, gpus: Sequence[Gpu]) -> list[Fp8Recipe]:
    """The recipes that a framework has on every one of these GPUs, its default first. They are all of one
    library, as the default is.
    """
    default = training_of(strategy.kind).default_recipe(strategy)
    library = TORCHAO_RECIPES if default in TORCHAO_RECIPES else TRANSFORMER_ENGINE_RECIPES
    recipes: list[Fp8Recipe] = []
    for recipe in sorted(library, key=lambda name: name != default):
        try:
            training_of(strategy.kind).check_recipe(recipe, table, strategy)
            for gpu in gpus:
                _check_gpu(recipe, gpu)
        except ZsimError:
            continue
        recipes.append(recipe)
    return recipes


def _transposes(gpu: Gpu) -> bool:
    """Whether 8-bit operands are read along one direction only (`is_non_tn_fp8_gemm_supported`).

    GPUs of other vendors are assumed to read both.
    """
    low, high = _CONSUMER_BLACKWELL
    capability = gpu.compute_capability
    if gpu.vendor != "nvidia" or capability is None:
        return False
    return capability < _TRANSPOSES_UNTIL or low <= capability < high


def _check_gpu(recipe: Fp8Recipe, gpu: Gpu) -> None:
    """Raises InputError where the GPU lacks the recipe. The message names the nearest recipe that it has."""
    capability, lowest = gpu.compute_capability, _MIN_CAPABILITIES.get(recipe, _FP8_MIN_CAPABILITY)
    if gpu.vendor != "nvidia" or capability is None:
        if recipe in _MIN_CAPABILITIES:
            raise InputError(
                f"training.fp8_recipe: '{recipe}' needs an NVIDIA GPU of compute capability {lowest:g} or "
                f"more, found GPU '{gpu.name}'; the nearest that it has is 'current'"
            )
        return
    low, high = _CONSUMER_BLACKWELL
    is_refused = capability < lowest or (recipe == "mxfp8" and low <= capability < high)
    if not is_refused and recipe == "nvfp4" and gpu.peak.fp4 is None:
        raise InputError(
            f"training.fp8_recipe: 'nvfp4' needs a rate of fp4 products, which GPU '{gpu.name}' does not "
            f"state (peak.fp4); the nearest that it has is '{_nearest_recipe(capability)}'"
        )
    if is_refused:
        raise InputError(
            f"training.fp8_recipe: '{recipe}' is not there on GPU '{gpu.name}' of compute capability "
            f"{capability:g} (from {lowest:g} on{'' if capability < lowest else f', but for {low:g}'}); the "
            f"nearest that it has is '{_nearest_recipe(capability)}'"
        )


def _nearest_recipe(capability: float) -> Fp8Recipe:
    low, high = _CONSUMER_BLACKWELL
    for recipe in _FALLBACKS:
        is_left_out = recipe == "mxfp8" and low <= capability < high
        if capability >= _MIN_CAPABILITIES.get(recipe, _FP8_MIN_CAPABILITY) and not is_left_out:
            return recipe
    return "current"


def check_fp8_shapes(model: ModelSpec, training: TrainingConfig, parallelism: ParallelismConfig) -> None:
    """Raises InputError for tokens and, on a tensor-parallel rank, features that a recipe cannot cast.

    The gradient of a weight sums over tokens, and fp8 products sum over multiples of 16 elements only.
    torch's `_scaled_mm` refuses others ("Expected trailing dimension of mat1 to be divisible by 16"). torchao
    pads only where `pad_inner_dim` asks for it (False by default, and torchtitan leaves it so). Transformer
    Engine's `assert_dim_for_fp8_exec` refuses sizes that are not multiples of 8, and its mxfp8 tensors those
    that are not multiples of 32 in both dimensions. With blocks of 128, a part that is gathered must be whole
    blocks (`is_quantizable`), else it is gathered in 16 bits.

    Sources: pytorch/ao issue 571, torchao/float8/config.py. NVIDIA/TransformerEngine 2.17, pytorch/utils.py,
    csrc/quantizer.cpp.
    """
    if training.precision != "fp8":
        return
    _check_tokens(training, parallelism)
    ranks, multiple = parallelism.tensor, training.fp8.dimension_multiple
    for block in model.unique_blocks:
        is_row_split = False
        for module in block.modules:
            work = module.op_spec
            if module.role in (Role.MIXER, Role.ACTIVATION):
                is_row_split = True
            if not isinstance(work, Linear) or work.in_bf16 or not _has_fp8_weight(module.parameters):
                continue
            split_size = work.in_features if is_row_split else work.out_features
            unsplit_size = work.out_features if is_row_split else work.in_features
            is_row_split = False
            for length in (split_size / ranks, unsplit_size):
                if length % multiple and (ranks > 1 or training.fp8.is_transformer_engine):
                    shape = f"{work.in_features:,} x {work.out_features:,}"
                    suffix = f" on each of {ranks} tensor-parallel ranks" if ranks > 1 else ""
                    raise InputError(
                        f"training.fp8_recipe: '{training.fp8.recipe}' casts multiples of {multiple} "
                        f"elements, but '{module.name}' ({shape}) has {length:,g}{suffix}; "
                        + _nearest_shape(length, multiple)
                    )


def _has_fp8_weight(parameters: tuple[object, ...]) -> bool:
    return any(getattr(parameter, "in_fp8", False) for parameter in parameters)


def _nearest_shape(length: float, multiple: int) -> str:
    if not length % 16 and multiple == 32:
        return "the nearest recipe that takes it is 'current'"
    return "expected fewer tensor-parallel ranks, or precision 'bf16'"


def _check_tokens(training: TrainingConfig, parallelism: ParallelismConfig) -> None:
    shards, multiple = parallelism.context, training.fp8.dimension_multiple
    if training.fp8.gathered_multiple > 1 and parallelism.sequence_parallel and parallelism.tensor > 1:
        shards, multiple = shards * parallelism.tensor, training.fp8.gathered_multiple
    tokens, divisor = training.micro_batch_tokens, multiple * shards
    if tokens % divisor == 0:
        return
    step = divisor // gcd(training.micro_batch_size, divisor)
    suffix = f" ({multiple} on each of {shards} ranks)" if shards > 1 else ""
    length = training.sequence_length
    nearest = max(step, round(length / step) * step)
    raise InputError(
        f"training.sequence_length: found {length:,} (times micro_batch_size {training.micro_batch_size:,}: "
        f"{tokens:,} tokens) with precision fp8, expected a number of tokens that {divisor} divides{suffix}: "
        f"the gradients of weights are products over them, which torch refuses otherwise; the nearest "
        f"sequence_length is {nearest:,}"
    )
