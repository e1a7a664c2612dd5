"""The task of named-entity recognition."""
