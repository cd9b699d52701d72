"""Activities that share resources, on the clock."""
