"""Callbacks that were added behind SP Model Patch are named once."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from sp_core.host.ui.late_callbacks import BEFORE_A_RUN, LateCallbacks


def given(*args: Any) -> None: ...


def late(*args: Any) -> None: ...


def test_late_callbacks_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    callbacks = LateCallbacks({BEFORE_A_RUN: {None: [given]}})
    now = {BEFORE_A_RUN: {None: [given, late]}, "on_clone": {"k": [late]}}
    for _ in range(2):
        callbacks.warn(now)
    (record,) = caplog.records
    assert "late of " in record.getMessage()
    assert BEFORE_A_RUN in record.getMessage()
    assert not callbacks.workers_run_the_same(now)


def test_callbacks_that_the_workers_have_and_those_that_act_here(caplog: pytest.LogCaptureFixture) -> None:
    callbacks = LateCallbacks({BEFORE_A_RUN: {None: [given]}})
    for now, the_same in (({}, False), ({BEFORE_A_RUN: {"k": [given]}}, True), ({"on_clone": {"k": [late]}}, False)):
        callbacks.warn(now)
        assert callbacks.workers_run_the_same(now) is the_same
    assert not caplog.records
    assert not callbacks.workers_run_the_same({"on_load_after": {"k": [late]}})
