"""The task of language modeling over bytes."""
