"""Megatron-LM's command line, the scripts that start it, and the recipes of Megatron-Bridge and NeMo."""

from __future__ import annotations

from pathlib import Path

from zsim.specs.formats.config_file import TrainingFile
from zsim.specs.formats.program import YAML_SUFFIXES, ProgramSource, TrainingProgram


class MegatronLm(TrainingProgram):
    name = "megatron"
    title = "Megatron"
    kinds = ("megatron",)
    default_kinds = ("megatron",)
    order = 40
    is_script = True
    file_nouns = ("Megatron's script", "recipe")
    reads = "a script that starts Megatron"
    writes = "a Megatron script"
    takes_options = True

    def recognises(self, source: ProgramSource) -> bool:
        """Whether it is a list of arguments, a recipe, a script, or a command line that is mostly flags of
        Megatron's.
        """
        from zsim.programs.megatron_lm.arguments import is_command_line, names_script

        if source.arguments is not None:
            return True
        if source.suffix in YAML_SUFFIXES:
            return _is_recipe(source)
        return names_script(source.words) or is_command_line(source.words)

    def names_file(self, path: Path) -> bool:
        from zsim.programs.megatron_lm.arguments import names_script

        return names_script([str(path)])

    def read(self, source: ProgramSource) -> TrainingFile:
        from zsim.programs.megatron_lm.read import read_megatron

        if source.arguments is not None:
            return read_megatron(source.arguments, source.settings)
        if source.suffix in YAML_SUFFIXES:
            from zsim.programs.megatron_lm.recipe import read_recipe

            return read_recipe(source.text)
        return read_megatron(source.text, source.settings)


def _is_recipe(source: ProgramSource) -> bool:
    from zsim.programs.megatron_lm.recipe import is_recipe

    return is_recipe(source.content)


PROGRAM = MegatronLm()
