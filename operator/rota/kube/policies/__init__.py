"""The status of RebalancePolicies."""
