"""`training.software`: the releases that a job runs, as defaults of other keys.

`presets/software.toml` says which key has which value by default in which release. A key that the experiment
says keeps its value.

`training.transformers` names the release of transformers that runs a model's routed experts, or other
software of the job implies it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from zsim.errors import InputError, did_you_mean
from zsim.files import preset_table
from zsim.specs.cluster.cluster import Cluster
from zsim.specs.cluster.gpu import Gpu
from zsim.specs.experiment.training.attention import has_efficient_default, release_number
from zsim.specs.experiment.training.framework_training import training_of
from zsim.specs.experiment.training.table import LAST_OF_MODULES, NEWEST, TrainingTable
from zsim.specs.model.expert_layer import stacked_experts
from zsim.specs.model.expert_loop import has_looped_form
from zsim.specs.model.spec import ModelSpec
from zsim.specs.strategy.expert_library import TRANSFORMERS
from zsim.specs.strategy.experts import ExpertSplit
from zsim.specs.strategy.table import StrategyTable

if TYPE_CHECKING:
    from zsim.specs.experiment.tables import Experiment


_KEY = "training.software"
_PRESET = "software"
_ATTENTION = "training.attention"


def apply_software(
    experiment: Experiment, cluster: Cluster, model: ModelSpec
) -> tuple[Experiment, Sequence[str]]:
    """The experiment with the defaults of the releases that it names, and notes that list them.

    Keys that are filled in do not count as set. Raises InputError for software that does not exist, for a
    year before or after all releases, and for software beside a strategy that does not run it.
    """
    requested = experiment.training.software
    if requested is None:
        return experiment, ()
    releases = _releases_of(requested, experiment)
    values: dict[str, Any] = {}
    for entry in preset_table(_PRESET)["default"]:
        key, release = entry["key"], releases.get(entry["software"])
        if release is None or key in values or not _holds(entry, release, experiment, model):
            continue
        value = _value(entry, release, experiment, cluster)
        if value is not None:
            values[key] = value
    changed = [
        f"{key} = {_toml(value)}" for key, value in values.items() if _setting(experiment, key) != value
    ]
    titles = ", ".join(f"{name} {release}" for name, release in releases.items())
    note = (
        f"{_KEY}: {titles}, whose defaults are taken for what is left out: {', '.join(changed)}"
        if changed
        else f"{_KEY}: {titles}; nothing that this job leaves out has another default there"
    )
    return _fill(experiment, values), (note,)


def _releases_of(requested: str, experiment: Experiment) -> dict[str, str]:
    """The release of each software that is named, or that a year means for the job."""
    software: Mapping[str, Mapping[str, Any]] = preset_table(_PRESET)["software"]
    releases: dict[str, str] = {}
    named: set[str] = set()
    for part in (part.strip() for part in requested.split(",")):
        if re.fullmatch(r"\d{4}", part):
            releases |= dict(_releases_in(part, software, experiment))
            continue
        match = re.fullmatch(r"(.*?)[ =]*v?(\d+(?:\.\d+){0,3})", part)
        name = (match[1] if match else part).strip().lower()
        names = {alias: key for key, entry in software.items() for alias in (key, *entry.get("words", ()))}
        if name not in names:
            raise InputError(
                f"{_KEY}: found '{part}', expected a year, or a release of {', '.join(software)}"
                f"{did_you_mean(name, names)}"
            )
        name = names[name]
        if match is None:
            newest = list(software[name]["years"].values())[-1]
            raise InputError(
                f"{_KEY}: found '{part}' without a release, expected one as in '{name} {newest}'"
            )
        kind = experiment.strategy.kind
        if kind not in software[name]["kinds"]:
            raise InputError(
                f"{_KEY}: found '{part}' with strategy '{kind}'; expected a strategy that runs {name}: "
                f"{', '.join(software[name]['kinds'])}"
            )
        if name in named:
            raise InputError(f"{_KEY}: names {name} twice, expected one release of it")
        named.add(name)
        releases[name] = match[2]
    return releases


def _releases_in(
    year: str, software: Mapping[str, Mapping[str, Any]], experiment: Experiment
) -> Iterator[tuple[str, str]]:
    """The last releases of a year, of the software that the job runs."""
    run_by_job = {
        name: entry["years"]
        for name, entry in software.items()
        if any(_matches(values, experiment) for values in entry["in_years"])
    }
    years = sorted({number for releases in run_by_job.values() for number in releases})
    if not years or not years[0] <= year <= years[-1]:
        expected = f"a year from {years[0]} to {years[-1]}" if years else "software with its release"
        raise InputError(f"{_KEY}: found '{year}', expected {expected}")
    for name, releases in run_by_job.items():
        earlier = [number for number in sorted(releases) if number <= year]
        if earlier:
            yield name, releases[earlier[-1]]


def _holds(entry: Mapping[str, Any], release: str, experiment: Experiment, model: ModelSpec) -> bool:
    number, when = release_number(release), entry.get("when", {})
    before = entry["families"].get(model.language_family, "0") if "families" in entry else entry.get("before")
    is_in_range = release_number(entry.get("since", "0")) <= number and (
        before is None or number < release_number(before)
    )
    return is_in_range and not _is_set(experiment, entry["key"]) and _matches(when, experiment)


def _matches(values: Mapping[str, Sequence[Any]], experiment: Experiment) -> bool:
    return all(_setting(experiment, key) in allowed for key, allowed in values.items())


def _value(entry: Mapping[str, Any], release: str, experiment: Experiment, cluster: Cluster) -> Any:
    """The value of an entry for the job's GPUs. None if they know none of its values."""
    value = entry["value"]
    if isinstance(value, str):
        return value.format(release=release)
    if not isinstance(value, list):
        return value
    assert entry["key"] == _ATTENTION
    if experiment.training.precision == "fp32":
        return None
    return next((name for name in value if _runs(name, cluster.gpus)), None)


