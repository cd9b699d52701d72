"""The base of the tables of `[strategy]`, and of what they are resolved to."""

# See [Note: annotations of tables].

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from zsim.specs.lazy_model import StrictTable, resolve_table

Count = Annotated[int, Field(gt=0, strict=True)]


Dtype = Literal["bf16", "fp16", "fp32", "fp8"]


class StrategyTable(StrictTable):
    """`[strategy]` as a framework's users write it. Each framework has one of its own."""

    kind: str = Field(description="whose data parallelism")

    @property
    def has_settings_file(self) -> bool:
        """Whether a file of the framework's, or its content, has further settings, the batch among them."""
        return False

    def file_content(self) -> object:
        """The content of that file. None where the table names none."""
        return None

    def batch_overrides(self, micro_batch: int, steps: int, replicas: int) -> dict[str, int | None]:
        """The overrides of an experiment by dotted keys that give every replica so many micro-batches."""
        return {"training.micro_batch_size": micro_batch, "training.gradient_accumulation_steps": steps}


@dataclass(frozen=True, slots=True)
class StrategyConfig:
    """A table of `[strategy]` with all its defaults filled in, as the plan follows it."""

    kind: ClassVar[str]

    @classmethod
    def resolve(cls, table: StrategyTable, **resolved: Any) -> Self:
        """The `resolved` settings, and those that are as the table of the same names has them."""
        return resolve_table(cls, table, **resolved)

    @property
    def plans_workspaces(self) -> bool:
        """Whether cuBLAS's workspaces are among the plan's memory, as torch's allocator holds them."""
        return False

    def without_origins(self) -> Self:
        """The same values wherever they come from."""
        return self

    def label(self, world_size: int, ranks: int) -> str:
        """Its name in headlines, for a job of `world_size` GPUs. Data parallelism is over `ranks` of them."""
        raise NotImplementedError
