"""Which logs a node uses, and the fact that binds its positions to them."""

from __future__ import annotations

import pytest

from qim.app.commit_logs import DISPATCH, OUTBOX, check_fact, kafka_fact, log_fact
from qim.commit_log.api import LogIdentity
from qim.config.parameters import default_parameters
from qim.errors import StartupError


def test_the_fact_names_cluster_topic_and_partitions() -> None:
    def identity(topic_id: str, count: int) -> LogIdentity:
        return LogIdentity(cluster_id="c1", topic_id=topic_id, partition_count=count)

    fact = kafka_fact({OUTBOX: identity("a", 64), DISPATCH: identity("b", 16)})
    assert fact == "kafka outbox=c1/a/64 dispatch=c1/b/16"
    check_fact(fact, fact)
    with pytest.raises(StartupError, match="made anew"):
        check_fact(fact, kafka_fact({OUTBOX: identity("z", 64), DISPATCH: identity("b", 16)}))


def test_a_node_cannot_change_over_to_another_kind_of_log() -> None:
    parameters = default_parameters()
    embedded = log_fact("", parameters, first_start=True)
    assert embedded == log_fact("", parameters, first_start=False)
    with pytest.raises(StartupError, match="commit log"):
        check_fact(embedded, "kafka outbox=c1/a/64 dispatch=c1/b/16")


def test_an_address_that_is_none_is_refused_before_anything_is_asked() -> None:
    with pytest.raises(StartupError, match="not the address of a commit log"):
        log_fact("kafka:///x", default_parameters(), first_start=True)
