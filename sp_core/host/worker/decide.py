"""Which parallel degrees a forward gets. Every rank decides for itself, and comes to the same from the same facts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch

from ... import settings
from ...comm import TransportStats
from ...layout import Shares
from ...planner.choose import DegreeChoice, choose
from ...planner.cost import MeasuredRates
from ...planner.degrees import Degrees, requested_shares
from ...planner.shares import auto_shares
from ...plans.override import OVERRIDE
from ...plans.shape import token_count
from .forward_call import ForwardCall
from .patch_check import wants_whole_batch
from .residency import LoadedModel

log = logging.getLogger(__name__)

#: choices that are remembered: some for each stage of a workflow are enough
REMEMBERED = 64
#: of a device's memory, what activations and weights can have together, and what activations get beside any weights
MOST_ACTIVATIONS, LEAST_ACTIVATIONS = 0.9, 0.3


class Decider:
    """Chooses degrees, once for equal facts: all that a choice rests on is an argument of the function that is remembered."""

    def __init__(self, world_size: int, device: torch.device, measure: Callable[[torch.dtype], MeasuredRates]) -> None:
        """``measure``: what the devices and their links do in a second, computing in a dtype; called once for each."""
        self._world_size, self._device, self._measure = world_size, device, measure
        self._rates: dict[torch.dtype, MeasuredRates] = {}
        self._choose = lru_cache(maxsize=REMEMBERED)(choose)

    def choice(self, model: LoadedModel, call: ForwardCall) -> DegreeChoice:
        """Degrees of one forward. Collective in the first call in a dtype, which measures."""
        if model.alone is not None:
            return DegreeChoice(Degrees(), self._world_size)
        # a model that keeps something between forwards must find it split the same way
        one_batch = model.plan.keeps_state or wants_whole_batch(model.patcher, model.modules, call.options)
        shares = self._shares(model, call)
        return self._choose(
            self._world_size,
            1 if one_batch else call.conditionings,
            call.requested,
            shape=model.shape,
            tokens=token_count(model.diffusion_model, call.x),
            rates=self.rates(call.x.dtype),
            may_idle=self.may_idle(model),
            may_ring=self.may_ring(model) and OVERRIDE not in call.options,
            groups=settings.head_groups(),
            shares=shares,
        )

    def _shares(self, model: LoadedModel, call: ForwardCall) -> Shares | None:
        if call.requested.shares.strip() != "auto":
            return requested_shares(call.requested.shares, self._world_size)
        rates = self.rates(call.x.dtype)
        if not rates.room or model.plan.keeps_state:
            # what a model keeps between forwards lies where the first of them put it
            return auto_shares(rates)
        # weights that do not fit beside activations leave the device, but not all of them
        weights = model.patcher.model_size()
        room = tuple(max(MOST_ACTIVATIONS * total - weights, LEAST_ACTIVATIONS * total) for total in rates.room)
        return auto_shares(replace(rates, room=room), model.activation_bytes(call.x))

    def rates(self, dtype: torch.dtype) -> MeasuredRates:
        """What the devices compute in ``dtype`` and their links carry, measured at the first use."""
        if dtype not in self._rates:
            self._rates[dtype] = self._measure(dtype)
            log.info("measured in %s: %s", dtype, self._rates[dtype].describe())
        return self._rates[dtype]

    def may_idle(self, model: LoadedModel) -> bool:
        """Whether devices may be left idle. CPU workers exist for tests: all of them work, however slow that is."""
        return self._device.type != "cpu" and not model.plan.keeps_state

    @staticmethod
    def may_ring(model: LoadedModel) -> bool:
        """Whether this attention can be one that returns log-sum-exp, which a ring needs to merge partial results."""
        options = model.patcher.model_options.get("transformer_options", {})
        attentions = model.plan.attentions
        return OVERRIDE not in options and all(a.mask is None and a.kind != "joint" for a in attentions)

    def exchange_s(self, stats: TransportStats) -> float:
        """Seconds that a forward spent in exchange.

        On an accelerator the calls only start an exchange, so there its time is worked out from the measured link.
        """
        if self._device.type == "cpu" or not self._rates:
            return stats.seconds
        # bytes take their time whatever they mean
        return next(iter(self._rates.values())).exchange_s(stats.bytes_sent, stats.exchanges)
