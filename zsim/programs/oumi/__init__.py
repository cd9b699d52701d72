"""Reader of oumi's files."""
