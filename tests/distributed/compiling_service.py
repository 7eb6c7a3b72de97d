"""A service that computes the reference model with compiled blocks, in turn as the workers of ComfyUI do."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sp_core.comm import Transport
from sp_core.comm.choice import make_transport
from sp_core.host.worker.compiling import compile_phase
from sp_core.parallel.groups import ParallelGroupsCache
from sp_core.planner.degrees import Degrees
from sp_core.plans.block_compiler import BlockCompiler, CompileWish
from sp_core.plans.engine import Engine
from sp_core.pool.protocol import GROUP_TIMEOUT, FromEachRank
from sp_core.pool.shared_state import Phase
from sp_core.reference.model import AudioVideoDiT, ReferenceConfig
from sp_core.reference.plan import REFERENCE
from sp_core.reference.sample import Inputs, step_arguments

CONFIG = ReferenceConfig(layers=2)


class CompilingService:
    """Answers every request with a forward. Where it is told that rank 0 ``fails``, that rank does while rank 1 waits for its graph."""

    def __init__(self, context: Any, options: dict[str, Any]) -> None:
        self.context, self.fails = context, False
        self.groups = ParallelGroupsCache(self._make_transport, GROUP_TIMEOUT)
        self.model = AudioVideoDiT.seeded(CONFIG, 0)
        self.compiler = Failing(self, CompileWish("eager"), phase=partial(compile_phase, context))

    def _make_transport(self, group: Any) -> Transport:
        context = self.context
        transport, _ = make_transport(group, "cpu", directory=context.directory, should_abort=context.should_abort)
        transport.on_enter = context.enter_collective
        return transport

    def handle(self, operation: str, body: Any) -> FromEachRank:
        if body["reset"]:
            self.groups.renew()
        groups = self.groups.build(Degrees(1, 1, self.context.world_size))
        assert groups is not None
        self.fails = body["fails"] and self.context.rank == 0
        before = self.compiler.graphs
        inputs = Inputs.seeded(CONFIG, 1, 3, 10, 14)
        arguments = step_arguments(inputs, inputs.video, inputs.audio, 0.5)
        expected = self.model(**arguments)
        engine = Engine(REFERENCE, groups.sequence, self.context.enter_block, compiler=self.compiler)
        with engine.installed(self.model) as state:
            output = self.model(**arguments, transformer_options={})
            state.check()
        errors = [float((mine - theirs).norm() / theirs.norm()) for mine, theirs in zip(output, expected, strict=True)]
        return FromEachRank({"errors": errors, "before": before, "graphs": self.compiler.graphs, "refusals": self.compiler.refusals})


class Failing(BlockCompiler):
    """What it compiled can run out of memory."""

    def __init__(self, service: CompilingService, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._service = service

    def _by_backend(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if self._service.fails:
                while self._service.context.shared_state.ranks[1].phase is not Phase.COMPILING:
                    time.sleep(0.01)
                raise MemoryError
            return graph.forward(*args)

        return run
