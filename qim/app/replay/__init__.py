"""Play a recorded day against a node and prove that every device holds exactly what it must."""
