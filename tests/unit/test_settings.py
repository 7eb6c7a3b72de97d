"""What the settings of a user mean, and that they are read in one place."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sp_core import settings

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [ROOT / "__init__.py", *(ROOT / "nodes").glob("*.py"), *(ROOT / "sp_core").rglob("*.py")]


@pytest.mark.parametrize(
    ("read", "variable", "values"),
    [
        (settings.stall_timeout_s, "SP_TIMEOUT_S", {None: 600.0, "30": 30.0, "0": 1.0, "ten minutes": 600.0}),
        (settings.start_timeout_s, "SP_START_TIMEOUT_S", {None: 180.0, "7.5": 7.5, "-1": 1.0, "": 180.0}),
        (settings.compile_timeout_s, "SP_COMPILE_TIMEOUT_S", {None: 3600.0, "60": 60.0, "0": 1.0, "an hour": 3600.0}),
        (settings.log_level, "SP_LOG_LEVEL", {None: "INFO", "DEBUG": "DEBUG", "warning": "WARNING", "loud": "INFO", "": "INFO"}),
        (settings.no_extensions, "SP_NO_EXT", {None: False, "": False, "0": False, "1": True, "yes": True}),
        (settings.idle_s, "SP_IDLE_S", {None: None, "0": None, "-3": None, "later": None, "0.2": 1.0, "90": 90.0}),
        (settings.trust_patches, "SP_TRUST_PATCHES", {None: False, "": False, "0": False, "1": True}),
        (settings.head_groups, "SP_HEAD_GROUPS", {None: 0, "": 0, "4": 4, "1": 1, "-2": 0, "some": 0}),
        (settings.slowed, "SP_SLOWED", {None: "", " 1:2 ": "1:2"}),
        (settings.verify_ranks, "SP_VERIFY_RANKS", {None: False, "": False, "0": False, "1": True}),
    ],
)
def test_what_a_setting_means(
    monkeypatch: pytest.MonkeyPatch, read: Callable[[], object], variable: str, values: dict[str | None, object]
) -> None:
    for value, meaning in values.items():
        if value is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, value)
        assert read() == meaning, f"{variable}={value}"


def names() -> set[str]:
    return {value for value in vars(settings).values() if isinstance(value, str) and re.fullmatch("SP_[A-Z_]+", value)}


def test_every_setting_is_in_the_table_for_users() -> None:
    table = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert len(names()) >= 5
    assert [name for name in sorted(names()) if f"| `{name}` |" not in table] == []


def test_defaults_are_those_of_the_table() -> None:
    table = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = dict(re.findall(r"^\| `(SP_[A-Z_]+)` \|.*\| `?([^|`]+)`? \|$", table, re.MULTILINE))
    assert rows == {
        settings.STALL_TIMEOUT: f"{settings.DEFAULT_STALL_TIMEOUT_S:g}",
        settings.START_TIMEOUT: f"{settings.DEFAULT_START_TIMEOUT_S:g}",
        settings.COMPILE_TIMEOUT: f"{settings.DEFAULT_COMPILE_TIMEOUT_S:g}",
        settings.LOG_LEVEL: settings.DEFAULT_LOG_LEVEL,
        settings.NO_EXTENSIONS: "off",
        settings.VERIFY_RANKS: "off",
        settings.IDLE: "off",
        settings.SLOWED: "none",
        settings.HEAD_GROUPS: "chosen from measured rates",
        settings.TRUST_PATCHES: "off",
    }


def test_no_other_file_names_a_variable_in_order_to_read_it() -> None:
    """A message may hold a name; a string that is a name and nothing else is there to be looked up."""
    others = {file: file.read_text() for file in SOURCES if file != Path(settings.__file__)}
    assert len(others) > 100
    assert {file.name for file, text in others.items() if re.search(r"""["']SP_[A-Z_]+["']""", text)} == set()
    spoken = {name for text in others.values() for name in re.findall(r"\bSP_[A-Z_]+[A-Z]", text)}
    assert spoken <= names(), "a name that no setting has"
