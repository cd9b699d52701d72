"""Reader and writer of Accelerate's YAML."""
