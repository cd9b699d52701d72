"""Readers of other tools' files: Hugging Face models, DeepSpeed, FSDP, torchtitan, Accelerate."""
