"""`qim bench`: rates, latencies and CPU, each beside a floor or a rival (DESIGN §6). `command.py` is the entry."""
