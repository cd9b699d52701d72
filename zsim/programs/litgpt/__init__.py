"""litgpt, whose commands take a YAML (`litgpt finetune --config FILE`)."""

from __future__ import annotations

from collections.abc import Mapping

from zsim.specs.formats.program import YAML_SUFFIXES, ProgramSource, ValuesProgram


class LitGpt(ValuesProgram):
    name = "litgpt"
    title = "litgpt"
    kinds = ("fsdp1", "fsdp2", "ddp")
    order = 14
    suffixes = YAML_SUFFIXES
    file_nouns = ("litgpt YAML",)
    reads = "a litgpt YAML"
    yaml_marks = ("checkpoint_dir",)
    release = "litgpt 0.5.13 (26857050)"
    recognised_by = (
        "`checkpoint_dir` or `model_name` with `train` with a global_batch_size or micro_batch_size"
    )

    def recognises(self, source: ProgramSource) -> bool:
        """Whether a YAML has a checkpoint or the name of a model, and litgpt's section `train`."""
        data = source.content if source.suffix in YAML_SUFFIXES else None
        if not isinstance(data, Mapping) or not isinstance(data.get("train"), Mapping):
            return False
        has_model = isinstance(data.get("checkpoint_dir", data.get("model_name")), str)
        return has_model and any(key in data["train"] for key in ("global_batch_size", "micro_batch_size"))


PROGRAM = LitGpt()
