"""`python -m powernorm`."""

from powernorm.cli import main

main()
