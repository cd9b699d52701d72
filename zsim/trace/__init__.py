"""What happened, simulated or recorded."""
