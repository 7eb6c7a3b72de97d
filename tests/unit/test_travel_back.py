"""What a forward changed in objects that had crossed is told back to ComfyUI's process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from unit.travelling import Processes, two_processes

from sp_core.host.travel import CannotTravel, pack, unpack


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Processes:
    return two_processes(tmp_path, monkeypatch)


def test_nothing_is_told_back_where_nothing_changed(two: Processes) -> None:
    two.send([two.here.Switch(True, [1]), torch.ones(3), two.here.counting(2), two.model[0], two.here.plain, {1: (2, [3])}])
    assert two.tell_back() == 0


def test_what_changed_is_told_back(two: Processes) -> None:
    wrapper, add, tensor = two.here.Wrapper(two.here.Switch()), two.here.counting(2), torch.ones(3)
    sent = {"wrapper": wrapper, "add": add, "tensor": tensor, "list": [1]}
    made = two.send(sent)
    made["wrapper"](1), made["add"]("seen"), made["tensor"].mul_(2)
    made["list"].append(two.there.Switch(True, [made["wrapper"]]))
    two.tell_back()
    assert wrapper.calls == 1 and tensor.tolist() == [2, 2, 2]
    assert add("again") == 8 and add.__closure__[1].cell_contents == ["seen", "again"]
    assert type(sent["list"][1]) is two.here.Switch and sent["list"][1].layers[0] is wrapper
    # and the next forward goes on from there
    again = two.send(sent)
    assert again["wrapper"].calls == 1 and again["wrapper"] is made["wrapper"]


def test_a_tensor_that_code_keeps_is_told_back(two: Processes) -> None:
    switch = two.here.Switch()
    two.send(switch).layers.append(torch.arange(4))
    two.tell_back()
    assert switch.layers[0].tolist() == [0, 1, 2, 3]


def test_what_arrived_is_never_what_is_kept_for_later(two: Processes) -> None:
    """A tensor that the workers hold already is not sent again, so code must not change that one."""
    tensor = torch.ones(3)
    packed = pack(tensor, "it", two.path_of, two.code)
    value, _ = unpack(packed.tree, two.world())
    value.mul_(3)
    assert tensor.tolist() == [1, 1, 1]


def test_what_is_kept_and_cannot_cross_back(two: Processes) -> None:
    two.send(two.here.Switch()).layers.append(two.there.Locked())
    with pytest.raises(CannotTravel, match="lock"):
        two.tell_back()
