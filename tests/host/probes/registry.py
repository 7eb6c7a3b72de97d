"""What all probes have in common: how they are found, what they say, and the smallest graphs and models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: by name, in the order in which they run
PROBES: dict[str, Callable[[], None]] = {}


def probe(function: Callable[[], None]) -> Callable[[], None]:
    PROBES[function.__name__] = function
    return function


def expect(truth: Any, changed: str) -> None:
    if not truth:
        raise AssertionError(changed)


class Server:
    """What the worker gives the executor."""

    client_id = None
    last_node_id = None
    last_prompt_id = None

    def send_sync(self, event: str, data: Any, sid: Any = None) -> None:
        pass


IMAGE = {"a": {"class_type": "EmptyImage", "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0}}}
INVERTED = {**IMAGE, "b": {"class_type": "ImageInvert", "inputs": {"image": ["a", 0]}}}


def patcher() -> tuple[Any, list[str]]:
    """A ModelPatcher of 1 MB, and what ComfyUI's memory management calls of it."""
    import comfy.model_management as management
    import comfy.model_patcher
    import torch

    calls: list[str] = []

    class Recording(comfy.model_patcher.ModelPatcher):
        resident = 0

        def loaded_size(self) -> int:
            return self.resident

        def partially_load(self, device_to: Any, extra_memory: Any = 0, force_patch_weights: bool = False) -> int:
            calls.append("partially_load")
            self.patch_model(device_to, load_weights=False)
            self.model.device = device_to
            self.resident = 1 << 20
            return self.resident

        def partially_unload(self, device_to: Any, memory_to_free: Any = 0, force_patch_weights: bool = False) -> int:
            calls.append("partially_unload")
            return int(memory_to_free)

        def detach(self, unpatch_all: bool = True) -> Any:
            calls.append("detach")
            self.resident = 0
            return super().detach(unpatch_all)

    device = management.get_torch_device()
    return Recording(torch.nn.Linear(4, 4), load_device=device, offload_device=device, size=1 << 20), calls
