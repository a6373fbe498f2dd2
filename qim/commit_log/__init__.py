"""CommitLog: outbox and dispatch; embedded in Redis streams, or topics of Kafka or Redpanda (DESIGN §4)."""
