"""Reader of Open Instruct's files and flags."""
