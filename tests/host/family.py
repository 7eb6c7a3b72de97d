"""A family: its class, tiny, and its forwards."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from sp_core.demo.checkpoints import random_weights


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not there
        return False


@dataclass(frozen=True)
class Family:
    """A class, its arguments, and forwards by name: each a function that makes the keyword arguments anew.

    Or it makes, one by one, those of some forwards that follow one another.
    """

    module: str
    class_name: str
    arguments: dict[str, Any]
    forwards: dict[str, Callable[[], Any]]
    #: arguments that are no tensors of the checkpoint: buffers with meaning
    buffers: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    #: around the forward over ranks only: a patch that must not change the result
    patched: Callable[[], AbstractContextManager[None]] = nullcontext
    #: classes of the module that it makes with other arguments than here: what it takes for granted would be large
    smaller: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: (forward, ranks) that a plain run tries; None: all forwards on all counts
    plain: tuple[tuple[str, int], ...] | None = None

    @property
    def width(self) -> int:
        """Width of the attention: all heads."""
        if "attention_head_dim" in self.arguments:
            return self.arguments["num_attention_heads"] * self.arguments["attention_head_dim"]
        if "head_dim" in self.arguments:
            return self.arguments.get("num_heads", self.arguments.get("heads")) * self.arguments["head_dim"]
        named = ("dim", "hidden_size", "model_dim", "model_channels", "hidden_size_x", "features")
        # SD3: so many heads as blocks, of 64 each
        return next((self.arguments[name] for name in named if name in self.arguments), 64 * self.arguments.get("depth", 0))

    def known_to_the_host(self) -> bool:
        return _exists(self.module) and hasattr(importlib.import_module(self.module), self.class_name)

    def build(self) -> Any:
        import comfy.ops

        module = importlib.import_module(self.module)
        small = {name: functools.partial(getattr(module, name), **arguments) for name, arguments in self.smaller.items()}
        with patch.multiple(module, **small) if small else nullcontext():
            model_class = getattr(module, self.class_name)
            model = model_class(**self.arguments, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init)
        weights = random_weights(model, 11)
        weights |= {name: make() for name, make in self.buffers.items()}
        model.load_state_dict(weights, assign=True)
        return model.eval().requires_grad_(False)
