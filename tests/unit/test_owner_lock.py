"""Which directories of pools are stale, and what the owner of one can ask about itself."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from sp_core.pool import launcher
from sp_core.pool.owner_lock import OwnerLock, OwnerWatch


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def pool_directory(place: Path, pid: int, age_s: float = 0.0) -> Path:
    directory = place / f"comfyui-sp-{pid}-x"
    directory.mkdir()
    os.utime(directory, (time.time() - age_s,) * 2)
    return directory


def never_used_pid() -> int:
    return int(Path("/proc/sys/kernel/pid_max").read_text()) + 1


def test_the_owner_is_not_told_of_itself(tmp_path: Path) -> None:
    lock = OwnerLock(tmp_path)
    watch = OwnerWatch(tmp_path)
    assert watch.owner_is_there() is None
    watch.close()
    lock.release()
    lock.release()
    watch = OwnerWatch(tmp_path)
    assert watch.owner_is_there() is False
    watch.close()


def test_a_directory_without_a_lock_says_nothing(tmp_path: Path) -> None:
    assert OwnerWatch(tmp_path).owner_is_there() is None


def test_a_directory_whose_lock_is_free_is_removed_whatever_process_has_its_number(place: Path) -> None:
    directory = pool_directory(place, os.getpid())
    OwnerLock(directory).release()
    launcher.remove_stale_directories()
    assert not directory.exists()


def test_a_directory_of_this_process_stays(place: Path) -> None:
    directory = pool_directory(place, never_used_pid())
    lock = OwnerLock(directory)
    os.utime(directory)
    launcher.remove_stale_directories()
    assert directory.exists()
    lock.release()


@pytest.mark.parametrize(("age_s", "alive", "stays"), [(0, False, True), (3600, False, False), (3600, True, True)])
def test_without_a_lock_the_process_number_of_an_old_directory_counts(place: Path, age_s: float, alive: bool, stays: bool) -> None:
    directory = pool_directory(place, os.getpid() if alive else never_used_pid(), age_s)
    launcher.remove_stale_directories()
    assert directory.exists() == stays


def test_what_is_no_directory_of_a_pool_stays(place: Path) -> None:
    (place / "comfyui-sp-rank0-log").mkdir()
    launcher.remove_stale_directories()
    assert (place / "comfyui-sp-rank0-log").exists()
