"""What is kept: MessageStore, GroupMembership and MailboxStore (DESIGN-data §1)."""
