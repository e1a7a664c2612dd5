"""Settings of comparisons: typed, immutable, checked when they are created."""
