"""How states are sharded, and how the job trains."""
