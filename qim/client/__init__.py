"""The client SDK: pure sync, send and heartbeat machines, a SQLite store, and one asyncio driver over them."""
