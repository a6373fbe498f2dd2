"""What the client reads again by PULL_HISTORY in the background, one request at a time within the server's rate."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from typing import Final, NamedTuple

from qim.protocol import qim_pb2 as pb

SPACING_MS: Final = 250
"""`per_user_history_pull_rate` is 5 a second."""
RETRY_MS: Final = 5_000
"""Pause after a page that could not be read."""
PAGE_MESSAGES: Final = 50
NEWEST: Final = 0
"""Anchor of the newest page (ADR-0001)."""
REBUILD_CONCURRENCY: Final = 4
"""`rebuild_concurrency`: conversations read at the same time."""
REFRESH_SEQS_MAX: Final = 10_000
"""Wishes kept; overflow act: the newest wish is not taken, its message stays a placeholder until history is opened."""

Pull = Callable[[str, pb.Direction, int, int], Awaitable[pb.HistoryBatch | None]]
"""(conversation_id, direction, anchor, limit) → page, an empty one when it is refused for good, None when it could not
be read now."""
Restate = Callable[[str, list[pb.HistoryMessage]], None]
LookedThrough = Callable[[str, dict[str, tuple[bytes, int]] | None], None]


class Rebuilding(NamedTuple):
    """What the rebuild needs of its driver (§9.6.3)."""

    sessions: Callable[[], Awaitable[pb.SessionListBatch | None]]
    """The list of conversations, an empty one when it is refused for good, None when it could not be read now."""
    anchors: Callable[[pb.SessionListBatch], dict[str, int]]
    """What is to be filled, in this order, each from a `conversation_seq` on; 0: nothing is here, the newest page."""
    finished: Callable[[], None]


class HistoryReader:
    """Three kinds of work, in this order: look-throughs before sending, refreshes, the rebuild after expiry."""

    __slots__ = (
        "_pull",
        "_restate",
        "_looked",
        "_looks",
        "_refresh",
        "_refresh_count",
        "_anchors",
        "_rebuild_wanted",
        "_rebuilding",
        "_wake",
        "_spacing_s",
    )

    def __init__(
        self,
        pull: Pull,
        restate: Restate,
        looked: LookedThrough,
        rebuilding: Rebuilding,
        *,
        spacing_ms: float = SPACING_MS,
    ) -> None:
        self._pull = pull
        self._restate = restate
        self._looked = looked
        self._looks: dict[str, None] = {}
        self._refresh: dict[str, set[int]] = {}
        self._refresh_count = 0
        self._rebuilding = rebuilding
        self._rebuild_wanted = False
        self._anchors: dict[str, int] | None = None
        """Conversations still to be filled; None until the list of them was read."""
        self._wake = asyncio.Event()
        self._spacing_s = spacing_ms / 1000

    def look_through(self, conversation_id: str) -> None:
        """Search the newest page for own messages."""
        self._looks[conversation_id] = None
        self._wake.set()

    def refresh(self, conversation_id: str, seqs: Iterable[int]) -> None:
        """Read these messages again."""
        wanted = self._refresh.setdefault(conversation_id, set())
        for seq in seqs:
            if seq and seq not in wanted and self._refresh_count < REFRESH_SEQS_MAX:
                wanted.add(seq)
                self._refresh_count += 1
        self._wake.set()

    def rebuild(self) -> None:
        """Fill all conversations; what an earlier call began is begun again."""
        self._rebuild_wanted = True
        self._anchors = None
        self._wake.set()

    def resume(self) -> None:
        """The connection is live: what could not be read before is tried now."""
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled; sleeps while there is nothing to do, and a while when nothing can be read."""
        while True:
            busy = self._looks or self._refresh or self._rebuild_wanted
            try:
                async with asyncio.timeout(RETRY_MS / 1000 if busy else None):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            more = await self._step()
            while more:
                await asyncio.sleep(self._spacing_s)
                more = await self._step()

    async def _step(self) -> bool:
        """One request; False when nothing is left or the connection cannot answer."""
        if self._looks:
            return await self._look(next(iter(self._looks)))
        if self._refresh:
            return await self._refresh_page(next(iter(self._refresh)))
        if self._rebuild_wanted:
            return await self._rebuild_step()
        return False

    async def _look(self, conversation_id: str) -> bool:
        del self._looks[conversation_id]
        page = await self._pull(conversation_id, pb.OLDER, NEWEST, PAGE_MESSAGES)
        if page is None:
            self._looked(conversation_id, None)
            return False
        own = {m.client_message_id: (m.message_id, m.conversation_seq) for m in page.messages if m.client_message_id}
        self._looked(conversation_id, own)
        return True

    async def _refresh_page(self, conversation_id: str) -> bool:
        wanted = self._refresh[conversation_id]
        if not wanted:
            del self._refresh[conversation_id]
            return True
        first = min(wanted)
        page = await self._pull(conversation_id, pb.NEWER, first - 1, PAGE_MESSAGES)
        if page is None:
            return False
        found = [m for m in page.messages if m.conversation_seq in wanted]
        if found:
            self._restate(conversation_id, found)
        answered_to = max((m.conversation_seq for m in page.messages), default=first)
        done = wanted if not page.has_more else {seq for seq in wanted if seq <= max(answered_to, first)}
        self._refresh_count -= len(done)
        self._refresh[conversation_id] = wanted - done
        return True

    async def _rebuild_step(self) -> bool:
        """The list of conversations, or the next page of the first few of them."""
        if self._anchors is None:
            listed = await self._rebuilding.sessions()
            if listed is None:
                return False
            self._anchors = self._rebuilding.anchors(listed)
            return True
        if not self._anchors:
            self._rebuild_wanted = False
            self._rebuilding.finished()
            return True
        anchors = self._anchors
        first = list(islice(anchors.items(), REBUILD_CONCURRENCY))
        pages = await asyncio.gather(*(self._rebuild_page(anchors, n, *item) for n, item in enumerate(first)))
        return all(pages)

    async def _rebuild_page(self, anchors: dict[str, int], number: int, conversation_id: str, anchor: int) -> bool:
        await asyncio.sleep(number * self._spacing_s)
        direction = pb.NEWER if anchor else pb.OLDER
        page = await self._pull(conversation_id, direction, anchor or NEWEST, PAGE_MESSAGES)
        if page is None:
            return False
        newest = max((m.conversation_seq for m in page.messages), default=anchor)
        if page.messages:
            self._restate(conversation_id, list(page.messages))
        if direction == pb.NEWER and page.has_more and newest > anchor:
            anchors[conversation_id] = newest
        else:
            del anchors[conversation_id]
        return True


def contiguous_until(seqs: list[int]) -> int:
    """End of the first unbroken run of ascending `seqs`, 0 when there is none."""
    end = seqs[0] if seqs else 0
    for seq in seqs[1:]:
        if seq != end + 1:
            break
        end = seq
    return end
