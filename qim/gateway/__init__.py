"""ConnectionNode (§5.3): sockets of clients, their sessions, and the way in and out of the node for their frames."""
