"""The task of text classification."""
