"""A VAE's module as ComfyUI's process holds it: the VAE's class, whose decode and encode run in the workers.

The local module, which is never moved to a device, answers attribute reads: nodes take statistics of the latent from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import SPError
from ..options import name_of
from .proxy_module import RemoteMixin


class VaeChannel(Protocol):
    """Where a remote VAE's calls go."""

    def compute(self, method: str, x: Tensor, kwargs: dict[str, Any], output: Tensor | None = None) -> Tensor: ...


class RemoteVaeMixin(RemoteMixin):
    """Overrides of a remote VAE; mixed in front of the VAE's class."""

    def __setattr__(self, name: str, value: Any) -> None:
        if self._sp_is_fixed(name):
            raise SPError(
                f"The VAE's {name} was replaced ({name_of(value)}) behind SP VAE Patch, which has no effect on the workers. "
                "Place the node that replaces it before SP VAE Patch, or remove SP VAE Patch"
            )
        self.__dict__[name] = value

    # ComfyUI moves and unpatches the modules that it finds below a patcher's model, and the local module is shared with branches
    # without SP VAE Patch. Who asks for a part by its name, or for parameters, gets the local module's.

    def named_modules(self, memo: set[Any] | None = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:
        if memo is None or self not in memo:
            yield prefix, self


def make_remote_vae(local: torch.nn.Module, calls: tuple[str, ...], channel: VaeChannel) -> torch.nn.Module:
    """A stand-in for ``local``, a VAE's module, that computes through ``channel``.

    Args:
        calls: what runs in the workers: methods of ``local``, or modules of it.
    """
    parts = {name: part for name in calls if isinstance(part := getattr(local, name), torch.nn.Module)}
    remote = _stand_in(local, {name: _computed(channel, name) for name in calls if name not in parts})
    remote.__dict__ |= {name: _stand_in(part, {"forward": _computed(channel, name)}) for name, part in parts.items()}
    return remote


def _stand_in(local: torch.nn.Module, members: dict[str, Any]) -> torch.nn.Module:
    kind = type(local)
    # packs tell a VAE by the name of its class
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    remote: Any = object.__new__(type(kind.__name__, (RemoteVaeMixin, kind), {**members, **named}))
    torch.nn.Module.__init__(remote)
    remote.__dict__ |= {"_sp_local": local, "_sp_backup": {}, "training": False}
    return remote  # type: ignore[no-any-return]


def _computed(channel: VaeChannel, call: str) -> Callable[..., Tensor]:
    def compute(self: Any, x: Tensor, output_buffer: Tensor | None = None, **kwargs: Any) -> Tensor:
        return channel.compute(call, x, kwargs, output_buffer)

    return compute
