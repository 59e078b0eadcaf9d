"""`python -m chord.cli`, for environments whose scripts are not on the path."""

from chord.cli import main

main()
