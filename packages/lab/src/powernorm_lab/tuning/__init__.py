"""`powernorm tune`: tune every norm with the same number of trials, then compare the best."""
