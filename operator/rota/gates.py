"""The chain of checks that can hold a rebalance back, each a verdict."""
