"""Published runs and zsim's errors on them, which say how far its predictions are to be trusted."""
