"""Which of a model's calls belong to one sampling run, as the workers are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sp_core.host.ui.remote_model import RemoteModel
from sp_core.plans import plan_named
from sp_core.pool.devices import WorkerDevice


class Session:
    """Stands for the session and for its pool, and notes the number of each call's run."""

    def __init__(self) -> None:
        self.runs: list[int | None] = []

    def ensure(self, model: RemoteModel) -> Any:
        return self

    def call(self, operation: str, body: dict[str, Any], **_: Any) -> None:
        self.runs.append(body["run"])

    def finish(self, model: RemoteModel) -> None:
        pass


def test_calls_between_start_and_end_are_one_run_and_others_none() -> None:
    session = Session()
    recipe: Any = SimpleNamespace(key="key")
    model = RemoteModel(session, recipe, (WorkerDevice("cpu", 0),), plan_named("WanModel"), 0)  # type: ignore[arg-type]
    model.call("embed", (), {})
    for _ in range(2):
        model.prepare()  # ComfyUI loads the model
        model.prepare()  # the run begins
        model.call("embed", (), {})
        model.prepare()  # ComfyUI took the model off the device meanwhile
        model.call("embed", (), {})
        model.finish()
    outside, *first, second, again = session.runs
    assert outside is None and None not in first
    assert first[0] == first[1] and second == again and first[0] != second
