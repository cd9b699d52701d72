"""ZeRO as its paper describes it, to check the others against."""
