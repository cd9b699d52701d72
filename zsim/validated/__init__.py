"""Published runs and zsim's errors on them: how far its predictions are to be trusted."""
