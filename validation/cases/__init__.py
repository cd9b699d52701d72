"""Recordings of PyTorch (`traces/`), and the checks of zsim against them, which `zsim check` runs."""
