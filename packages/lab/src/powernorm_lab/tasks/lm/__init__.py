"""The language modeling task."""
