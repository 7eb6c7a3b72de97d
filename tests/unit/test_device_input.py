"""What the input ``devices`` says of values that only come over a wire."""

from __future__ import annotations

from typing import Any

import pytest

from sp_core.host.ui.device_input import check_devices, named_devices


@pytest.mark.parametrize("value", [2, None, ["cpu:2"], 0.5])
def test_what_is_no_text_is_no_device_list(value: Any) -> None:
    with pytest.raises(ValueError, match="is no device list: it is no text"):
        named_devices(value)
    assert "is no device list" in str(check_devices(value))
