"""Classes of ranks and groups that behave alike, and are simulated by one representative each."""
