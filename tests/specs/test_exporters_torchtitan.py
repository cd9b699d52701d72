"""torchtitan's own parser takes the TOML that zsim writes. Needs torchtitan 0.2."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import zsim
from tests.expect import of_kind, there
from tests.specs.written_files import cases_with, job_of, write
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.specs.experiment.resolve import resolve
from zsim.specs.formats.export import export_files

FOUND = importlib.util.find_spec("torchtitan")
pytestmark = pytest.mark.skipif(
    FOUND is None or not importlib.metadata.version("torchtitan").startswith("0.2"),
    reason="needs torchtitan 0.2: pip install zsim[interop]",
)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its ConfigManager, without the models that importing all of torchtitan loads: they need triton."""
    assert FOUND is not None
    package = types.ModuleType("torchtitan")
    package.__path__ = list(FOUND.submodule_search_locations or ())
    monkeypatch.setitem(sys.modules, "torchtitan", package)
    from torchtitan.config.manager import ConfigManager

    return ConfigManager()


@pytest.mark.parametrize("name", cases_with("torchtitan.toml"))
def test_its_parser_takes_every_toml(manager: Any, name: str, tmp_path: Path) -> None:
    job = job_of(name)
    strategy = of_kind(job.strategy, Fsdp2Config)
    write(job, tmp_path)
    config = manager.parse_args([f"--job.config_file={tmp_path / 'torchtitan.toml'}"])
    assert config.training.seq_len == 32
    assert config.training.global_batch_size == 16 * job.training.gradient_accumulation_steps
    assert config.training.enable_cpu_offload == strategy.cpu_offload
    degree = config.parallelism.data_parallel_replicate_degree
    assert (degree, config.parallelism.data_parallel_shard_degree) == (
        strategy.replicate,
        16 // strategy.replicate,
    )
    is_fp8 = job.training.precision == "fp8"
    assert config.model.converters == (["quantize.linear.float8"] if is_fp8 else [])
    gathers = config.quantize["linear"]["float8"] if isinstance(config.quantize, dict) else None
    gathers = gathers or vars(config.quantize.linear.float8)
    assert gathers["enable_fsdp_float8_all_gather"] == (strategy.param_dtype == "fp8")


def registered(folder: str, pattern: str) -> set[str]:
    """What torchtitan's source registers there."""
    assert FOUND is not None
    (root,) = there(FOUND.submodule_search_locations)
    return set(re.findall(pattern, (Path(root) / folder).read_text()))


def test_its_models_and_converters_are_registered_by_these_names() -> None:
    converters = registered("components/quantization/float8.py", r'register_model_converter\(\w+, "([^"]+)"')
    assert "quantize.linear.float8" in converters
    for model in ("llama-3.2-1b", "llama-3-8b", "llama-3-70b", "llama-3.1-405b", "qwen3-8b"):
        job = resolve(zsim.Experiment(model=model, cluster="dgx-h100", nodes=64, strategy={"kind": "fsdp2"}))
        exported = export_files(job)
        named = re.search(r'name = "(\w+)"\nflavor = "(\w+)"', exported.files["torchtitan.toml"])
        if named is None:
            assert any("no flavor that is" in note for note in exported.notes)
        else:
            flavors = registered(f"models/{named[1]}/__init__.py", r'"([\w.]+)": \w+Args\(')
            assert named[2] in flavors
