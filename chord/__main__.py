"""`python -m chord`: the command `chord`, for environments whose scripts are not on the path."""

from chord.cli import main

main()
