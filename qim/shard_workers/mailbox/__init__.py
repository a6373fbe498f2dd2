"""MailboxNode: dispatches become entries, W[lane] and pushes; logins, pulls and history (DESIGN-data §5 to §7)."""
