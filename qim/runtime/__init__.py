"""What runs it: clock, tasks, backoff, supervised processes, private servers. No product logic."""
