"""Reader of TRL's files, and of recipes of the alignment handbook."""
