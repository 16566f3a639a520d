"""What crosses a process boundary: assignment document, member report, journal record."""
