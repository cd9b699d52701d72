"""What several frameworks' steps have in common."""
