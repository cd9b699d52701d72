"""Builders of models, one per family of config.json."""
