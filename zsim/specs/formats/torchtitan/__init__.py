"""torchtitan's TOML and command line."""
