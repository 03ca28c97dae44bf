"""`python -m headrace`, the same as the console script."""

from headrace.cli import main

main()
