"""Language modeling."""
