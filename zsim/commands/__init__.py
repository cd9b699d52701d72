"""One file per command of `zsim`; `zsim.cli` puts them together."""
