"""The ``devices`` string: what it may say, and what it is told when it is wrong."""

from __future__ import annotations

import pytest

from sp_core.pool.devices import MAX_WORKERS, WorkerDevice, parse_devices, visible_devices_environment


def parse(text: str, visible: int = 4) -> list[str]:
    return [str(device) for device in parse_devices(text, "cuda", visible)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("  AUTO ", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("0,1,3", ["cuda:0", "cuda:1", "cuda:3"]),
        ("3 , 0", ["cuda:3", "cuda:0"]),
        ("2", ["cuda:2"]),
        ("cpu:1", ["cpu:0"]),
        ("cpu:3", ["cpu:0", "cpu:1", "cpu:2"]),
    ],
)
def test_what_it_may_say(text: str, expected: list[str]) -> None:
    assert parse(text) == expected


def test_auto_takes_what_there_is() -> None:
    assert parse("auto", 0) == []
    assert len(parse("auto", 40)) == MAX_WORKERS


@pytest.mark.parametrize("text", ["", "gpu", "cpu", "cpu:", "cpu:-1", "cpu:two", "0,,1", ",0", "0 1", "-1", "0;1", "cuda:0", "cpu:2,0"])
def test_malformed(text: str) -> None:
    with pytest.raises(ValueError, match="no device list") as caught:
        parse(text)
    assert "0, 1, 2, 3 (cuda)" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("4", "device 4 in '4' does not exist"),
        ("0,7", "device 7 in '0,7' does not exist"),
        ("1,1", "names a device twice"),
        ("0,00", "names a device twice"),
        ("cpu:0", "asks for 0 CPU workers"),
        ("cpu:17", "asks for 17 CPU workers"),
    ],
)
def test_impossible(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        parse(text)
    assert "Devices that exist" in str(caught.value)


def test_too_many() -> None:
    with pytest.raises(ValueError, match="at most 16"):
        parse(",".join(map(str, range(17))), visible=32)


def test_a_machine_without_accelerators_says_so() -> None:
    with pytest.raises(ValueError, match="no accelerator, so only cpu:1 to cpu:16 exist"):
        parse("0", visible=0)


def test_a_worker_sees_its_own_device_only() -> None:
    device = WorkerDevice("cuda", 1)
    assert visible_devices_environment(device, {}) == {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}
    assert visible_devices_environment(WorkerDevice("xpu", 2), {}) == {"ZE_AFFINITY_MASK": "2"}
    assert visible_devices_environment(WorkerDevice("cpu", 1), {"CUDA_VISIBLE_DEVICES": "3"}) == {}


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_indices_count_what_the_user_left_visible(variable: str) -> None:
    """With devices 5 and 7 visible, index 1 is device 7."""
    assert set(visible_devices_environment(WorkerDevice("cuda", 1), {variable: "5, 7"}).values()) == {"7"}
    assert set(visible_devices_environment(WorkerDevice("cuda", 0), {variable: "GPU-abc,GPU-def"}).values()) == {"GPU-abc"}
