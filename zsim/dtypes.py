"""The element types of tensors: bytes, and their names in torch, NCCL and DeepSpeed.

Sources: torch 2.13 (c10/core/ScalarType.h, and `getNcclDataType` in torch/csrc/distributed/c10d), NCCL
(src/device/generate.py: signed sums run as unsigned ones), DeepSpeed 0.19.8 (`DtypeEnum` in
runtime/config_utils.py), and the C++ names that older profilers write.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ElementType:
    """An element type, by its names in each program."""

    name: str
    bytes: int
    torch: str
    """The attribute of `torch`."""
    scalar_type: str
    """The name that torch.profiler writes."""
    nccl: str
    """The name in NCCL's kernel, "" if NCCL has none."""
    aliases: tuple[str, ...] = ()
    """Further names in traces, in lower case."""

    @property
    def spellings(self) -> tuple[str, ...]:
        """The type's possible names in DeepSpeed's JSON."""
        return (self.name, self.torch, f"torch.{self.torch}", self.scalar_type.lower())


ELEMENT_TYPES: dict[str, ElementType] = {
    element.name: element
    for element in (
        ElementType("fp64", 8, "float64", "Double", "f64"),
        ElementType("fp32", 4, "float32", "Float", "f32"),
        ElementType("tf32", 4, "float32", "Float", "f32"),  # fp32 in memory
        ElementType("bf16", 2, "bfloat16", "BFloat16", "bf16", ("c10::bfloat16",)),
        ElementType("fp16", 2, "float16", "Half", "f16", ("c10::half",)),
        ElementType("fp8", 1, "float8_e4m3fn", "Float8_e4m3fn", "u8", (
            "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "c10::float8_e4m3fn", "c10::float8_e5m2",
        )),
        ElementType("int8", 1, "int8", "Char", "u8", ("signed char",)),
        ElementType("uint8", 1, "uint8", "Byte", "u8", ("unsigned char",)),
        ElementType("int16", 2, "int16", "Short", "", ("short int",)),
        ElementType("int32", 4, "int32", "Int", "u32"),
        ElementType("int64", 8, "int64", "Long", "u64", ("long int", "long long")),
        ElementType("bool", 1, "bool", "Bool", "u8"),
    )
}  # fmt: skip

DTYPE_BYTES: dict[str, int] = {name: element.bytes for name, element in ELEMENT_TYPES.items()}
