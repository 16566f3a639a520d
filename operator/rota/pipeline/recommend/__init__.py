"""Which policy is best for each group: costs, a ranking, the reasons, and manifests.

May know `replay` and what is below it.
"""
