"""Reader of ms-swift's files."""
