"""Models without a plan over ranks: what is proven of their batch rows, and what the forwards give."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from distributed.longcat_ranks import enter_host
from torch import Tensor, nn

from sp_core.demo.run import relative_l2

#: (B, C, H, W)
SIZE = (4, 8, 8)


class Apart(nn.Module):
    """Each row by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Tensor, timesteps: Tensor, context: Any = None, control: Any = None, transformer_options: Any = None) -> Any:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * timesteps.view(-1, 1, 1, 1)
        return x if control is None else x + control["middle"].pop()


class Mixing(Apart):
    """Each row takes a little of all."""

    def forward(self, x: Tensor, timesteps: Tensor, **kwargs: Any) -> Any:
        return super().forward(x, timesteps) + 0.01 * x.mean(dim=0, keepdim=True)


class OfTheFirstTimestep(Apart):
    def forward(self, x: Tensor, timesteps: Tensor, **kwargs: Any) -> Any:
        return super().forward(x, timesteps[:1])


class OnlyWhole(Apart):
    """Cannot compute fewer rows than the first time."""

    def forward(self, x: Tensor, timesteps: Tensor, **kwargs: Any) -> Any:
        return super().forward(x, timesteps) + x.new_zeros(4, 1, 1, 1)


class Noisy(Apart):
    def forward(self, x: Tensor, timesteps: Tensor, **kwargs: Any) -> Any:
        return super().forward(x, timesteps) + torch.randn_like(x)


class Counting(Apart):
    """Keeps a number between forwards."""

    count = 0

    def forward(self, x: Tensor, timesteps: Tensor, **kwargs: Any) -> Any:
        self.count = self.count + 1
        return super().forward(x, timesteps) * self.count


class Filling(Apart):
    """Keeps what it saw in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, timesteps: Tensor, **kwargs: Any) -> Any:
        self.seen.append(x.mean())
        return super().forward(x, timesteps) + sum(self.seen)


class MakesATable(Apart):
    """Makes something in its first forward and keeps it."""

    table: Tensor | None = None

    def forward(self, x: Tensor, timesteps: Tensor, **kwargs: Any) -> Any:
        if self.table is None:
            self.table = torch.linspace(0, 1, 8)
        return super().forward(x, timesteps) + self.table


class Writing(Apart):
    """Writes into what it is given."""

    def forward(self, x: Tensor, timesteps: Tensor, **kwargs: Any) -> Any:
        return super().forward(x.mul_(0.5), timesteps, **kwargs)


class Normalising(Apart):
    """By the statistics of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor, timesteps: Tensor, **kwargs: Any) -> Any:
        return super().forward(self.norm(x), timesteps)


MODELS = (Apart, Mixing, OfTheFirstTimestep, OnlyWhole, Noisy, Counting, Filling, MakesATable, Writing, Normalising)
_UNET = {"image_size": 8, "in_channels": 4, "model_channels": 32, "out_channels": 4, "num_res_blocks": [1], "channel_mult": [1]}
_UNET |= {"transformer_depth": [1], "transformer_depth_middle": 1, "transformer_depth_output": [1, 1], "num_heads": 4}
_UNET |= {"use_spatial_transformer": True, "context_dim": 16, "legacy": False}
_VIDEO = {"use_temporal_resblock": True, "use_temporal_attention": True, "extra_ff_mix_layer": True, "use_spatial_context": True}
_VIDEO |= {"merge_strategy": "learned_with_images", "merge_factor": 0.0, "video_kernel_size": [3, 1, 1], "use_linear_in_transformer": True}


def build(name: str) -> nn.Module:
    own = next((kind for kind in MODELS if kind.__name__ == name), None)
    torch.manual_seed(3)
    if own is not None:
        return own().eval() if own is not Normalising else own().train()
    import comfy.ops

    from sp_core.demo.checkpoints import random_weights

    kind = importlib.import_module("comfy.ldm.modules.diffusionmodules.openaimodel").UNetModel
    arguments = {"UNet": _UNET, "video UNet": {**_UNET, **_VIDEO}}[name]
    model = kind(**arguments, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init)
    model.load_state_dict(random_weights(model, 1))
    return model.eval()


