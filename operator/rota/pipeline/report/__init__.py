"""The recommendation for people: one HTML file with its data, cards and plots.

May know `recommend` and what is below it.
"""
