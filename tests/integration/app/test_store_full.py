"""A server without room: new sends are refused and lose nothing, then go on (DESIGN-data §1)."""

from __future__ import annotations

from qim.errors import Detail
from qim.protocol import qim_pb2 as pb
from qim.protocol.opcodes import Opcode
from tests.acceptance.devices import direct
from tests.acceptance.harness import running_node


async def test_sends_wait_for_room() -> None:
    async with running_node() as node:
        ann = await node.online("ann")
        room = node.outside.rooms[0]
        room.full = True
        refused = await ann.answer(ann.say(direct("ann", "bob")))
        assert refused.opcode == Opcode.ERROR
        assert refused.body.code == pb.RATE_LIMITED
        assert refused.body.detail == Detail.STORE_FULL
        assert refused.body.retry_after_ms > 0
        assert not node.roles["writer-0"].ready()

        room.full = False
        accepted = await ann.answer(ann.say(direct("ann", "bob")))
        assert accepted.opcode == Opcode.SEND_ACK
        assert accepted.body.conversation_seq == 1
