"""`zsim ui`: a local page for varying the settings of one experiment and seeing their effect."""
