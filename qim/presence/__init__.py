"""Presence in shared memory: one table per gateway worker, written only by it (DESIGN §4)."""
