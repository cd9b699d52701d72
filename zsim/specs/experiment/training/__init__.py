"""The parts of `[training]` beyond numbers: the optimizer, adapters, frozen parameters."""
