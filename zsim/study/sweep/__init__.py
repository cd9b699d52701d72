"""Studies: one experiment at many points."""
