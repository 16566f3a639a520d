"""The port through which operator and sidecar see a broker: routes, members, offsets, locks."""
