"""The worker's side for the reference model; stands where ComfyUI's service stands in the product."""

from __future__ import annotations

import time
from typing import Any

from ..comm import Transport
from ..comm.choice import make_transport
from ..errors import SPError
from ..plans import Engine
from ..pool.shared_state import Phase
from ..pool.worker import WorkerContext
from .model import AudioVideoDiT, ReferenceConfig
from .plan import REFERENCE


class ReferenceService:
    """Answers ``forward`` and ``transport``; see :class:`sp_core.pool.worker.Service`.

    Options: ``config`` (a :class:`ReferenceConfig` as plain values) and ``seed``.
    """

    def __init__(self, context: WorkerContext, options: dict[str, Any]) -> None:
        self.context = context
        self.transport: Transport
        self.transport, self.reason = make_transport(None, context.device, directory=context.directory, should_abort=context.should_abort)
        context.show(Phase.LOADING)
        self.model = AudioVideoDiT.seeded(ReferenceConfig.from_plain(options["config"]), options["seed"]).to(context.device)

    def handle(self, operation: str, body: Any) -> Any:
        if operation == "transport":
            return {"name": self.transport.name, "reason": self.reason}
        if operation != "forward":
            raise SPError(f"the reference model has no operation '{operation}'")
        self.context.show(Phase.COMPUTING)
        stats = self.transport.stats
        stats.reset()
        started = time.perf_counter()
        with Engine(REFERENCE, self.transport, self.context.enter_block).installed(self.model) as state:
            output = self.model(**body)
            state.check()
        self.transport.check()
        return {
            "output": output,
            "seconds": time.perf_counter() - started,
            "layout": state.describe(),
            "transport": self.transport.name,
            "exchange_s": stats.seconds,
            "exchange_bytes": stats.bytes_sent,
        }
