"""Weights in files: where a tensor lies, the same bytes without a copy, and copies that are made once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sp_core import mapped_file
from sp_core.copy_store import CopyStore
from sp_core.mapped_file import Mappings, let_pages_go

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process has mapped")


@pytest.fixture
def loaded(tmp_path: Path) -> dict[str, torch.Tensor]:
    save_file({"a": torch.randn(3000), "b": torch.arange(50_000.0)}, tmp_path / "weights.safetensors")
    with safe_open(tmp_path / "weights.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in ("a", "b")}


def test_a_weight_that_was_loaded_lies_in_its_file(loaded: dict[str, torch.Tensor], tmp_path: Path) -> None:
    mappings = Mappings()
    for weight in loaded.values():
        place = mappings.range_of(weight)
        assert place is not None and place.path == str(tmp_path / "weights.safetensors") and mappings.maps(weight)
        assert torch.equal(place.mapped().view(torch.float32), weight)
    assert mappings.range_of(torch.randn(3000)) is None
    assert mappings.range_of(loaded["b"][::2]) is None


def test_writing_into_a_mapping_changes_nobody_elses(loaded: dict[str, torch.Tensor]) -> None:
    place = Mappings().range_of(loaded["b"])
    assert place is not None
    mine = place.mapped().view(torch.float32)
    mine.zero_()
    assert loaded["b"][1] == 1 and place.mapped().view(torch.float32)[1] == 1


def test_a_file_that_was_replaced_is_not_mapped(loaded: dict[str, torch.Tensor], tmp_path: Path) -> None:
    place = Mappings().range_of(loaded["b"])
    assert place is not None
    save_file({"b": torch.zeros(50_000)}, tmp_path / "other")
    os.replace(tmp_path / "other", tmp_path / "weights.safetensors")
    with pytest.raises(FileNotFoundError):
        place.mapped()
    assert Mappings().range_of(loaded["b"]) is None, "the bytes are those of a file that is gone"


def resident(tensor: torch.Tensor) -> int:
    """KB of the mapping that are in this process's memory."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            start, end = (int(x, 16) for x in first.split("-"))
            found = start <= tensor.data_ptr() < end
        elif found and first == "Rss:":
            return int(line.split()[1])
    raise AssertionError


def test_pages_go_and_come_back(loaded: dict[str, torch.Tensor]) -> None:
    total = loaded["b"].sum()
    before = resident(loaded["b"])
    let_pages_go([loaded["b"]])
    assert resident(loaded["b"]) < before / 2
    assert loaded["b"].sum() == total


def test_pages_that_were_written_stay(loaded: dict[str, torch.Tensor]) -> None:
    loaded["b"][7] = -1
    let_pages_go([loaded["b"]])
    assert loaded["b"][7] == -1


def test_elsewhere_nothing_lies_in_a_file(loaded: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_file, "_MAPS", "/nowhere")
    monkeypatch.setattr(mapped_file, "_SMAPS", "/nowhere")
    assert Mappings().range_of(loaded["a"]) is None
    let_pages_go([loaded["a"]])


# -- copies


def test_a_copy_is_made_once(tmp_path: Path) -> None:
    first, second = CopyStore(tmp_path, "group"), CopyStore(tmp_path, "group")
    made: list[str] = []

    def make(name: str, value: float) -> torch.Tensor:
        made.append(name)
        return torch.full((3000,), float(value))

    a = first.range_of("a", lambda: make("a", 1))
    b = second.range_of("b", lambda: make("b", 2))
    assert second.range_of("a", lambda: make("a", 9)) == a and first.range_of("b", lambda: make("b", 9)) == b
    assert made == ["a", "b"]
    assert torch.equal(a.mapped().view(torch.float32), torch.full((3000,), 1.0))
    assert torch.equal(b.mapped().view(torch.float32), torch.full((3000,), 2.0))
    kept = a.mapped().view(torch.float32)
    place = Mappings().range_of(kept)
    assert place is not None and torch.equal(place.mapped().view(torch.float32), kept), "other processes cannot open it"
    first.close()
    second.close()


def test_a_store_whose_maker_is_gone_is_begun_anew(tmp_path: Path) -> None:
    first, second = CopyStore(tmp_path, "group"), CopyStore(tmp_path, "group")
    kept = first.range_of("a", lambda: torch.full((9,), 1.0)).mapped()
    first.close()
    again = second.range_of("a", lambda: torch.full((9,), 2.0))
    assert again.mapped().view(torch.float32)[0] == 2 and kept.view(torch.float32)[0] == 1
    other = CopyStore(tmp_path, "other group").range_of("a", lambda: torch.full((9,), 3.0))
    assert other.mapped().view(torch.float32)[0] == 3
    second.close()
