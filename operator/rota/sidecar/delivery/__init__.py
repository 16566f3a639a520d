"""The app's side of the sidecar: messages are pushed or pulled, acknowledged, retried or dead-lettered.

May know `consume` and what is below it.
"""
