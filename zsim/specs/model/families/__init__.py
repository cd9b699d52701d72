"""One builder per family of config.json."""
