"""What the papers of the ZeRO family claim, as experiments: one TOML per paper, and docs/papers.md."""
