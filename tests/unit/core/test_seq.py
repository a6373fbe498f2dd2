from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qim.core import seq
from qim.core.seq import LaneVector, lanes_of
from tests.support.golden import golden

VECTORS = golden("seq")


@pytest.mark.parametrize("vector", VECTORS["mailbox_seqs"])
def test_mailbox_seq(vector: dict[str, int]) -> None:
    made = seq.mailbox_seq(vector["shard_epoch"], vector["log_offset"])
    assert made == vector["mailbox_seq"]
    assert seq.shard_epoch_of(made) == vector["shard_epoch"]
    assert seq.log_offset_of(made) == vector["log_offset"]


@pytest.mark.parametrize(("epoch", "offset"), [(0, 0), (0x8000, 0), (1, -1), (1, 1 << 48)])
def test_mailbox_seq_outside_the_layout(epoch: int, offset: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        seq.mailbox_seq(epoch, offset)


@pytest.mark.parametrize("vector", VECTORS["message_ids"])
def test_message_id(vector: dict[str, Any]) -> None:
    parts = (vector["hlc_ms"], vector["region_id"], vector["writer_id"], vector["seq_in_ms"])
    made = seq.compose_message_id(*parts)
    assert made.hex() == vector["message_id"]
    assert seq.message_id_parts(made) == parts


def test_a_later_epoch_orders_after_every_offset_of_an_earlier_one() -> None:
    assert seq.mailbox_seq(2, 0) > seq.mailbox_seq(1, seq.LOG_OFFSET_MAX)
    assert seq.mailbox_seq(seq.SHARD_EPOCH_MAX, seq.LOG_OFFSET_MAX) == (1 << 63) - 1


@pytest.mark.parametrize("vector", VECTORS["lane_vectors"])
def test_lane_vector_bytes(vector: dict[str, Any]) -> None:
    lanes = LaneVector(tuple(vector["values"]))
    assert lanes.pack().hex() == vector["packed"]
    assert LaneVector.unpack(lanes.pack()) == lanes


def test_a_lane_only_moves_forward() -> None:
    lanes = LaneVector.zero(4).advanced({1: 5, 2: 7})
    assert lanes.values == (0, 5, 7, 0)
    assert (lanes[1], lanes.minimum()) == (5, 0)
    assert lanes.advanced({1: 5}) == lanes
    with pytest.raises(ValueError, match="lane 2 would go back"):
        lanes.advanced({2: 6})


def test_lane_vectors_are_values() -> None:
    assert hash(LaneVector.zero(2)) == hash(LaneVector((0, 0)))
    assert LaneVector.zero(2) != (0, 0)
    assert repr(LaneVector((1, 9))) == "LaneVector(min=1, max=9, lanes=2)"


@given(st.sets(st.integers(0, 63)))
def test_lanes_of_a_mask(lanes: set[int]) -> None:
    assert lanes_of(sum(1 << lane for lane in lanes)) == sorted(lanes)
