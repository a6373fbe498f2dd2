"""Wiring, the command line and the programs that drive a node; the only layer that may import every other."""
