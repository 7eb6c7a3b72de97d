"""What workers hold on further devices, as ComfyUI's memory management counts it.

ComfyUI's process can use more devices than the one it samples on: a user puts a text encoder or a VAE on another GPU. A
worker computes there as well, so each has to make room for the other.
"""

from __future__ import annotations

from typing import Any

import comfy.model_patcher
import torch

from .. import comfy_api
from .remote_model import RemoteModel


class WeightsOfAWorker(torch.nn.Module):
    """Stands for a model that a worker holds. ComfyUI's log names it, and one share is told from another by it."""


class DeviceShare(comfy.model_patcher.ModelPatcher):
    """A patched MODEL's weights on one further device. ComfyUI loads it together with the MODEL, and evicts it alone."""

    def __init__(self, sp: RemoteModel, load_device: torch.device, offload_device: torch.device) -> None:
        super().__init__(WeightsOfAWorker(), load_device, offload_device, size=sp.device_bytes)
        self.sp = sp

    def loaded_size(self) -> int:
        return min(self.model_size(), self.sp.bytes_on_devices(self.load_device))

    def partially_load(self, device_to: Any, extra_memory: Any = 0, force_patch_weights: bool = False) -> int:
        """The worker brings the weights when its MODEL is sampled; ComfyUI has made room for them."""
        self.model.device = device_to
        return self.loaded_size()

    def partially_unload(self, device_to: Any, memory_to_free: Any = 0, force_patch_weights: bool = False) -> int:
        """ComfyUI wants memory: all of the worker's weights leave this device, and stay on the others. Returns their size in bytes."""
        if self.sp.keep_loaded == "always":
            return int(memory_to_free)  # see the MODEL's own
        freed = self.loaded_size()
        self.sp.release(self.load_device)
        return freed

    def detach(self, unpatch_all: bool = True) -> Any:
        if unpatch_all and self.loaded_size():
            self.sp.release(self.load_device)
        self.model.device = self.offload_device
        return self.model


class DeviceShares:
    """The shares of one patched MODEL, for all of its clones.

    Args:
        own: the device on which ComfyUI would compute the model. What a worker holds there the MODEL counts itself.
    """

    def __init__(self, sp: RemoteModel, own: torch.device, offload_device: torch.device) -> None:
        self._shares = [DeviceShare(sp, device, offload_device) for device in sp.further_devices(own)]

    def counted(self) -> list[DeviceShare]:
        """Those on devices that this process uses. To ask for the memory of another would take some hundred MB of it."""
        return [share for share in self._shares if comfy_api.uses_device(share.load_device)]
