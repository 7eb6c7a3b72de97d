"""One shared-out VAE, as ComfyUI's process sees its computing: decodes and encodes in the workers, and puts the bands together."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...pool.devices import WorkerDevice
from ...pool.errors import Cancelled, WorkerFailed
from ...vae import DecodePlan
from .. import comfy_api
from ..vae_digest import Digest
from .progress import Watcher
from .recipe import Recipe
from .remote_model import RemoteModel, WorkerSession


@dataclass(frozen=True)
class Results:
    """Where ComfyUI wants decoded pixels and encoded latents."""

    device: torch.device
    dtype: torch.dtype


class RemoteVae(RemoteModel):
    """Computes for a VAE whose code ComfyUI's process keeps. The session holds it as it holds a diffusion model.

    Args:
        results: where its results belong.
        digest: what the VAE is in ComfyUI's process; None where a worker's may be another one.
    """

    is_vae = True

    def __init__(
        self,
        session: WorkerSession,
        recipe: Recipe,
        devices: tuple[WorkerDevice, ...],
        plan: DecodePlan,
        weight_bytes: int,
        results: Results,
        digest: Digest | None = None,
    ) -> None:
        # the session and the status page ask a decode plan for what they ask of a sequence plan
        super().__init__(session, recipe, devices, plan, weight_bytes)  # type: ignore[arg-type]
        self.digest = digest
        self._results, self._title, self._decodes = results, plan.title, plan.decodes

    def compute(self, method: str, x: Tensor, kwargs: dict[str, Any], output: Tensor | None = None) -> Tensor:
        """Decode or encode (B, C, F, H, W), in ComfyUI's device and dtype for results.

        Args:
            method: one of the plan's calls.
            output: where the result goes, if somebody has made room for it.

        Raises:
            OutOfMemoryError: a device has too little memory; ComfyUI goes on with tiles.
            SPError: anything else went wrong in the workers.
        """
        pool = self._session.ensure(self)
        started, joined = time.perf_counter(), _Joined(self._results, output)
        body = {"key": self.recipe.key, "method": method, "x": x, "kwargs": kwargs, "dtype": self._results.dtype, "reset": pool.out_of_step}
        doing = f"{'decoding' if self._decodes(method) else 'encoding'} with the VAE of {self._title}"
        try:
            pool.call("vae", body, doing=doing, watch=Watcher(doing), volatile=("x",), each=joined.take)
        except Cancelled:
            comfy_api.raise_interrupt()
        except WorkerFailed as error:
            if error.kind == torch.OutOfMemoryError.__name__:
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        pool.out_of_step = False
        self.stats.count(joined.stats, time.perf_counter() - started, pool.last_call)
        self.stats.decision = f"{method}: {joined.ranks} of {pool.world_size} devices, each a band of the frame"
        assert joined.whole is not None
        return joined.whole


class _Joined:
    """The result while the ranks' bands arrive: each goes to its rows at once."""

    def __init__(self, results: Results, output: Tensor | None) -> None:
        self._results = results
        self.whole = output
        self.stats: dict[str, Any] = {}
        self.ranks = 0

    def take(self, rank: int, value: dict[str, Any] | None) -> None:
        if value is None:
            return
        rows, start = value["rows"], value["start"]
        if self.whole is None:
            shape = (*rows.shape[:-2], value["height"], rows.size(-1))
            self.whole = torch.empty(shape, dtype=self._results.dtype, device=self._results.device)
        if not self.ranks:
            self.stats, self.ranks = value["stats"], value["ranks"]
        self.whole[..., start : start + rows.size(-2), :].copy_(rows)
