"""Sections of the report, each as parts of HTML."""
