"""Q-IM: an instant-messaging backend for bare-metal Linux (ARCHITECTURE.md is the map)."""

__version__ = "0.1.0"
