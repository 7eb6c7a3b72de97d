"""A service for pool tests: answers, fails, stalls and counts blocks on request."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from sp_core.pool.protocol import FromEachRank


class EchoService:
    def __init__(self, context: Any, options: dict[str, Any]) -> None:
        self.context, self.options = context, options
        time.sleep(options.get("start_seconds", [0, 0, 0])[context.rank])

    def handle(self, operation: str, body: Any) -> Any:
        rank = self.context.rank
        if operation == "echo":
            return body
        if operation == "own rows":
            return FromEachRank(torch.full((body["rows"], 4), float(rank)))
        if operation == "sum":
            total = torch.tensor([float(rank + 1)])
            dist.all_reduce(total)
            return total
        if operation == "fail":
            if rank in body["ranks"]:
                raise ValueError(f"told to fail on rank {rank}")
            if body.get("wait"):
                dist.barrier()
            return None
        if operation == "die":
            if rank == body:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
        if operation == "stall":
            time.sleep(body[1] if rank == body[0] else 0)
            return None
        if operation == "enter_collective":
            # rank ``late`` never comes to the second meeting
            for number in range(2):
                if rank == body and number == 1:
                    time.sleep(3600)
                self.context.enter_collective()
                dist.barrier()
        if operation == "note":
            self.notes = [*getattr(self, "notes", []), body]
            return self.notes
        if operation == "unsendable":
            return {"function": print}
        if operation == "lose":
            if rank == body:
                raise torch.AcceleratorError("CUDA error: unspecified launch failure")
            return None
        if operation == "blocks":
            for block in range(body["blocks"]):
                self.context.enter_block(block, body["blocks"])
                if rank == 0:
                    self.last = block
                while "until" in body and not os.path.exists(body["until"]):
                    time.sleep(0.01)
                time.sleep(body.get("seconds", 0))
                # a rank that ran ahead or stopped early would hang here
                dist.barrier()
            return "finished"
        raise KeyError(operation)
