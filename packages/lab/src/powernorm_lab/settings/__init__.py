"""Settings of comparisons: typed, immutable, checked where they are made."""
