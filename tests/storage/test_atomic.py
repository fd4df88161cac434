"""Tests of files and folders that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_IMODE
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file

from fairseq_ccpr.errors import ConfigurationError
from fairseq_ccpr.storage.files import (
    atomic_directory,
    atomic_file,
    only_writer,
    partial_path,
    scratch_directory,
    write_json,
    write_text,
)


def test_a_file_is_the_old_one_until_it_is_the_whole_new_one(tmp_path: Path):
    path = tmp_path / "file"
    write_text(path, "old")
    with atomic_file(path) as partial:
        partial.write_text("n")
        assert path.read_text() == "old"
        partial.write_text("new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_nothing_stays_of_a_file_that_cannot_be_written(tmp_path: Path):
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), atomic_file(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    with pytest.raises(FileNotFoundError), atomic_file(path):
        pass  # nothing was written
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_what_is_locked_is_open_for_writing_as_nfs_wants(tmp_path: Path):
    write_text(tmp_path / "file", "old")
    with patch("fcntl.flock") as lock, only_writer(tmp_path / "file"):
        assert lock.call_args.args[0].writable() and (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_whoever_may_read_new_files_may_read_tensors(tmp_path: Path, mask: int):
    before = os.umask(mask)
    try:
        with atomic_file(tmp_path / "tensors") as partial:
            save_file({"one": torch.zeros(3)}, partial)
    finally:
        os.umask(before)
    assert S_IMODE((tmp_path / "tensors").stat().st_mode) == 0o666 & ~mask


def test_links_are_followed_only_where_a_user_names_the_file(tmp_path: Path):
    (tmp_path / "victim").write_text("mine")
    for name in ("file", "file.partial", "file.partial.new", "link"):
        (tmp_path / name).symlink_to(tmp_path / "victim")
    write_json(tmp_path / "file", {})
    assert (tmp_path / "victim").read_text() == "mine" and not (tmp_path / "file").is_symlink()
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "victim").read_text() == "new" and (tmp_path / "link").is_symlink()
    (tmp_path / "work.partial").symlink_to(tmp_path)
    with scratch_directory(tmp_path / "work") as folder:
        assert not list(folder.iterdir())
    assert (tmp_path / "victim").exists()


def test_a_folder_appears_when_it_is_complete(tmp_path: Path):
    output = tmp_path / "inner" / "folder"
    (partial_path(output) / "of-a-killed-run").mkdir(parents=True)
    with atomic_directory(output) as partial:
        (partial / "file").touch()
        assert not output.exists()
    assert [path.name for path in output.iterdir()] == ["file"] and not partial.exists()
    with (
        pytest.raises(ConfigurationError, match="exists: give a new folder, or delete it"),
        atomic_directory(output),
    ):
        pass
    with pytest.raises(ValueError, match="fails"), atomic_directory(tmp_path / "other") as partial:
        raise ValueError("fails")
    assert not partial.exists() and not (tmp_path / "other").exists()


def test_a_scratch_folder_goes_in_the_end(tmp_path: Path):
    with scratch_directory(tmp_path / "work") as folder:
        (folder / "file").touch()
    assert list(tmp_path.iterdir()) == []
