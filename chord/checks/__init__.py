"""Checks of the operators against their references, for `chord qualify` and tests/gpu. Needs torch."""
