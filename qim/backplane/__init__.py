"""Backplane: internal frames between the workers of a host (unix sockets) and later between hosts."""
