"""One forward and backward of a module: operators, the tensors they read and wrote, where they ran.

Torch-free: `zsim.specs.capture.recorder` fills it, everything behind reads it.
"""

from __future__ import annotations

from dataclasses import field

from zsim.dataclass import dataclass


@dataclass(slots=True)
class Storage:
    """Memory of one or several tensors.

    `is_low`: holds values of the type that the module computes in, which follows the training's precision;
    others keep their type. `grows`: with the samples of the micro-batch (it depends on the inputs).
    `parameter`: the full name, where it is one. `born` and `died`: numbers of operators (None: it was there
    before, or lived to the end); `creator`: the place that made it; `savers`: the places whose backward needs
    it, in order.
    """

    num_bytes: int
    item_bytes: int
    is_low: bool
    grows: bool
    parameter: str = ""
    is_input: bool = False
    born: int | None = None
    died: int | None = None
    creator: int | None = None
    savers: list[int] = field(default_factory=list)
    is_gradient: bool = False


@dataclass(frozen=True, slots=True)
class Use:
    """A read or a write of `numel` distinct elements of a storage (by its number)."""

    storage: int
    numel: int
    item_bytes: int


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product, or fused attention: FLOPs, shape and layout as of `zsim.cost.kernels.kernel`;
    `scaled`: which number of the shape grows with the samples."""

    kind: str
    flops: float
    shape: tuple[int, ...]
    scaled: int | None = None
    layout: str = "nt"
    is_causal: bool = False
    dropout: float = 0.0
    heads: int = 0
    kv_heads: int = 0
    v_head_dim: int = 0
    has_mask: bool = False


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator at a place; `products`: what it multiplies; `is_priced`: whether zsim knows that memory
    bandwidth bounds it, where it is no product; `sums_gradients`: autograd adds gradients of one tensor."""

    name: str
    place: int
    reads: tuple[Use, ...]
    writes: tuple[Use, ...]
    products: tuple[Product, ...] = ()
    is_priced: bool = True
    sums_gradients: bool = False


@dataclass(frozen=True, slots=True)
class RunPlace:
    """A stretch of operators in one call of one module, with no child called in between. `path`: the module's
    name ("" the root); `call`: which call of all it belongs to."""

    path: str
    call: int


@dataclass(slots=True)
class ModuleRun:
    """One call of a module: `parent` is the number of the call around it (-1 for the root's)."""

    path: str
    parent: int
    input_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ParameterRecord:
    """A parameter in the order of `named_parameters()`; `storage`: its number."""

    name: str
    shape: tuple[int, ...]
    is_trainable: bool
    storage: int


@dataclass(frozen=True, slots=True)
class ModuleRecord:
    """A module of the tree; `is_list`: a container whose children are numbered (ModuleList, Sequential);
    `no_split`: class names that the module itself says are kept whole (`_no_split_modules`)."""

    path: str
    kind: str
    is_list: bool
    children: tuple[str, ...]
    no_split: tuple[str, ...] = ()


@dataclass
class ModuleRecording:
    """Everything recorded, in order. `samples`: of the example; `positions`: of one sample, where the example
    itself says (token ids), else None. `assumes_full`: forward asked whether all elements of a tensor fulfil
    a condition, and was told so. `forward` and `backward`: operators."""

    samples: int
    positions: int | None
    has_loss: bool
    modules: dict[str, ModuleRecord]
    parameters: list[ParameterRecord]
    storages: list[Storage] = field(default_factory=list)
    places: list[RunPlace] = field(default_factory=list)
    calls: list[ModuleRun] = field(default_factory=list)
    forward: list[Operator] = field(default_factory=list)
    backward: list[Operator] = field(default_factory=list)
    assumes_full: bool = False
    hidden_size: int | None = None
    vocab_size: int | None = None
