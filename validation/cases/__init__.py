"""What was recorded of PyTorch (`traces/`), and the checks of zsim against it: `zsim check` runs them."""
