"""`zsim ui`: a local page to turn the settings of one experiment and see what they do."""
