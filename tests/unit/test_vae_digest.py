"""Two VAEs are told apart by weights, by what their modules' code reads, and by ComfyUI's own settings; and by nothing else."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sp_core.errors import SPError
from sp_core.host.ui.recipe import Recipe
from sp_core.host.ui.same_models import check_same_vae
from sp_core.host.vae_digest import difference, vae_digest
from sp_core.host.weight_samples import sampled_places


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 300, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.levels, self.calls, self.cache = [1, 2], 0, {}

    def decode(self, x: Any) -> Any:
        self.calls += 1
        self.cache[7] = (None, True)
        return x * len(self.levels)


def vae(scale: int = 4) -> Any:
    torch.manual_seed(0)
    module = Module()
    return SimpleNamespace(
        first_stage_model=module,
        patcher=SimpleNamespace(model=module, backup={}),
        device=torch.device("cpu"),
        upscale_ratio=(lambda frames: max(0, frames * 4 - 3), 8, 8),
        memory_used_decode=lambda shape, dtype: scale * shape[0],
        process_output=lambda image: image in {"a", "b", "c"},
        latent_channels=16,
        vae_dtype=torch.float32,
    )


def other(change: Any) -> str | None:
    changed = vae()
    with torch.no_grad():
        change(changed)
    return difference(vae_digest(vae()), json.loads(json.dumps(vae_digest(changed))))


def patched_by_another_branch(of: Any) -> None:
    weight = of.first_stage_model.conv.weight
    of.patcher.backup["conv.weight"] = SimpleNamespace(weight=weight.clone())
    weight += 1


@pytest.mark.parametrize(
    "change",
    [
        lambda of: None,
        lambda of: of.first_stage_model.decode(1),
        lambda of: setattr(of, "device", torch.device("meta")),
        lambda of: setattr(of.first_stage_model.conv, "weight_function", [abs]),
        lambda of: of.first_stage_model.to("meta"),
        patched_by_another_branch,
    ],
    ids=["nothing", "what it keeps", "its device", "what manages memory", "weights elsewhere", "patched by another branch"],
)
def test_the_same_vae(change: Any) -> None:
    assert other(change) is None


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda of: of.first_stage_model.half(), "its weight conv.bias is of another kind"),
        (lambda of: of.first_stage_model.conv.weight[17].mul_(1.001), "its weight conv.weight has other values"),
        (lambda of: of.first_stage_model.mean.add_(1), "its weight mean has other values"),
        (lambda of: setattr(of.first_stage_model.conv, "padding_mode", "circular"), "its conv.padding_mode is another one"),
        (lambda of: of.first_stage_model.levels.append(3), "its levels is another one"),
        (lambda of: setattr(of.first_stage_model, "conv", nn.Identity()), "its weight conv.bias is of another kind"),
        (lambda of: setattr(of, "latent_channels", 4), "its latent_channels is another one"),
        (lambda of: setattr(of, "upscale_ratio", (lambda frames: max(0, frames * 8 - 7), 8, 8)), "its upscale_ratio is another one"),
        (lambda of: setattr(of, "memory_used_decode", vae(5).memory_used_decode), "its memory_used_decode is another one"),
    ],
)
def test_another_vae(change: Any, what: str) -> None:
    assert other(change) == what


@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 2**24 + 4, 2**31 + 3])
def test_samples_reach_from_the_first_value_to_the_last(count: int) -> None:
    places = sampled_places(count).tolist()
    assert (places[0], places[-1]) == (0, count - 1) and len(set(places)) == min(count, 256)


RECIPE = Recipe({}, "Load-1", 0, {"Load-1": "VAELoader (node 3)"})


def test_the_ranks_that_have_another_one_are_named_and_what_it_is() -> None:
    wrong = vae()
    setattr(wrong.first_stage_model.conv, "padding_mode", "circular")  # noqa: B010
    ours, theirs = vae_digest(vae()), vae_digest(wrong)
    check_same_vae(RECIPE, ours, [ours, ours])
    check_same_vae(RECIPE, None, [theirs, theirs])
    with pytest.raises(
        SPError, match=r"VAELoader \(node 3\) made another VAE in the worker of rank 1 .*: its conv.padding_mode is another one"
    ):
        check_same_vae(RECIPE, ours, [ours, theirs])
    with pytest.raises(SPError, match="in the worker of ranks 0, 1 than elsewhere"):
        check_same_vae(RECIPE, ours, [theirs, theirs])
    with pytest.raises(SPError, match="in the worker of rank 1 than elsewhere"):
        check_same_vae(RECIPE, None, [ours, theirs])
