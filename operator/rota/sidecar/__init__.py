"""Runs in every consumer pod: obeys the document, delivers messages, loses none."""
