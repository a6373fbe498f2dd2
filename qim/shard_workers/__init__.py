"""Worker pools behind the gateways: writer lanes, fan-out and mailboxes. Each is a role; a process may host several."""
