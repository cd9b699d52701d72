"""Reader of LLaMA-Factory's files."""
