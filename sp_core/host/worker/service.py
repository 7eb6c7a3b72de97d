"""The worker's side: a headless ComfyUI that replays graphs and computes forwards."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from ...comm import Transport, TransportStats
from ...comm.choice import make_transport
from ...comm.watched import WatchedTransport
from ...errors import SPError
from ...models.registration import register_models
from ...parallel.groups import ParallelGroups, ParallelGroupsCache
from ...parallel.measure import measure
from ...planner.choose import DegreeChoice, choose
from ...planner.cost import MeasuredRates
from ...planner.degrees import Degrees, RequestedDegrees
from ...plans import Engine, SequencePlan, plan_named, shape
from ...plans.forward_state import ForwardState
from ...plans.override import OVERRIDE
from ...pool.errors import Cancelled
from ...pool.protocol import GROUP_TIMEOUT
from ...pool.shared_state import Phase
from ...pool.worker import WorkerContext
from ...settings import stall_timeout_s
from .. import comfy_api
from ..options import AROUND_THE_MODEL
from ..patches import check_patches, put_skips, wants_whole_batch
from . import cfg_split, loading, verify
from .interrupt import interruptible

log = logging.getLogger(__name__)


class HostService:
    """Answers ``load``, ``forward``, ``call``, ``finish``, ``release`` and ``keep``; see :class:`sp_core.pool.worker.Service`."""

    def __init__(self, context: WorkerContext, options: dict[str, Any]) -> None:
        self.context = context
        comfy_api.import_main()
        comfy_api.share_pinned_memory(context.world_size)
        register_models()
        _install_lazy_nodes(options["catalogue"])
        self._executor = comfy_api.make_executor(_Server())
        self._models: dict[str, Any] = {}
        self._active: Any = None
        #: bytes of activations that the host made room for beside the active model
        self._room = -1.0
        self._parallels: ParallelGroupsCache | None = None
        #: why each transport in use was chosen
        self._transport_reasons: dict[str, str] = {}
        self._machine: MeasuredRates | None = None

    def handle(self, operation: str, body: Any) -> Any:
        return getattr(self, f"_do_{operation}")(body)

    # -- requests ------------------------------------------------------------------------

    def _do_load(self, body: dict[str, Any]) -> dict[str, Any]:
        self.context.show(Phase.REPLAYING)
        with self._loading(body["weight_bytes"], comfy_api.process_memory):
            patcher = self._replay(body["graph"], body["node"], body["slot"])
        self._check(patcher, body["architecture"])
        kept = {key: value for key, value in self._models.items() if key in body["keep"]}
        self._models = {**kept, body["key"]: patcher}
        if self._active is not None and self._active not in self._models.values():
            self._deactivate()
        return {"resident": list(self._models)}

    def _do_forward(self, body: dict[str, Any]) -> dict[str, Any]:
        patcher = self._models[body["key"]]
        plan = plan_named(type(patcher.model.diffusion_model).__name__)
        requested = RequestedDegrees(**body["requested"])
        decision = self._decide(patcher, plan, requested, body)
        parallel = self._parallels_now(False).build(decision.degrees)
        if parallel is None:
            return {}  # this rank stays idle
        self._activate(patcher, body["named"].get("x"), decision.degrees.ranks)
        output, run = self._forward(patcher, plan, parallel, requested, body)
        self._show_memory(patcher)
        if verify.wanted() and decision.degrees.ranks == self.context.world_size:
            verify.check_ranks_agree(output)
        stats, transport = parallel.sequence.stats, parallel.sequence.all_ranks
        return {
            "output": output,
            "stats": {
                "exchange_s": self._exchange_seconds(stats),
                "exchange_bytes": stats.bytes_sent,
                "exchanges": stats.exchanges,
                "decision": decision.line(run.describe(), transport.name),
                "transport": self._transport_reasons.get(transport.name, transport.name),
            },
        }

    def _decide(self, patcher: Any, plan: SequencePlan, requested: RequestedDegrees, body: dict[str, Any]) -> DegreeChoice:
        """Degrees of this forward; every rank comes to the same from the same facts."""
        model, x = patcher.model.diffusion_model, body["named"].get("x")
        # a model that keeps something between forwards must find it cut the same way
        conditionings = 1 if plan.keeps_state or wants_whole_batch(patcher) else cfg_split.conditionings(body["options"])
        parallels = self._parallels_now(body["reset"])
        if self._machine is None:
            everyone = parallels.build(Degrees(1, 1, self.context.world_size))
            assert everyone is not None
            dtype = (x[0] if isinstance(x, (list, tuple)) else x).dtype
            self._machine = measure(everyone.sequence.all_ranks, self.context.device, dtype)
            log.info("measured: %.3g FLOP/s, %.3g bytes/s, %.3g s a collective", *self._machine.rates)
        return choose(
            self.context.world_size,
            conditionings,
            requested,
            shape=shape.model_shape(plan, model),
            tokens=shape.token_count(model, x),
            machine=self._machine,
            # CPU workers exist for tests: all of them work, however slow that is
            may_ring=not self._attention_is_replaced(patcher, plan),
            may_idle=self.context.device.type != "cpu" and not plan.keeps_state,
        )

    def _forward(
        self, patcher: Any, plan: SequencePlan, parallel: ParallelGroups, requested: RequestedDegrees, body: dict[str, Any]
    ) -> tuple[Any, ForwardState]:
        model = patcher.model.diffusion_model
        named, extra, sent = body["named"], body["extra"], body["options"]
        batch = parallel.batch
        if batch is not None:
            rows = cfg_split.batch_of(named["x"])
            named, extra = (cfg_split.cut_call(tree, rows, batch.rank, batch.world_size) for tree in (named, extra))
            sent = cfg_split.cut_options(sent, batch.rank, batch.world_size)
        parallel.sequence.stats.reset()
        engine = Engine(plan, parallel.sequence, self.context.enter_block, layout=requested.layout, inputs={**named, **extra})
        with engine.installed(model) as run:
            options = engine.adapted(self._options(patcher, sent), run)
            output = getattr(model, body["method"])(**named, transformer_options=options, **extra)
            run.check()
        parallel.sequence.check()
        if batch is not None:
            output = cfg_split.join_output(output, batch)
            batch.check()
        return output, run

    def _exchange_seconds(self, stats: TransportStats) -> float:
        """Time that this forward spent in exchange.

        On an accelerator the calls only start it, so there it is worked out from the measured link.
        """
        if self.context.device.type == "cpu" or self._machine is None:
            return stats.seconds
        return stats.bytes_sent / self._machine.bandwidth + stats.exchanges * self._machine.latency_s

    @staticmethod
    def _attention_is_replaced(patcher: Any, plan: SequencePlan) -> bool:
        options = patcher.model_options.get("transformer_options", {})
        return OVERRIDE in options or any(a.mask_attention is not None or a.kind == "joint" for a in plan.attentions)

    def _parallels_now(self, reset: bool) -> ParallelGroupsCache:
        """The ranks' groups; after a failed request they may be out of step, so they are made anew."""
        if self._parallels is None:
            self._parallels = ParallelGroupsCache(self._make_transport, GROUP_TIMEOUT)
        if reset:
            self._parallels.renew()
        return self._parallels

    def _make_transport(self, group: Any) -> Transport:
        transport, reason = make_transport(
            group,
            self.context.device,
            directory=self.context.directory,
            # the coordinator notices first, and knows who keeps whom waiting; this is for when it cannot
            timeout_s=2 * stall_timeout_s(),
            should_abort=self.context.should_abort,
        )
        self._transport_reasons[transport.name] = reason
        return WatchedTransport(transport, self.context.enter_collective)

    def _do_call(self, body: dict[str, Any]) -> Any:
        patcher = self._models[body["key"]]
        self._activate(patcher, None)
        return getattr(patcher.model.diffusion_model, body["method"])(*body["args"], **body["kwargs"])

    def _do_finish(self, body: dict[str, Any]) -> None:
        """A sampling run is over: the model, and the host, let go of what they kept for it."""
        patcher = self._models.get(body["key"])
        try:
            if patcher is not None and body["method"]:
                getattr(patcher.model.diffusion_model, body["method"])()
        finally:
            self._room = -1.0
            comfy_api.end_of_node()
            self._show_memory(patcher)

    def _do_release(self, body: dict[str, Any]) -> None:
        """Weights of one model off the devices of some ranks; it stays loaded in host memory as the host sees fit."""
        patcher = self._models.get(body["key"])
        if self.context.rank in body["ranks"]:
            comfy_api.end_of_node()
            if patcher is not None:
                if self._active is patcher:
                    self._deactivate()
                comfy_api.unload(patcher, body["wholly"])
        # last, for it is the one thing here that other ranks can spoil
        if self._parallels is not None and not body["reset"]:
            self._parallels.trim()
        self._show_memory(patcher)

    def _do_keep(self, body: dict[str, Any]) -> dict[str, Any]:
        """Forget every model but these, on the device and in the cache of replayed graphs."""
        for key in [key for key in self._models if key not in body["keys"]]:
            patcher = self._models.pop(key)
            if self._active is patcher:
                self._deactivate()
            comfy_api.unload(patcher)
        comfy_api.trim_cache(self._executor, body["graph"])
        self._show_memory(None)
        return {"resident": list(self._models)}

    # -- models --------------------------------------------------------------------------

    def _replay(self, graph: dict[str, Any], node: str, slot: int) -> Any:
        """ForwardState the graph's way to one output with the host's own executor and cache."""
        graph = {name: {"class_type": entry["class_type"], "inputs": dict(entry["inputs"])} for name, entry in graph.items()}
        self._executor.success = True
        with torch.inference_mode(), interruptible(self.context.cancelled):
            comfy_api.execute(self._executor, graph, f"sp-{time.monotonic_ns()}", [node])
        if self.context.cancelled():
            raise Cancelled
        if not self._executor.success:
            raise SPError(_execution_error(self._executor.status_messages))
        outputs = comfy_api.cached_outputs(self._executor, node)
        if outputs is None or slot >= len(outputs) or not outputs[slot]:
            raise SPError(f"{node} gave no model")
        return outputs[slot][0]

    def _check(self, patcher: Any, architecture: str) -> None:
        found = type(patcher.model.diffusion_model).__name__
        if found != architecture:
            raise SPError(f"the workers made a {found} from the graph, the UI process a {architecture}")
        check_patches(patcher, plan_named(found))

    def _activate(self, patcher: Any, x: Any, ranks: int = 1) -> None:
        """The model on the device, with room for its activations: for the first forward, and when more room is needed.

        The host does this once for a sampling run. Doing it for each step would under dynamic VRAM bring back weights that
        were just found not to fit.
        """
        import comfy.model_management

        first = x[0] if isinstance(x, (list, tuple)) else x
        memory = patcher.model.memory_required(list(first.shape)) / ranks if first is not None else 0
        if self._active is patcher and memory <= self._room and comfy_api.is_loaded(patcher):
            self.context.show(Phase.COMPUTING)
            return
        if self._active is not patcher:
            self._deactivate()
        self.context.show(Phase.LOADING)
        arrived = partial(comfy_api.device_memory, self.context.device)
        with contextlib.nullcontext() if self._active is patcher else self._loading(patcher.model_size(), arrived):
            comfy.model_management.load_models_gpu([patcher], memory_required=memory)
        if self._active is not patcher:
            patcher.pre_run()
            self._active = patcher
        self._room = memory
        self._show_memory(patcher)
        self.context.show(Phase.COMPUTING)

    def _loading(self, total: int, held: Callable[[], int]) -> AbstractContextManager[None]:
        return loading.shown(total, held, self.context.own_state.show_loaded)

    def _show_memory(self, patcher: Any) -> None:
        state = self.context.own_state
        state.weight_bytes = comfy_api.loaded_weights(self.context.device)
        state.spare_bytes = comfy_api.spare_memory(patcher) if patcher is not None else 0

    def _deactivate(self) -> None:
        if self._active is not None:
            self._active.cleanup()
            self._active, self._room = None, -1.0

    def _options(self, patcher: Any, sent: dict[str, Any]) -> dict[str, Any]:
        import comfy.utils

        own = comfy.utils.deepcopy_list_dict(patcher.model_options.get("transformer_options", {}))
        options = {key: value for key, value in own.items() if key not in AROUND_THE_MODEL} | sent
        options["prefetch_dynamic_vbars"] = bool(getattr(patcher, "is_dynamic", lambda: False)())
        return put_skips(options)


