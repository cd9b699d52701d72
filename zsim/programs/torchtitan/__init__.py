"""torchtitan up to 0.2, which has a TOML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.program import ProgramSource, TrainingProgram

_MODULE, _FILE = "torchtitan.train", "torchtitan/train.py"
_CONFIG_OPTIONS = ("--job.config_file", "--job.config-file")


class Torchtitan(TrainingProgram):
    name = "torchtitan"
    title = "torchtitan"
    kinds = ("fsdp2", "ddp")
    order = 35  # before Megatron, which takes any script
    file_nouns = ("torchtitan TOML",)
    reads = "a torchtitan TOML"
    writes = "a torchtitan TOML"
    example = "train.toml --training.seq_len=4096"
    takes_options = True
    takes_any_options = True
    script_settings = ("training.precision", "training.stored_dtype")

    def recognises(self, source: ProgramSource) -> bool:
        """Whether it is a script or a command line that starts torchtitan, or names a registered function."""
        from zsim.programs.torchtitan.text import names_launch_script

        if source.arguments is not None or "flame.train" in source.words:  # whose options are like these
            return False
        is_registered = any(word.startswith("--module") for word in source.words) and any(
            word.startswith("--config") for word in source.words
        )
        is_started = any(
            word == _MODULE or word.endswith(_FILE) or word.startswith(_CONFIG_OPTIONS)
            for word in source.words
        )
        return is_registered or is_started or names_launch_script(source.words)

    def names_file(self, path: Path) -> bool:
        return path.suffix == ".sh" and self.recognises(ProgramSource(str(path)))

    def is_default_reader(self, source: ProgramSource) -> bool:
        """Whether it is a TOML with a section of torchtitan's, or one that cannot be read."""
        from zsim.programs.torchtitan.keys import SECTIONS

        if source.suffix != ".toml" or len(source.words) != 1:
            return False
        data = source.content
        sections = [name for name in SECTIONS if name != "model"]  # which others have too
        return not data or any(isinstance(data.get(name), Mapping) for name in sections)

    def has_tables(self, tables: Mapping[str, Any]) -> bool:
        return isinstance(tables.get("model"), Mapping) or "parallelism" in tables

    def read(self, source: ProgramSource) -> TrainingFile:
        from zsim.programs.torchtitan.read import read_torchtitan

        return read_torchtitan(source.text)


PROGRAM = Torchtitan()
