"""Many simulations: published runs, sweeps, comparisons."""
