"""CommitLog: outbox, dispatch and compacted topics (DESIGN §4); embedded in Redis streams, Kafka later."""
