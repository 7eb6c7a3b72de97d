"""What becomes of a request that fails because ComfyUI's process ends."""

from __future__ import annotations

import threading

import pytest

from sp_core.errors import SPError
from sp_core.host.ui.remote_model import asking
from sp_core.host.ui.session import Session


def failing_request(session: Session, outcome: list[str]) -> None:
    try:
        with asking(session):
            raise SPError("the workers are gone")
    except SPError:
        outcome.append("raised")


@pytest.mark.parametrize(("daemon", "ended", "stays"), [(True, True, True), (True, False, False), (False, True, False)])
def test_a_daemon_thread_stays_in_its_request_once_the_program_ends(daemon: bool, ended: bool, stays: bool) -> None:
    session, outcome = Session(), list[str]()
    if ended:
        session.end()
    thread = threading.Thread(target=failing_request, args=(session, outcome), daemon=daemon)
    thread.start()
    thread.join(timeout=0.2 if stays else None)
    assert thread.is_alive() is stays and outcome == ([] if stays else ["raised"])
