"""The ComfyUI that the demo, the benchmarks and the tests start leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from sp_core.demo.comfy_server import ComfyServer


class Impatient(ComfyServer):
    def wait_until_up(self, timeout: float = 0.5) -> None:
        super().wait_until_up(timeout)


def test_a_server_that_does_not_answer_in_time_is_ended(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("import time; time.sleep(600)")
    server = Impatient(tmp_path, tmp_path)
    with pytest.raises(RuntimeError, match="did not start within"), server:
        pass
    assert server.process.poll() is not None
