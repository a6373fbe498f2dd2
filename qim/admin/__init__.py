"""The HTTP plane: dev tokens, group membership by the trusted side, health. Never on the message path."""
