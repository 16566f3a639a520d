"""What the sidecar reads from mounts and variables, and what it keeps on its disk.

May know `member`; no network.
"""