class _Server:
    """What the executor wants of a server: somewhere to send news that nobody here reads."""

    client_id: str | None = None
    last_node_id: str | None = None
    last_prompt_id: str | None = None

    def send_sync(self, event: str, data: Any, sid: str | None = None) -> None:
        pass


def _install_lazy_nodes(catalogue: dict[str, list[str]]) -> None:
    """Load a node pack when a graph, or a node that expands into a graph, asks for one of its nodes."""
    import nodes

    class LazyNodes(dict):
        def __missing__(self, class_type: str) -> Any:
            if class_type not in catalogue:
                raise SPError(f"the graph needs the node {class_type}, which the UI process does not have")
            parent, path = catalogue[class_type]
            if parent == "custom_nodes":
                _make_prompt_server()
            log.info("loading %s for %s", os.path.basename(path), class_type)
            if not comfy_api.load_node_pack(path, parent) or class_type not in self:
                raise SPError(f"{os.path.basename(path)}, which has the node {class_type}, does not load in the worker")
            return self[class_type]

    nodes.NODE_CLASS_MAPPINGS = LazyNodes(nodes.NODE_CLASS_MAPPINGS)


def _make_prompt_server() -> None:
    """Node packs add routes to the host's server while they are imported; give them one that is never started."""
    import asyncio

    import server

    if not hasattr(server.PromptServer, "instance"):
        server.PromptServer(asyncio.new_event_loop())


def _execution_error(messages: list[Any]) -> str:
    for event, data in reversed(messages):
        if event == "execution_error":
            with contextlib.suppress(KeyError, TypeError):
                return f"{data['node_id']}: {str(data['exception_message']).strip()}"
        if event == "execution_interrupted":
            return "the graph was interrupted"
    return "the graph did not run"
