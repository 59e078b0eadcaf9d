"""Measuring operators on the present GPU beside their peers, and tables and plots of what was measured. Needs torch."""
