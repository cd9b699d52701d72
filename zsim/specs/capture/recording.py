"""One forward and backward of a module: operators, the tensors that they read and wrote, and where they ran.

It does not need torch. `zsim.specs.capture.recorder` fills it, and the later stages of the capture read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Storage:
    """Memory of one or several tensors."""

    num_bytes: int
    item_bytes: int
    is_low: bool
    """Whether it holds values of the type that the module computes in, which follows the training's
    precision. Others keep their type.
    """
    grows: bool
    """Whether it grows with the samples of the micro-batch, because it depends on the inputs."""
    parameter: str = ""
    """Full name of the parameter, "" for others."""
    born: int | None = None
    """Number of the operator that made it, None if it was there before."""
    died: int | None = None
    """Number of operators that had run when it was freed, None if it lived to the end."""
    creator: int | None = None
    """The site that made it."""
    savers: list[int] = field(default_factory=list)
    """The sites whose backward needs it, in order."""
    is_gradient: bool = False


@dataclass(frozen=True, slots=True)
class Use:
    """A read or a write of `numel` distinct elements of a storage (by its number)."""

    storage: int
    numel: int
    item_bytes: int


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product, or fused attention. Shape and layout are as in `zsim.cost.kernels.kernel`."""

    kind: str
    flops: float
    shape: tuple[int, ...]
    scaled: int | None = None
    """Index in the shape of the number that grows with the samples."""
    layout: str = "nt"
    is_causal: bool = False
    dropout: float = 0.0
    heads: int = 0
    kv_heads: int = 0
    v_head_dim: int = 0
    has_mask: bool = False


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator that ran."""

    name: str
    site: int
    """Number of its site in `ModuleRecording.sites`."""
    reads: tuple[Use, ...]
    writes: tuple[Use, ...]
    products: tuple[Product, ...] = ()
    """The matrix products that it computes."""
    is_priced: bool = True
    """Whether its time is known: it is a product, or memory bandwidth bounds it."""
    sums_gradients: bool = False
    """Whether autograd adds gradients of one tensor by it."""


@dataclass(frozen=True, slots=True)
class CallSite:
    """Consecutive operators in one call of one module, with no child called in between."""

    path: str
    """Name of the module, "" for the root."""
    call: int
    """Number of the call in `ModuleRecording.calls`."""


@dataclass(slots=True)
class ModuleRun:
    """One call of a module."""

    path: str
    parent: int
    """Number of the call around it, -1 for the root's."""
    input_bytes: int = 0
    """Size of the inputs that are activations."""


@dataclass(frozen=True, slots=True)
class ParameterRecord:
    """A parameter, in the order of `named_parameters()`."""

    name: str
    shape: tuple[int, ...]
    is_trainable: bool
    storage: int
    """Number of its storage."""


@dataclass(frozen=True, slots=True)
class ModuleRecord:
    """A module of the tree."""

    path: str
    kind: str
    """Name of its class."""
    is_list: bool
    """Whether it is a container whose children are numbered (ModuleList, Sequential)."""
    children: tuple[str, ...]
    no_split: tuple[str, ...] = ()
    """Class names that the module itself wants kept on one device (`_no_split_modules`)."""


@dataclass
class ModuleRecording:
    """Everything recorded, in order."""

    samples: int
    """Samples of the example."""
    positions: int | None
    """Positions of one sample, None unless the example has token ids."""
    has_loss: bool
    modules: dict[str, ModuleRecord]
    """{path: module}"""
    parameters: list[ParameterRecord]
    storages: list[Storage] = field(default_factory=list)
    sites: list[CallSite] = field(default_factory=list)
    calls: list[ModuleRun] = field(default_factory=list)
    forward: list[Operator] = field(default_factory=list)
    """Operators of forward."""
    backward: list[Operator] = field(default_factory=list)
    """Operators of backward."""
    assumes_full: bool = False
    """Whether forward asked if all elements of a tensor fulfil a condition, which was assumed to be true."""
    hidden_size: int | None = None
    vocab_size: int | None = None
