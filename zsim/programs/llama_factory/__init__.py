"""LLaMA-Factory, which trains from one YAML or JSON (`llamafactory-cli train FILE`)."""

from __future__ import annotations

from collections.abc import Mapping

from zsim.specs.formats.program import YAML_SUFFIXES, ProgramSource, ValuesProgram

_MARKS = (
    "finetuning_type", "cutoff_len", "lora_target", "pref_loss", "quantization_bit", "neat_packing",
    "pure_bf16", "enable_liger_kernel", "disable_gradient_checkpointing", "infer_backend",
    "export_dir",
)  # fmt: skip
_ENGINE_MARKS = ("dist_config", "peft_config", "kernel_config", "model_class")  # beside `model`
_STAGES = ("pt", "sft", "rm", "ppo", "dpo", "kto")


class LlamaFactory(ValuesProgram):
    name = "llama-factory"
    title = "LLaMA-Factory"
    kinds = ("deepspeed", "fsdp1", "fsdp2", "ddp")
    order = 12
    suffixes = (*YAML_SUFFIXES, ".json")
    file_nouns = ("LLaMA-Factory YAML",)
    reads = "a LLaMA-Factory YAML"
    yaml_marks = ("finetuning_type", "cutoff_len", "model_name_or_path")
    release = "LLaMA-Factory 0.9.6.dev0 (ff6d4d12)"
    recognised_by = (
        "`stage`, or a key of its own (finetuning_type, cutoff_len, lora_target, ...); one with "
        "`dist_config`, `peft_config`, `kernel_config` or `model_class` is of its newer engine (USE_V1), "
        "which has keys of its own"
    )

    def recognises(self, source: ProgramSource) -> bool:
        """Whether a file has keys that LLaMA-Factory alone has."""
        data = source.content if source.suffix in self.suffixes else None
        if not isinstance(data, Mapping) or "base_model" in data:
            return False
        has_stage = data.get("stage") in _STAGES and "model_name_or_path" in data
        has_template = isinstance(data.get("template"), str) and "model_name_or_path" in data
        is_engine = isinstance(data.get("model"), str) and any(mark in data for mark in _ENGINE_MARKS)
        return is_engine or has_stage or has_template or any(mark in data for mark in _MARKS)


PROGRAM = LlamaFactory()
