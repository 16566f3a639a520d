"""Every metric: its name, its help and its labels."""
