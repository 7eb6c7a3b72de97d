"""Compiled blocks over ranks, each forward against the same in one process, uncompiled."""

from __future__ import annotations

import contextlib
import functools
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from distributed.longcat_ranks import enter_host
from host.families import FAMILIES, Family
from host.family_inputs import METHOD, plain, random, video
from torch import Tensor

from sp_core.demo.run import relative_l2
from sp_core.plans.block_compiler import BlockCompiler, CompileWish


@contextlib.contextmanager
def attention_that_looks_at_no_options() -> Iterator[None]:
    """As a pack does that puts its own function in the place of ComfyUI's: nobody is asked to exchange."""
    import comfy.ldm.wan.model as host

    whole = host.optimized_attention

    def alone(q: Tensor, k: Tensor, v: Tensor, heads: int, **_: Any) -> Tensor:
        q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    host.optimized_attention = alone
    try:
        yield
    finally:
        host.optimized_attention = whole


@contextlib.contextmanager
def attention_of_a_pack() -> Iterator[None]:
    """A function of another module in the place of ComfyUI's, which asks for overrides as ComfyUI's does: torch cannot trace it."""
    import comfy.ldm.modules.attention as attention
    import comfy.ldm.wan.model as host

    whole = host.optimized_attention

    def of_a_pack(q: Tensor, k: Tensor, v: Tensor, heads: int, **more: Any) -> Tensor:
        assert not torch.compiler.is_compiling()
        return whole(q, k, v, heads, **more)

    host.optimized_attention = attention.wrap_attn(of_a_pack)
    try:
        yield
    finally:
        host.optimized_attention = whole


@dataclass
class Noting(BlockCompiler):
    """Keeps what it is given to compile as text, with all sizes, and can fail."""

    texts: list[str] = field(default_factory=list)
    fails: bool = False

    def _by_backend(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.texts.append(graph.print_readable(print_output=False, include_stride=True))
        if self.fails:
            raise RuntimeError("a fault of the backend")
        return super()._by_backend(graph, inputs)


class Ranks:
    """What one rank keeps between questions: models."""

    def __init__(self, comfyui: str, rank: int, world_size: int) -> None:
        enter_host(comfyui)
        self.rank, self.models = rank, dict[str, Any]()
        self.groups = {size: dist.new_group(list(range(size))) for size in range(2, world_size + 1)}

    def __call__(self, size: int, family: str, forwards: list[str | tuple[int, ...]], settings: dict[str, Any]) -> Any:
        if self.rank >= size:
            return None
        if not FAMILIES[family].known_to_the_host():
            return {"missing": FAMILIES[family].class_name}
        try:
            return self._compared(size, FAMILIES[family], family, forwards, **settings)
        except Exception as error:
            # not raised: the ranks stay in step for the next question
            return {"failure": traceback.format_exc(), "kind": type(error).__name__}

    @torch.inference_mode()
    def _compared(
        self,
        size: int,
        family: Family,
        name: str,
        forwards: list[str | tuple[int, ...]],
        backend: str = "eager",
        dynamic: bool | None = None,
        fullgraph: bool = False,
        around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        cache: str = "",
        fails_on: int = -1,
    ) -> dict[str, Any]:
        from torch._dynamo.utils import counters

        from sp_core.comm import CollectiveTransport
        from sp_core.host.worker.agreed import agree
        from sp_core.host.worker.comfy_attention import host_functions
        from sp_core.parallel.groups import ParallelGroups
        from sp_core.planner.degrees import Degrees
        from sp_core.plans import Engine, plan_named

        plan = plan_named(family.class_name)
        if name not in self.models:
            self.models[name] = family.build()
        model = self.models[name]
        wish = CompileWish(backend, dynamic=dynamic, fullgraph=fullgraph)
        # what torch learned of sizes in other questions, not all ranks were asked
        torch._dynamo.reset()
        compiler = Noting(wish, fails=self.rank == fails_on)
        if cache:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
            compiler.phase = functools.partial(self._in_turn, self.groups[size])
        compiler.texts.clear()
        counters.clear()
        told: dict[str, Any] = {"errors": [], "graphs": [], "exchanges": [], "uncompiled": {}, "calls_uncompiled": []}
        for forward in forwards:
            make = functools.partial(_first, family.forwards[forward] if isinstance(forward, str) else functools.partial(_camera, forward))
            stock = _forward(model, plan.forward, make())
            # another transport in each forward, as after a failure
            transport, inputs = CollectiveTransport(self.groups[size]), make()
            engine = Engine(plan, transport, inputs=inputs, host=host_functions(), compiler=compiler)
            groups = ParallelGroups(Degrees(1, 1, size), engine.sequence, None, self.groups[size])
            compiler.refusals |= agree(compiler.refusals, self.rank, groups, torch.device("cpu"))
            transport.stats.reset()
            with family.patched(), around(), engine.installed(model) as state:
                out = _forward(model, plan.forward, inputs)
                state.check()
            told["errors"].append(max(relative_l2(mine, theirs) for mine, theirs in zip(out, stock, strict=True)))
            told["graphs"].append(compiler.graphs)
            told["exchanges"].append(transport.stats.exchanges)
            told["uncompiled"] |= state.uncompiled
            told["calls_uncompiled"].append(sum(state.uncompiled.values()))
        told |= {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass")}
        return told | {"breaks": dict(counters["graph_break"]), "texts": compiler.texts, "refusals": compiler.refusals}

    @contextlib.contextmanager
    def _in_turn(self, group: Any, leader: int) -> Iterator[None]:
        """The leader compiles, and then the others."""
        if self.rank != leader:
            dist.barrier(group)
        yield
        if self.rank == leader:
            dist.barrier(group)


def _first(make: Callable[[], Any]) -> dict[str, Any]:
    """Of forwards that follow one another the first."""
    made = make()
    return made if isinstance(made, dict) else next(made)


def _camera(sizes: tuple[int, ...]) -> dict[str, Any]:
    """Arguments of Wan's camera model by the frames, height and width of x."""
    return plain(video(36, *sizes), clip_fea=random(1, 257, 1280, seed=9))


def _forward(model: Any, method: str, inputs: dict[str, Any]) -> list[Tensor]:
    options = {} if METHOD in inputs else {"transformer_options": {"block_index": 0, "sigmas": torch.rand(1)}}
    arguments = {name: value for name, value in inputs.items() if name != METHOD}
    out = getattr(model, inputs.get(METHOD, method))(**{**options, **arguments})
    return list(out) if isinstance(out, (list, tuple)) else [out]