def serve(comfyui: str, rank: int, world_size: int) -> Callable[..., list[dict[str, Any]] | None]:
    """One rank: answers (model, conditionings, latents, forwards, timesteps of each) with what each forward gave and told."""
    import torch.distributed as dist

    enter_host(comfyui)
    from sp_core.attention.sequence_group import SequenceGroup
    from sp_core.comm import CollectiveTransport
    from sp_core.host.worker.forward_call import ForwardCall
    from sp_core.host.worker.residency import LoadedModel
    from sp_core.host.worker.row_forward import row_choice, run_rows
    from sp_core.parallel.groups import ParallelGroups
    from sp_core.planner.degrees import NOTHING_REQUESTED, Degrees
    from sp_core.plans import plan_without

    groups = {size: dist.new_group(list(range(size))) for size in range(1, world_size + 1)}

    @torch.inference_mode()
    def answer(name: str, conditionings: int, latents: int, steps: list[list[float]], dtype: str = "float32") -> Any:
        models = [build(name).to(getattr(torch, dtype)) for _ in range(2)]
        plan = plan_without(type(models[0]))
        patcher = SimpleNamespace(model=SimpleNamespace(diffusion_model=models[0]), model_options={}, object_patches={})
        loaded, told = LoadedModel(patcher, plan), []
        for number, timesteps in enumerate(steps):
            call = ForwardCall(plan.forward, *_inputs(name, number, conditionings, latents, timesteps, dtype), NOTHING_REQUESTED)
            choice = row_choice(loaded, call, world_size)
            size = len(choice.counts)
            if rank >= size:
                told.append(None)
                continue
            sequence = SequenceGroup(CollectiveTransport(groups[size]), CollectiveTransport(groups[size]))
            entered: list[int] = []
            result = run_rows(
                loaded,
                call,
                choice,
                ParallelGroups(Degrees(1, 1, size), sequence, None, groups[size]),
                lambda block, blocks, entered=entered: entered.append(block),
                lambda rows: None,
            )
            if result is None:
                told.append(None)
                continue
            named, extra, options = _inputs(name, number, conditionings, latents, timesteps, dtype)
            torch.manual_seed(number)
            stock = getattr(models[1], plan.forward)(**named, **extra, transformer_options=options)
            told.append({"told": result.told, "error": relative_l2(result.output, stock), "ranks": result.ranks, "entered": len(entered)})
        return told

    def guarded(*case: Any) -> Any:
        try:
            return answer(*case)
        except Exception:
            return [{"failure": traceback.format_exc()}]

    return guarded


def _inputs(name: str, number: int, conditionings: int, latents: int, timesteps: list[float], dtype: str) -> tuple[Any, Any, Any]:
    """(named, extra, options) of a forward, new tensors each time."""
    generator, rows, kind = torch.Generator().manual_seed(number), conditionings * latents, getattr(torch, dtype)
    x = torch.randn(rows, *SIZE, generator=generator).to(kind)
    named: dict[str, Any] = {"x": x, "timesteps": torch.tensor(timesteps * conditionings).to(kind)}
    extra: dict[str, Any] = {}
    control = torch.randn(rows, *SIZE, generator=generator).to(kind)
    if "UNet" in name:
        named["context"] = torch.randn(rows, 5, 16, generator=generator).to(kind)
        named["control"] = {"input": [torch.randn(rows, 32, 8, 8, generator=generator).to(kind), None], "middle": [], "output": []}
        extra = {"num_video_frames": latents, "image_only_indicator": torch.zeros(1)} if name == "video UNet" else {}
    else:
        named["control"] = {"middle": [control]}
    options = {"cond_or_uncond": list(range(conditionings)), "uuids": list("abcd"[:conditionings]), "sigmas": torch.ones(latents)}
    torch.manual_seed(number)
    return named, extra, options