def _runs(attention: str, gpus: Sequence[Gpu]) -> bool:
    """Whether the GPUs run a kernel of attention by default in its releases."""
    if attention == "efficient":
        return has_efficient_default(gpus)
    return all(
        gpu.supports_flash_attention and (attention == "flash" or attention in gpu.attention.variants)
        for gpu in gpus
    )


def _table(experiment: Experiment, key: str) -> tuple[BaseModel, str]:
    table, _, name = key.partition(".")
    model: BaseModel = getattr(experiment, table)
    return model, name


def _is_set(experiment: Experiment, key: str) -> bool:
    model, name = _table(experiment, key)
    return name in model.model_fields_set


def _setting(experiment: Experiment, key: str) -> Any:
    model, name = _table(experiment, key)
    return getattr(model, name, None)


def _fill(experiment: Experiment, values: Mapping[str, Any]) -> Experiment:
    """The experiment with values of keys, which still count as left out."""
    tables: dict[str, BaseModel] = {}
    for key, value in values.items():
        table, _, name = key.partition(".")
        model = tables.get(table, getattr(experiment, table))
        fields = {**dict(model), name: value}
        tables[table] = type(model).model_construct(_fields_set=set(model.model_fields_set), **fields)
    return experiment.model_copy(update=tables)


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'


_TRANSFORMERS = "training.transformers"
ASSUMED_STACKED = "routed experts are assumed to be stacked"
"""The note on a release that nothing says begins with it."""


def runs_experts_one_by_one(
    model: ModelSpec,
    requested: TrainingTable,
    strategy: StrategyTable,
    split: ExpertSplit,
    *,
    has_mask: bool,
) -> tuple[bool, Sequence[str]]:
    """Whether every routed expert has modules of its own, as up to transformers 4.57, and notes on what is
    assumed of it.

    If `training.transformers` is left out, the framework's release decides, else 5 is assumed. `has_mask`
    says that attention has a padding mask, which differs by release.

    Raises InputError together with code that is not transformers'.
    """
    release = requested.transformers
    number = None if release is None else release_number(release)[0]
    has_experts = stacked_experts(model) is not None
    if "transformers" not in requested.model_fields_set and not (
        has_experts and split.library == TRANSFORMERS
    ):
        release = None  # that of `training.software`, which runs other parts of the job
    if not has_experts:
        is_mute = release and not has_mask and not requested.has_4_bits
        note = f"{_TRANSFORMERS} is without effect: '{model.name}' has no routed experts"
        return False, [note] if is_mute else []
    if split.library != TRANSFORMERS:
        if release is None:
            return False, ()
        raise InputError(
            f"{_TRANSFORMERS}: found '{release}', but the routed experts of this job are run by the code of "
            f"'{split.library.name}'; expected it left out"
        )
    if not has_looped_form(model.family):
        return False, ()
    framework = training_of(strategy.kind)
    if number is not None:
        return number < 5, framework.single_expert_notes(strategy) if number < 5 else ()
    if reason := framework.transformers_4_reason(strategy):
        note = (
            "routed experts are assumed to run one by one, each three linear layers, as in transformers 4: "
            f'{reason}; {_TRANSFORMERS} = "{NEWEST}" has them stacked'
        )
        return True, (note,)
    note = (
        f"{ASSUMED_STACKED} and to run together, as from transformers 5 on; up to "
        f"{LAST_OF_MODULES} each is three linear layers and they run one by one, which takes up to "
        f'several times as long: {_TRANSFORMERS} = "{LAST_OF_MODULES}"'
    )
    return False, (note,)
