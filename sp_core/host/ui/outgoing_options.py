"""The transformer options of a patched MODEL in ComfyUI's process: what crosses to the workers, what stays here, what is refused.

The workers hold everything that was on the MODEL before SP Model Patch, because they made it from the same graph.
Plain data that ComfyUI's process adds for one forward is sent to them, and so are functions and objects that can travel
(:mod:`..travel`). What is used around the model stays in ComfyUI's process. The rest is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import SPError
from ...plans.override import OVERRIDE
from ...pool.wire import unsendable
from ..options import AROUND_THE_MODEL, INSIDE_THE_MODEL, name_of, patches_in
from ..travel import CannotTravel, Own, Packed
from .departure import Departure
from .known_objects import KnownObjects


def with_own_patches(transformer_options: dict[str, Any]) -> dict[str, Any]:
    """The options with a mark for each patch inside the model, as the workers have these, and a late patch may build on one."""
    options = {key: value for key, value in transformer_options.items() if key not in INSIDE_THE_MODEL}
    if patches := transformer_options.get("patches"):
        marks = {kind: [Own(("patches", kind, i)) for i in range(len(functions))] for kind, functions in patches.items()}
        options["patches"] = marks
    if replaced := transformer_options.get("patches_replace"):
        options["patches_replace"] = {
            kind: {place: Own(("patches_replace", kind, place)) for place in by_place} for kind, by_place in replaced.items()
        }
    if transformer_options.get(OVERRIDE) is not None:
        options[OVERRIDE] = Own((OVERRIDE,))
    return options


def placed_too_late(what: str, node: str = "the node that adds it", *, gives_model: bool = True, why: object = "") -> SPError:
    """The sentence about something that only the workers could honour.

    Args:
        gives_model: ``node`` has a MODEL output. A sampler or a guider has none, and SP Model Patch cannot stand behind it.
        why: it cannot be sent to them.
    """
    cannot = f", and it cannot be sent to them: {why}" if why else ""
    if gives_model:
        return SPError(
            f"{what} was added to the model after SP Model Patch, where only the workers could honour it{cannot}. "
            f"Place SP Model Patch after {node}, or remove that node"
        )
    return SPError(
        f"{what} is added to the model by {node}, which has no MODEL output for SP Model Patch to stand behind{cannot}. "
        f"Remove {node}, or SP Model Patch. Guidances that work with it are ComfyUI's own LTXVSpatioTemporalGuidance and "
        "SkipLayerGuidanceDiT"
    )


def hooked(what: str) -> SPError:
    """The sentence about hooks of a conditioning that change the model's weights while it samples."""
    return SPError(
        f"{what} of a conditioning changes the model's weights while sampling, which the workers cannot follow. "
        "Remove the hook from the conditioning and apply its LoRA to the model before SP Model Patch, or remove SP Model Patch"
    )


class OutgoingOptions:
    """Sorts the options of one patched MODEL, for each of its forwards.

    Args:
        given: the options of the MODEL that SP Model Patch got.
        departure: packs objects.
        written: code inside the model may write into what it finds in the options, also where it is the model's own.
    """

    def __init__(self, given: dict[str, Any], known: KnownObjects, departure: Departure, written: bool = False) -> None:
        self._own_patches = _inside(with_own_patches(given))
        self._known, self._departure, self._written = known, departure, written

    def check(self, transformer_options: dict[str, Any]) -> None:
        """Check the patched MODEL's own options before sampling: what they hold was written by a node behind SP Model Patch.

        Raises:
            SPError: a patch inside the model, or an object, cannot be sent to the workers.
        """
        self._packed(transformer_options, lambda place, why: placed_too_late(f"A patch ({place})", why=why))

    def for_workers(self, transformer_options: dict[str, Any]) -> tuple[dict[str, Any], Packed | None]:
        """What the workers do not have by themselves of one forward's options: plain data, and objects.

        Raises:
            SPError: a patch inside the model, or an object, that was added for this forward cannot be sent.
        """
        sent, packed = self._packed(transformer_options, _while_sampling)
        here = {*AROUND_THE_MODEL, *INSIDE_THE_MODEL, *sent}
        entries = {key: value for key, value in transformer_options.items() if key not in here}
        return {key: value for key, value in entries.items() if unsendable(value) is None}, packed

    def _packed(self, options: dict[str, Any], refused: Callable[[str, CannotTravel], SPError]) -> tuple[dict[str, Any], Packed | None]:
        """What of the options travels as objects, and as what."""
        inside = _inside(options)
        late = inside != self._own_patches
        self._known.check(options, late)
        new = self._known.new(options, late)
        # a list that code inside the model may add to, and finds again in the next step
        kept = _containers(options) if late or self._written or self._known.foreign_code else {}
        sent = {**(dict.fromkeys(INSIDE_THE_MODEL) | inside if late else {}), **kept, **new}
        if not sent:
            return {}, None
        try:
            # in one go, so that what two of them share is one object in the workers as well
            return sent, self._departure.pack(sent, "transformer_options")
        except CannotTravel:
            self._refuse(options, new, refused)
            raise

    def _refuse(self, options: dict[str, Any], new: dict[str, Any], refused: Callable[[str, CannotTravel], SPError]) -> None:
        """Say which of the patches and objects it is."""
        for place, function in patches_in(options):
            try:
                self._departure.pack(function, "it")
            except CannotTravel as why:
                raise refused(f"{place}: {name_of(function)}", why) from None
        for key, value in new.items():
            try:
                self._departure.pack(value, "it")
            except CannotTravel as why:
                raise SPError(
                    f"{self._known.described(key, value)} was added to the model after SP Model Patch, and it cannot be sent to the "
                    f"workers, where the model computes: {why}. Place SP Model Patch after the node that adds it, or remove that node"
                ) from None


def _while_sampling(place: str, why: CannotTravel) -> SPError:
    return SPError(
        f"A patch inside the model ({place}) is added while sampling, and it cannot be sent to the workers: {why}. "
        "Remove the node that adds it (a guidance that patches blocks or attention), or SP Model Patch"
    )


def _containers(options: dict[str, Any]) -> dict[str, Any]:
    """Plain data that can be added to."""
    keys = [key for key in options if key not in AROUND_THE_MODEL and key not in INSIDE_THE_MODEL]
    return {key: options[key] for key in keys if type(options[key]) in (list, dict, set) and unsendable(options[key]) is None}


def _inside(options: dict[str, Any]) -> dict[str, Any]:
    """The options that only the model's own code reads, without empty ones."""
    found = {key: options[key] for key in INSIDE_THE_MODEL if options.get(key)}
    for key in ("patches", "patches_replace"):
        if key in found:
            found[key] = {kind: functions for kind, functions in found[key].items() if functions}
    return {key: value for key, value in found.items() if value}
