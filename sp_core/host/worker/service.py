"""The worker's side: a headless ComfyUI that answers requests for models and their forwards."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ... import settings
from ...comm import Transport
from ...comm.choice import make_transport
from ...comm.fastest import RememberedTimes
from ...comm.lane import make_lane
from ...comm.registry import TRANSPORTS, WITHOUT_BUFFERS, TransportRow
from ...comm.small_collectives import all_gather_ints
from ...errors import SPError
from ...models.registration import register_models
from ...parallel.groups import ParallelGroups, ParallelGroupsCache, WeightGroup
from ...parallel.rates import measure_rates
from ...parallel.slowdown import Slowdown, factor_of
from ...planner.cost import MeasuredRates
from ...planner.degrees import Degrees, RequestedDegrees
from ...plans import SequencePlan, code_of_packs, plan_of, plan_without, validate
from ...plans.forward_state import ForwardState
from ...plans.kept_cache import RankCaches
from ...plans.shape import token_count
from ...pool.protocol import GROUP_TIMEOUT, FromEachRank
from ...pool.shared_state import Phase
from ...pool.worker import WorkerContext
from .. import comfy_api
from ..options import CLASS
from ..travel import from_wire, to_wire
from . import comfy_memory, one_copy, vae
from .alike import ComputesAlike
from .arrival import Arrivals
from .compiling import Compilers, Granted
from .decide import Decider
from .digest import digests_of_all_ranks, vae_of_all_ranks
from .forward import run_forward
from .forward_call import ForwardCall
from .patch_check import check_patches, gets_whole_data, methods_set_on
from .replay import GraphReplay
from .residency import LoadedModel, Residency
from .row_forward import row_choice, run_rows, why_unsplit
from .uncompiled import uncompile
from .verify import check_ranks_agree
from .weight_choice import choice_of_weights, told_of_weights, told_of_whole, why_whole

#: why blocks with shared weights are not compiled
_WEIGHTS_MOVE = "a block's weights are gathered before it computes, and lie in another place each time (weights: shared)"


class HostService:
    """Answers the requests of docs/architecture.md; see :class:`sp_core.pool.worker.Service`."""

    def __init__(self, context: WorkerContext, options: dict[str, Any]) -> None:
        self.context = context
        comfy_api.import_main()
        comfy_memory.share_pinned_memory(context.world_size)
        if context.device.type == "cpu":  # elsewhere main memory holds weights only while they are not on the device
            one_copy.install(context.directory)
        register_models()
        self._replay = GraphReplay(context, options["catalogue"])
        self._arrivals = Arrivals(self._replay.packs.module)
        self._caches = RankCaches(context.device)
        self._residency = Residency(context)
        self._decider = Decider(context.world_size, context.device, self._measure_rates)
        self._compilers = Compilers(context)
        self._groups = ParallelGroupsCache(
            self._make_transport,
            GROUP_TIMEOUT,
            lambda: make_lane(context.device),
            partial(self._make_transport, rows=WITHOUT_BUFFERS),
        )
        self._slowdown = Slowdown(self._groups.stats)
        self._slowdown.factor = factor_of(settings.slowed(), context.rank)
        self._alike = ComputesAlike()
        #: why each transport in use was chosen
        self._transport_reasons: weakref.WeakKeyDictionary[Transport, str] = weakref.WeakKeyDictionary()
        #: what transports took for an exchange, so that groups that are made anew do not measure it again
        self._transport_times: RememberedTimes = {}
        #: bytes of q, k and v on each rank, as the last forward had them
        self._exchange_bytes: int | None = None

    def handle(self, operation: str, body: Any) -> Any:
        return getattr(self, f"_do_{operation}")(body)

    # -- requests ------------------------------------------------------------------------

    def _do_load(self, body: dict[str, Any]) -> dict[str, Any]:
        """Make a model from the user's graph, and hold it."""
        self.context.show(Phase.REPLAYING)
        # before others take their place in main memory
        self._residency.let_go_of_all_but(body["keep"])
        with self._residency.unpatched(), self._residency.progress_of_loading(body["weight_bytes"], comfy_memory.process_memory):
            patcher = self._replay.output(body["graph"], body["values"], body["node"], body["output_index"], body["list_index"])
        architecture = body["architecture"]
        model = vae.checked(patcher, architecture, body["tiles_only"]) if body["is_vae"] else _checked(patcher, architecture)
        self._residency.hold(body["key"], model)
        places = one_copy.places(model.diffusion_model) if isinstance(model, LoadedModel) and self.context.rank == 0 else []
        return {"resident": self._residency.keys, "places": places}

    def _do_digests(self, body: dict[str, Any]) -> dict[str, Any]:
        """What the MODELs are that nodes of the replayed graphs gave, or the VAE, on every rank."""
        by_rank = digests_of_all_ranks([self._replay.cached(node, index) for node, index in body["outputs"]])
        loaded = None if body["vae"] is None else self._residency[body["vae"]]
        return {"by_rank": by_rank, "vae_by_rank": None if loaded is None else vae_of_all_ranks(loaded.vae)}

    def _do_forward(self, body: dict[str, Any]) -> dict[str, Any]:
        """One forward: decide how to share it, bring the model to the device, compute, reply."""
        if body["reset"]:
            # a request failed before this one, so the ranks' groups may be out of step
            self._groups.renew()
        model = self._residency[body["key"]]
        if model.alone is None:
            self._alike.check(model.patcher)
        objects = None if body["objects"] is None else from_wire(body["objects"])
        call = self._arrivals.complete(ForwardCall.from_body(body), objects, model).with_caches(model.plan.caches, self._caches)
        unsplit = why_unsplit(model, call)
        if unsplit or not model.plan.splits_tokens:
            return self._forward_of_rows(model, call, body["run"], unsplit)
        if model.shape is not None:
            qkv = 3 * token_count(model.diffusion_model, call.x) * model.shape.width * model.shape.itemsize
            self._exchange_bytes = qkv // self.context.world_size
        choice = self._decider.choice(model, call)
        groups = self._groups.build(choice.degrees)
        whole = gets_whole_data(model.patcher, model.modules, call.options)
        rates, of_all_ranks = partial(self._decider.rates, call.x.dtype), partial(all_gather_ints, None)
        lie = choice_of_weights(model, call, choice, whole, rates, of_all_ranks, body["run"])
        weights = self._weight_group(lie.shared, choice.degrees.ranks)
        if groups is None:
            return {}  # this rank stays idle
        groups = groups.in_groups(choice.groups.groups).with_shares(choice.shares)
        holders = 0 if weights is None else weights.transport.world_size

        def activate(part: float) -> None:
            self._residency.activate(model, model.activation_bytes(call.x) * part, body["run"], holders)

        activate(1 if whole else groups.sequence.token_share / choice.degrees.cfg)
        granted = self._compilers.grant(model, call, groups, "" if weights is None else _WEIGHTS_MOVE)
        activate_whole = partial(activate, 1 / choice.degrees.cfg)
        with self._slowdown.forward():
            output, state = run_forward(model, call, groups, self.context.enter_block, granted.compiler, weights, activate_whole)
        self._residency.show_memory(model)
        if settings.verify_ranks() and choice.degrees.ranks == self.context.world_size:
            check_ranks_agree(output)
        decision = choice.line(state.describe(), groups.sequence.all_ranks.name) + told_of(model, state)
        told = self._stats(decision, groups, state, granted) | told_of_weights(model, lie, weights)
        return self._reply(output, told) | {"caches": call.numbers_of(model.plan.caches)}

    def _forward_of_rows(self, model: LoadedModel, call: ForwardCall, run: int | None, unsplit: str) -> dict[str, Any]:
        """A forward of a model without a plan, or one that its plan does not split."""
        choice = row_choice(model, call, self.context.world_size, unsplit)
        groups = self._groups.build(Degrees(1, 1, len(choice.counts)))
        if groups is None:
            return {}  # this rank stays idle
        granted = self._compilers.grant(model, call, groups, f"the tokens of this forward are not split {unsplit}")

        def activate(rows: int) -> None:
            self._residency.activate(model, model.activation_bytes(call.x) * rows / call.x.size(0), run)

        result = run_rows(model, call, choice, groups, self.context.enter_block, activate)
        if result is None:
            return {}
        self._residency.show_memory(model)
        if settings.verify_ranks() and result.ranks == self.context.world_size:
            check_ranks_agree(result.output)
        why = "the tokens of this forward are not split" if call.requested.weights == "shared" else ""
        return self._reply(result.output, self._stats(result.told, groups, ForwardState(0, 1), granted) | told_of_whole(why))

    def _weight_group(self, shared: bool, ranks: int) -> WeightGroup | None:
        """What gathers weights that are shared out over ``ranks`` ranks. Collective where they are, also for ranks that stay idle."""
        weights = self._groups.for_weights(ranks) if shared else None
        if weights is not None:
            weights.transport.stats.reset()
        return weights

    def _ranks_of_weights(self, model: LoadedModel, requested: RequestedDegrees) -> int:
        """Over how many ranks the weights are to lie outside of a forward: as they do already, or as one would have them; 0: whole."""
        if model.shared is not None:
            return model.shared.ranks if requested.weights != "whole" else 0
        ranks = self.context.world_size
        return ranks if requested.weights == "shared" and not why_whole(model, ranks) else 0

    def _reply(self, output: Any, stats: dict[str, Any]) -> dict[str, Any]:
        changed = to_wire(self._arrivals.changed() if self.context.rank == 0 else [])
        return {"output": output, "stats": stats, "changed": changed}

    def _stats(self, decision: str, groups: ParallelGroups, state: ForwardState, granted: Granted) -> dict[str, Any]:
        stats, transport = groups.sequence.stats, groups.sequence.all_ranks
        return {
            "exchange_s": self._decider.exchange_s(stats),
            "exchange_bytes": stats.bytes_sent,
            "exchanges": stats.exchanges,
            "decision": decision,
            "whole": state.got_whole,
            "why_whole": state.why_whole,
            "apart": state.apart,
            "compiled": self._compilers.told(granted, state),
            "transport": self._transport_reasons.get(transport, transport.name),
        }

    def _do_call(self, body: dict[str, Any]) -> Any:
        """A method of the diffusion model that the host calls outside a forward, and that needs weights."""
        model = self._residency[body["key"]]
        self._residency.activate(model, 0, body["run"], self._ranks_of_weights(model, RequestedDegrees(**body["requested"])))
        return getattr(model.diffusion_model, body["method"])(*body["args"], **body["kwargs"])

    def _do_vae(self, body: dict[str, Any]) -> FromEachRank:
        """Decode or encode: each rank's rows of the result."""
        if body["reset"]:
            self._groups.renew()
        loaded, call = self._residency[body["key"]], vae.VaeCall.from_body(body)
        bands = vae.bands_of(loaded, call, self.context.world_size)
        groups = self._groups.build(Degrees(1, 1, bands.ranks))
        if groups is None:
            return FromEachRank(None)  # this rank stays idle
        self._residency.activate(loaded, vae.activation_bytes(loaded, call, bands, groups.sequence.rank), None)
        rows = vae.compute(loaded, call, bands, groups, self.context)
        self._residency.show_memory(loaded)
        return FromEachRank(rows)

    def _do_tiles(self, body: dict[str, Any]) -> FromEachRank:
        """Decode or encode a tile on each rank, the one of its number, if there are so many."""
        if self.context.rank >= len(body["tiles"]):
            return FromEachRank(None)
        loaded, tile = self._residency[body["key"]], body["tiles"][self.context.rank]
        self._residency.activate(loaded, vae.tile_bytes(loaded, body["method"], tile), None)
        result = vae.compute_tile(loaded, body["method"], tile, body["dtype"], self.context)
        self._residency.show_memory(loaded)
        return FromEachRank(result)

    def _do_finish(self, body: dict[str, Any]) -> None:
        """A sampling run is over: the model, and the host, let go of what they kept for it."""
        model = self._residency.get(body["key"])
        self._arrivals.forget()
        self._caches.forget()
        try:
            if model is not None and body["method"]:
                getattr(model.diffusion_model, body["method"])()
        finally:
            self._residency.end_run(model)
            self._residency.show_memory(model)

    def _do_release(self, body: dict[str, Any]) -> None:
        """Take the weights of one model off the devices of some ranks."""
        model = self._residency.get(body["key"])
        if self.context.rank in body["ranks"]:
            self._residency.release(model, body["wholly"])
        # Last: this waits for all ranks, and one that failed must not keep this rank from giving its weights back.
        if not body["reset"]:
            self._groups.trim()
        self._residency.show_memory(model)

    def _do_keep(self, body: dict[str, Any]) -> dict[str, Any]:
        """Forget every model but these, on the device and in the cache of replayed graphs."""
        self._arrivals.forget()
        self._residency.forget_all_but(body["keys"])
        self._replay.trim(body["graph"])
        self._residency.show_memory(None)
        return {"resident": self._residency.keys}

    # -- the ranks' groups ---------------------------------------------------------------

    def _measure_rates(self, dtype: torch.dtype) -> MeasuredRates:
        """Collective over all ranks."""
        everyone = self._groups.build(Degrees(1, 1, self.context.world_size))
        assert everyone is not None
        return measure_rates(everyone.sequence.all_ranks, self.context.device, dtype, slowed=self._slowdown.factor)

    def _make_transport(self, group: Any, rows: Sequence[TransportRow] = TRANSPORTS) -> Transport:
        transport, reason = make_transport(
            group,
            self.context.device,
            directory=self.context.directory,
            # the coordinator notices first, and knows who keeps whom waiting; this is for when it cannot
            timeout_s=2 * max(settings.stall_timeout_s(), settings.compile_timeout_s()),
            should_abort=self.context.should_abort,
            rows=rows,
            exchange_bytes=self._exchange_bytes,
            remembered=self._transport_times,
        )
        self._transport_reasons[transport] = reason
        transport.on_enter = self._slowdown.entering(self.context.enter_collective)
        return transport


