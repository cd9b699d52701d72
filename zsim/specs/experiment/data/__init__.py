"""The data that a training reads: lengths of its documents, and how fast they are loaded."""
