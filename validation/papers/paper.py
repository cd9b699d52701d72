"""A paper's claims, as its TOML states them.

A claim is a number of the paper with its place there, and what zsim says for it: a `quantity` of an
experiment (`job`), of the ratio of two (`job` and `against`), or of a published run (`row`).
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

FOLDER = Path(__file__).resolve().parent


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Claim(_Strict):
    """One number of a paper."""

    text: str
    """What is claimed, in a few words."""
    where: str
    """Table, figure, section or page."""
    value: float
    """The paper's number."""
    unit: str = ""
    quantity: str = ""
    """The name of a function of `quantities.py`. Empty where nothing is compared."""
    job: dict[str, Any] = {}
    """The experiment, as the tables of an experiment file."""
    against: dict[str, Any] = {}
    """Tables that the experiment of the denominator has in place of the job's, for a ratio."""
    parameters: float | None = None
    """The paper's number of parameters, where its model is scaled from the job's."""
    row: str = ""
    """The published run (validation/published), in place of a job."""
    against_row: str = ""
    """The published run of the denominator, for a ratio of seconds."""
    note: str = ""
    """Why they differ, or what the paper leaves open."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Claim:
        if self.quantity and bool(self.job) == bool(self.row):
            raise ValueError(f"'{self.text}': expected either a job or a row")
        return self


class Slip(_Strict):
    """A sum that popular texts get wrong."""

    text: str
    """What is said."""
    right: str
    """What the sum is, with `{}` for zsim's number."""
    quantity: str
    job: dict[str, Any]


class Paper(_Strict):
    """A paper."""

    title: str
    authors: str
    year: int
    reference: str
    """arXiv number, or conference."""
    read: str
    """Where its numbers were read, and what could not be read."""
    order: int = 0
    """Its place on the page."""
    kind: Literal["paper", "texts"] = "paper"
    jobs: dict[str, dict[str, Any]] = {}
    """Tables that several claims have in common, by name: a claim's `job.base` names one."""
    claims: tuple[Claim, ...] = ()
    slips: tuple[Slip, ...] = Field(default=())


def read_papers() -> list[Paper]:
    """All papers, in the order of the page."""
    papers = [read_paper(path) for path in sorted(FOLDER.glob("*.toml"))]
    return sorted(papers, key=lambda paper: (paper.order, paper.year, paper.title))


def read_paper(path: Path) -> Paper:
    """The paper of a TOML."""
    return Paper.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The tables of `base` with those of `changes`, key by key."""
    tables = dict(base)
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(tables.get(key), dict):
            value = merged(tables[key], value)
        tables[key] = value
    return tables


def experiment_of(paper: Paper, job: dict[str, Any]) -> dict[str, Any]:
    """The tables of a claim's experiment, on those of the job that `base` names."""
    base = job.get("base")
    own = {key: value for key, value in job.items() if key != "base"}
    return own if base is None else merged(paper.jobs[base], own)
