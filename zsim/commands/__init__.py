"""One module per command of `zsim`. They are assembled by `zsim.cli`."""
