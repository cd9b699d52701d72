"""Moving bytes: collectives and copies as fluid activities on real routes."""
