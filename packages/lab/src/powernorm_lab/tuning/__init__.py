"""`powernorm tune`: the same budget of trials for every norm, then the comparison of the best."""
