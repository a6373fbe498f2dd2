"""FanoutCoordinator: outbox records become one GroupDispatch per target mailbox shard (§10.1, DESIGN-data §4)."""
