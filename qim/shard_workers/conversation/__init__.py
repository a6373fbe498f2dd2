"""ConversationWriter: judges, commits and announces the messages and membership changes of its conversation buckets."""
