"""Language modeling of bytes."""
