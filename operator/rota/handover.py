"""The pure machine that moves one queue: revoke, release, grant."""
