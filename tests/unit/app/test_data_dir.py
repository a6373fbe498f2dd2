"""One node at a time in a directory, one cluster for ever, and never a new key for old data."""

from __future__ import annotations

from pathlib import Path

import pytest

from qim.app.data_dir import IDENTITY_FILE, claimed, open_identity
from qim.app.settings import NodeSettings
from qim.errors import StartupError


@pytest.fixture
def settings(tmp_path: Path) -> NodeSettings:
    made = NodeSettings(data_dir=tmp_path / "data")
    made.data_dir.mkdir()
    return made


def test_a_second_start_finds_the_same_cluster(settings: NodeSettings) -> None:
    first, _ = open_identity(settings)
    second, _ = open_identity(settings)
    assert first == second


def test_a_directory_is_held_by_one_node(settings: NodeSettings) -> None:
    with claimed(settings), pytest.raises(StartupError, match="another node runs"), claimed(settings):
        pass
    with claimed(settings):
        pass


def test_a_missing_key_file_is_never_made_again(settings: NodeSettings) -> None:
    open_identity(settings)
    settings.key_file.unlink()
    with pytest.raises(StartupError, match="restore it"):
        open_identity(settings)
    assert not settings.key_file.exists()


def test_the_key_of_another_cluster_is_refused(settings: NodeSettings, tmp_path: Path) -> None:
    other = NodeSettings(data_dir=tmp_path / "other")
    other.data_dir.mkdir()
    open_identity(other)
    open_identity(settings)
    settings.key_file.write_bytes(other.key_file.read_bytes())
    with pytest.raises(StartupError, match="another cluster"):
        open_identity(settings)


def test_a_crash_between_key_and_identity_makes_a_first_start_again(settings: NodeSettings) -> None:
    first, _ = open_identity(settings)
    (settings.data_dir / IDENTITY_FILE).unlink()
    second, _ = open_identity(settings)
    assert second.key_fingerprint == first.key_fingerprint
    assert second.cluster_id != first.cluster_id


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"{", "damaged"),
        (b'{"cluster_id": "x"}', "damaged"),
        (b'{"cluster_id": "x", "key_fingerprint": "y", "format_version": 9}', "another cluster"),
    ],
)
def test_a_damaged_identity_is_refused(settings: NodeSettings, content: bytes, complaint: str) -> None:
    open_identity(settings)
    (settings.data_dir / IDENTITY_FILE).write_bytes(content)
    with pytest.raises(StartupError, match=complaint) as caught:
        open_identity(settings)
    assert "\n" not in str(caught.value)


def test_an_unusable_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="cannot use"), claimed(NodeSettings(data_dir=tmp_path / "file" / "data")):
        pass
