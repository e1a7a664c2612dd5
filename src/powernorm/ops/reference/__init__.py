"""The mathematics in plain torch: readable, eager, the oracle of every faster backend."""