def told_of(model: LoadedModel, state: ForwardState) -> str:
    """What else people are told of how a forward was shared out."""
    alone = f"; nothing beside the exchange of {' and '.join(state.alone)}" if state.alone else ""
    escaped = f"; not split, as {state.escaped}" if state.escaped else ""
    return alone + escaped + ("" if model.alone is None else computed_alone(model.alone))


def computed_alone(name: str) -> str:
    """Why the other devices are idle, for people."""
    return f"; the class {name} has code of its own in the model's forward, which nobody can share out, so one device computes all of it"


def _checked(patcher: Any, architecture: str) -> LoadedModel:
    """The model that a graph gave, if it is what ComfyUI's process has and its patches can work here.

    Raises:
        SPError: it is another architecture, or holds a patch that cannot work.
    """
    compile_wish = uncompile(patcher)
    inner = patcher.model.diffusion_model
    # another branch that is active may have left a class of its own in the model that both share
    own = patcher.object_patches_backup.get(CLASS, type(inner))
    kind = patcher.object_patches.get(CLASS, own)
    plan = plan_of(kind, own)
    if plan.architecture != architecture:
        raise SPError(f"the workers made a {plan.architecture} from the graph, ComfyUI's process a {architecture}")
    why = _misfit(patcher, plan)
    if why is not None and (plan.strict or not plan.splits_tokens):
        raise why
    # what another branch's patch put there ComfyUI takes back
    theirs = patcher.object_patches_backup
    replaced = [] if plan.strict else [name for name in methods_set_on(inner) if f"diffusion_model.{name}" not in theirs]
    unsplit = f"here (a node replaced the model's own {', '.join(replaced)})" if replaced else ""
    alone = code_of_packs(plan if why is None else plan_without(kind), inner, kind)
    return LoadedModel(patcher, plan, alone, unsplit if why is None else f"here ({why})", compile_wish=compile_wish)


def _misfit(patcher: Any, plan: SequencePlan) -> SPError | None:
    """Why a plan does not fit the model as it is here, with its patches; None where it fits, and without a plan."""
    try:
        validate(plan, patcher.model.diffusion_model, f"ComfyUI {comfy_api.version()}")
        if plan.splits_tokens:
            check_patches(patcher)
    except SPError as why:
        return why
    return None
