"""A worker leaves when its coordinator is gone, whatever it is doing at that moment. This file does not import torch."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import NoReturn

from .owner_lock import OwnerWatch

#: how often a worker looks
OWNER_POLL_S = 0.5


def leave_orphaned(directory: Path) -> NoReturn:
    """The coordinator is gone, so the workers remove the private directory."""
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def leave_with(parent: int, directory: Path) -> None:
    """Leave as soon as the program that started this process is gone, even in the middle of a step.

    Args:
        parent: its process id, which a restart by exec keeps.
        directory: the private directory, whose lock a restart by exec drops.
    """
    owner = OwnerWatch(directory)

    def watch() -> None:
        while os.getppid() == parent and owner.owner_is_there() is not False:
            time.sleep(OWNER_POLL_S)
        leave_orphaned(directory)

    threading.Thread(target=watch, name="sp-parent-watch", daemon=True).start()
