"""coli.files: the cache folder, and files that are replaced whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from coli.errors import ColiError
from coli.files import cache_dir, replace_file


def test_cache_is_where_the_specification_has_it(monkeypatch, tmp_path):
    """XDG_CACHE_HOME, else the home folder; a relative one counts as none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tmp_path / "coli" == cache_dir()
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    for unset in ("", "here"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert tmp_path / "me" / ".cache" / "coli" == cache_dir()


def test_without_any_home_the_message_says_what_to_set(monkeypatch):
    """A user id that nobody knows, and no HOME."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    with pytest.raises(ColiError, match="XDG_CACHE_HOME"):
        cache_dir()


def test_replaced_file_keeps_its_mode_and_leaves_nothing_beside_it(tmp_path):
    """Old content, new content, and no third file; a new one has the mode that the process gives."""
    path = tmp_path / "kept.json"
    path.write_bytes(b"old")
    path.chmod(0o640)
    replace_file(path, b"new")
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == 0o640
    replace_file(tmp_path / "fresh", b"")
    (tmp_path / "plain").write_bytes(b"")
    assert (tmp_path / "fresh").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert sorted(os.listdir(tmp_path)) == ["fresh", "kept.json", "plain"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_file_is_the_old_one_where_the_disk_refuses(tmp_path, monkeypatch, call):
    """Nothing is lost, and nothing is left beside it."""
    path = tmp_path / "kept.json"
    path.write_bytes(b"old")

    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="space"):
        replace_file(path, b"new", tmp_path / "kept.json.tmp")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["kept.json"]


@pytest.mark.parametrize("name", [".", "/", ""])
def test_folder_is_no_file_to_replace(tmp_path, monkeypatch, name):
    """An OSError, as of any name that cannot be written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError):
        replace_file(Path(name), b"new")
    assert os.listdir(tmp_path) == []
