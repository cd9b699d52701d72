"""One module per command of `zsim`; `zsim.cli` assembles them."""
