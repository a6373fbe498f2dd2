"""Audits of what is stored, past every service that could hide something."""
