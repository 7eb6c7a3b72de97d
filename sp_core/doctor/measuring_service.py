"""The service of the doctor's workers: it chooses transports as the workers of a model do, and measures them."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from ..comm import Transport
from ..comm.choice import make_transport
from ..comm.small_collectives import all_gather_ints
from ..errors import SPError
from ..parallel.rates import exchange_s, exchanged_shards, measure_rates, sent_bytes
from ..pool.shared_state import Phase
from ..pool.worker import WorkerContext


class MeasuringService:
    """Answers ``measure``; see :class:`sp_core.pool.worker.Service`."""

    def __init__(self, context: WorkerContext, options: dict[str, Any]) -> None:
        self.context = context

    def handle(self, operation: str, body: Any) -> Any:
        if operation != "measure":
            raise SPError(f"the doctor has no operation '{operation}'")
        self.context.show(Phase.COMPUTING)
        device = self.context.device
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        transport, reason = self._transport(None)
        rates = measure_rates(transport, device, dtype)
        transport.close()
        return {
            "transport": transport.name,
            "reason": reason,
            "flops": rates.flops,
            "bandwidth": rates.bandwidth,
            "latency_s": rates.latency_s,
            "beside": rates.beside,
            "memory": rates.memory,
            "main_memory": rates.main_memory,
            "links": self._links(),
        }

    def _transport(self, group: dist.ProcessGroup | None) -> tuple[Transport, str]:
        context = self.context
        return make_transport(group, context.device, directory=context.directory, should_abort=context.should_abort)

    def _links(self) -> list[list[float]]:
        """Bytes/s that each of two ranks sends to the other, both at once, while all other ranks are idle. Collective."""
        size = self.context.world_size
        rates = [[0.0] * size for _ in range(size)]
        for pair in combinations(range(size), 2):
            # a group is made by all ranks
            group: Any = dist.new_group(list(pair))
            self.context.show(Phase.COMPUTING)
            mine = [0]
            if self.context.rank in pair:
                transport, _ = self._transport(group)
                mine = [int(self._rate(transport))]
                transport.close()
                dist.destroy_process_group(group)
            told = all_gather_ints(None, mine)
            a, b = pair
            rates[a][b] = rates[b][a] = float(min(told[a][0], told[b][0]))
        return rates

    def _rate(self, transport: Transport) -> float:
        """Bytes/s that this rank sends to the other of the two. Collective over them."""
        shards = exchanged_shards(1, self.context.device, torch.float32)
        return sent_bytes(transport, shards) / exchange_s(transport, shards)
