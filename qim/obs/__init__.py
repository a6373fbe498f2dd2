"""How it is seen: the metrics catalogue and redacting logs."""
