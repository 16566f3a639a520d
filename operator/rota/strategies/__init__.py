"""The strategy library: each strategy is a function from a roster to owners, one a file."""
