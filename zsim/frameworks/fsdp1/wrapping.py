"""The modules that FSDP1 wraps, and so the parameters that share one flat parameter.

Wrapped modules nest: a flat parameter holds the parameters below its module that are not below a wrapped
module inside it. The root holds the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zsim.cost.memory import flat_numel, quantisation_bytes
from zsim.dtypes import DTYPE_BYTES
from zsim.errors import InputError, NotSimulatedError, did_you_mean
from zsim.frameworks.fsdp1.settings import Fsdp1Config
from zsim.plan.workload.workload import ModuleCall, Workload
from zsim.reading import parse_whole_number
from zsim.specs.model.spec import Parameter

BLOCK_WRAPPINGS = ("huggingface", "torchtitan-0.1", "torchtitan")
WRAPPINGS = (*BLOCK_WRAPPINGS, "peft", "none", "size:N")


@dataclass(frozen=True)
class FlatUnit:
    """One FSDP1 instance, with its flat parameter."""

    path: str
    """The wrapped module's name ("" is the root)."""
    first: str
    """The first module call of the module."""
    last: str
    """Its last module call."""
    owners: tuple[str, ...]
    """The calls whose parameters it holds."""
    numel: int
    shard_size: int
    """The ranks that it is sharded over (1 under NO_SHARD). It is padded to a multiple of them."""
    trainable_numel: int
    """Elements with a gradient."""
    types: FlatTypes
    """The types in which it is kept, gathered and reduced."""
    scale_bytes: int = 0
    """Bytes of the scales of its 4-bit weights, on every rank."""
    num_parameters: int = 1
    """The parameters that are views of it."""

    @property
    def trained_shard_numel(self) -> int:
        """Elements with a gradient in a shard, at most."""
        return min(self.shard_numel, self.trainable_numel)

    @property
    def name(self) -> str:
        return self.path or "root"

    @property
    def is_root(self) -> bool:
        return not self.path

    @property
    def shard_numel(self) -> int:
        return -(-self.numel // self.shard_size)

    @property
    def padded_numel(self) -> int:
        return self.shard_numel * self.shard_size

    @property
    def stored_shard_bytes(self) -> int:
        return self.types.stored_bytes * self.shard_numel


@dataclass(frozen=True, slots=True)
class FlatTypes:
    """The types of one flat parameter."""

    stored: str
    param: str
    """The type in which it is gathered."""
    reduce: str
    casts_shards: bool
    """Whether a shard is copied before its gather, into another type."""

    @property
    def stored_bytes(self) -> int:
        return DTYPE_BYTES[self.stored]

    @property
    def param_bytes(self) -> int:
        return DTYPE_BYTES[self.param]

    @property
    def reduce_bytes(self) -> int:
        return DTYPE_BYTES[self.reduce]


def _flat_types(path: str, parameters: Sequence[Parameter], strategy: Fsdp1Config, stored: str) -> FlatTypes:
    """The types of a flat parameter. Raises InputError for parameters that torch does not flatten together
    (torch 2.13 distributed/fsdp/ _flat_param.py, `_validate_tensors_to_flatten`). Without `MixedPrecision` (a
    model kept in 16 bits) all is done in the type a parameter has.
    """
    low_dtype = strategy.param_dtype if strategy.param_dtype != "fp32" else "bf16"
    dtypes = sorted(
        {low_dtype if parameter.is_packed else parameter.stored_dtype or stored for parameter in parameters}
    )
    name = path or "the root"
    if len(dtypes) > 1:
        raise InputError(
            f"training.lora.dtype: FSDP1 flattens the parameters of '{name}' together, which are "
            f"{' and '.join(dtypes)} ('Must flatten tensors with uniform dtype'); expected "
            f"strategy.wrapping = 'peft', or training.lora.dtype = '{low_dtype}'"
        )
    if not strategy.use_orig_params and len({parameter.trainable for parameter in parameters}) > 1:
        raise InputError(
            f"strategy.use_orig_params: found false, but '{name}' has frozen and trained parameters, which "
            "FSDP1 then does not flatten together ('Must flatten tensors with uniform `requires_grad`'); "
            "expected true, or strategy.wrapping = 'peft'"
        )
    dtype = dtypes[0] if dtypes else stored
    if stored != "fp32" and dtype != stored:
        return FlatTypes(dtype, dtype, dtype, strategy.before_torch_2)
    casts = strategy.before_torch_2 or strategy.param_dtype != dtype
    return FlatTypes(dtype, strategy.param_dtype, strategy.reduce_dtype, casts)


def make_flat_units(
    workload: Workload, strategy: Fsdp1Config, shard_size: int, stored_dtype: str
) -> list[FlatUnit]:
    """The FSDP1 instances that hold parameters, in the order in which forward enters them: outer before
    inner.

    "huggingface" and torchtitan's presets wrap each block. "peft" wraps each block, and each module with a
    trained weight (PEFT's `fsdp_auto_wrap_policy`). "none" wraps only the root. "size:N" is torch's
    `size_based_auto_wrap_policy` with `min_num_params` N.
    """
    calls = [call for segment in workload.segments for call in segment.calls]
    paths = _wrapped_paths(workload, strategy.wrapping, calls)
    owners: dict[str, list[ModuleCall]] = {path: [] for path in ("", *paths)}
    spans: dict[str, list[str]] = {path: [] for path in owners}
    unit_path_of_call: dict[str, str] = {}
    for call in calls:
        enclosing_paths = [path for path in _ancestors(call.name) if path in spans]
        for path in ("", *enclosing_paths):
            spans[path].append(call.name)
        unit_path_of_call[call.name] = enclosing_paths[-1] if enclosing_paths else ""
    tied = next((call for call in calls if call.borrowed_numel), None)
    for call in calls:
        if call.numel:
            # A tied weight is in one unit only: the root, if embedding and head are in different units.
            is_shared = tied is not None and call.numel == tied.borrowed_numel
            is_in_other_unit = (
                tied is not None and unit_path_of_call[call.name] != unit_path_of_call[tied.name]
            )
            owners["" if is_shared and is_in_other_unit else unit_path_of_call[call.name]].append(call)
    order = {call.name: position for position, call in enumerate(calls)}
    units = []
    for path, unit_calls in owners.items():
        parameters = [parameter for call in unit_calls for parameter in call.parameters]
        if not unit_calls:
            continue
        units.append(
            FlatUnit(
                path,
                spans[path][0],
                spans[path][-1],
                tuple(call.name for call in unit_calls),
                sum(flat_numel(parameter) for parameter in parameters),
                shard_size,
                sum(call.trainable_numel for call in unit_calls),
                _flat_types(path, parameters, strategy, stored_dtype),
                sum(quantisation_bytes(parameter) for parameter in parameters),
                len(parameters),
            )
        )
    return sorted(units, key=lambda unit: (order[unit.first], -order[unit.last], len(unit.path)))


def _wrapped_paths(workload: Workload, wrapping: str, calls: list[ModuleCall]) -> list[str]:
    if wrapping == "none":
        return []
    if wrapping == "peft":
        blocks = [segment.name for segment in workload.segments if segment.kind == "block"]
        return [*blocks, *(call.name for call in calls if call.trainable_numel and call.module.trains_weight)]
    if wrapping in BLOCK_WRAPPINGS:
        return [segment.name for segment in workload.segments if segment.kind == "block"]
    kind, _, threshold = wrapping.partition(":")
    least = parse_whole_number(threshold)
    if kind == "size" and least and workload.model.has_encoder:
        raise NotSimulatedError(
            f"strategy.wrapping: found '{wrapping}' with '{workload.model.name}', an encoder with a decoder, "
            "whose halves would be units too; zsim simulates wrapping by blocks"
        )
    if kind == "size" and least:
        numels = {call.name: call.numel for call in calls if call.numel}
        return size_based_paths(numels, least, module_lists=workload.model.block_lists)
    raise InputError(
        f"strategy.wrapping: unknown preset '{wrapping}'{did_you_mean(wrapping, WRAPPINGS)}; "
        f"fsdp1 knows {', '.join(WRAPPINGS)} (N elements)"
    )


def size_based_paths(
    numels: dict[str, int], min_num_params: int, *, module_lists: Iterable[str] = ()
) -> list[str]:
    """The modules that `size_based_auto_wrap_policy` wraps, children before parents, without the root.

    `numels` maps leaf modules to their elements. `module_lists` are the nn.ModuleLists, which are never
    wrapped themselves. Depth first, a module that has at least `min_num_params` elements left after its
    children were wrapped is wrapped with these. Source: `_recursive_wrap` in torch/distributed/fsdp/wrap.py.
    """
    total: dict[str, int] = {}
    children: dict[str, dict[str, None]] = {}
    for leaf, numel in numels.items():
        parent = ""
        total[""] = total.get("", 0) + numel
        for path in _ancestors(leaf):
            total[path] = total.get(path, 0) + numel
            children.setdefault(parent, {})[path] = None
            parent = path
    never_wrapped = {"", *module_lists}
    wrapped_paths: list[str] = []

    def wrap(path: str) -> int:
        """Wrap modules below and at `path`, and return the number of elements wrapped."""
        if total[path] < min_num_params:
            return 0
        wrapped_numel = sum(wrap(child) for child in children.get(path, ()))
        if path in never_wrapped or total[path] - wrapped_numel < min_num_params:
            return wrapped_numel
        wrapped_paths.append(path)
        return total[path]

    if total:
        wrap("")
    return wrapped_paths


def _ancestors(name: str) -> list[str]:
    """`a`, `a.b`, `a.b.c` for "a.b.c"."""
    components = name.split(".")
    return [".".join(components[: count + 1]) for count in range(len(components))]
