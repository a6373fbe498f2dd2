"""The model keeps the contracts of MessageStore and GroupMembership."""

from __future__ import annotations

import pytest

from qim.stores.memory_message import MemoryMessageStore
from tests.contract.commit_requests import BUCKET, GRANT
from tests.contract.membership_contract import MembershipContract
from tests.contract.message_contract import EPOCH, MessageStoreContract


class TestMessageStore(MessageStoreContract):
    @pytest.fixture(autouse=True)
    async def _open(self) -> None:
        store = MemoryMessageStore()
        self.store, self.groups, self.client = store, store, None
        await store.open_bucket(BUCKET, EPOCH, GRANT)


class TestMembership(MembershipContract):
    @pytest.fixture(autouse=True)
    async def _open(self) -> None:
        store = MemoryMessageStore()
        self.store, self.groups, self.client = store, store, None
        await store.open_bucket(BUCKET, EPOCH, GRANT)
