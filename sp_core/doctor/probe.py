"""The service of the doctor's workers: it chooses transports as the workers of a model do, and measures them."""

from __future__ import annotations

from itertools import combinations
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from ..comm import Transport
from ..comm.choice import make_transport
from ..comm.small_collectives import all_gather_ints
from ..errors import SPError
from ..parallel.measure import ACCELERATOR_SHAPE, CPU_SHAPE, measure_rates
from ..pool.shared_state import Phase
from ..pool.worker import WorkerContext

#: exchanges of two devices, of which the first are not counted
_ROUNDS, _WARM_UP = 6, 2


class ProbeService:
    """Answers ``probe``; see :class:`sp_core.pool.worker.Service`."""

    def __init__(self, context: WorkerContext, options: dict[str, Any]) -> None:
        self.context = context

    def handle(self, operation: str, body: Any) -> Any:
        if operation != "probe":
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
        device = self.context.device
        t, H, D = CPU_SHAPE if device.type == "cpu" else ACCELERATOR_SHAPE
        shard = torch.randn(1, t, H, D, device=device)
        times = []
        for _ in range(_ROUNDS):
            started = perf_counter()
            transport.scatter_heads([shard], [t, t])
            transport.check()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            times.append(perf_counter() - started)
        # half of the heads go to the other rank
        return shard.numel() * shard.element_size() / 2 / median(times[_WARM_UP:])
