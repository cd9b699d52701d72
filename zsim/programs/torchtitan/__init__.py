"""Reader and writer of torchtitan's TOML and command line."""
