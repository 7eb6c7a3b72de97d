"""Two MODELs are told apart by weights, patches and code, and not by where their weights lie or by a last bit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sp_core.host.model_digest import as_plain, difference, from_plain, model_digest


class Adapter:
    """Stands for the adapter of a LoRA."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weights = (weight, None)


def patcher() -> Any:
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.diffusion_model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 4), *(torch.nn.Linear(4, 4) for _ in range(3)))
    patch = (0.8, Adapter(torch.randn(8, 6)), 1.0, None, None)
    return SimpleNamespace(
        model=model,
        patches={"diffusion_model.0.weight": [patch]},
        backup={},
        object_patches={"model_sampling": object()},
        object_patches_backup={},
        weight_wrapper_patches={},
        injections={},
        model_options={"transformer_options": {}},
    )


def seen_from_afar(digest: Any) -> Any:
    return from_plain(json.loads(json.dumps(as_plain(digest))))


def other(change: Callable[[Any], None]) -> str | None:
    changed = patcher()
    with torch.no_grad():
        change(changed)
    return difference(model_digest(patcher(), {}), seen_from_afar(model_digest(changed, {})))


def set_patch(of: Any, strength: float, weight: Callable[[torch.Tensor], torch.Tensor] = lambda weight: weight) -> None:
    adapter = of.patches["diffusion_model.0.weight"][0][1]
    of.patches["diffusion_model.0.weight"] = [(strength, Adapter(weight(adapter.weights[0])), 1.0, None, None)]


def patched_in_place(of: Any) -> None:
    weight = of.model.diffusion_model[0].weight
    of.backup["diffusion_model.0.weight"] = SimpleNamespace(weight=weight.detach().clone())
    weight += 1.0


def lora_and_compiled_by_another_branch(of: Any, inside: str) -> None:
    """The compiled block has the weights of the block itself."""
    for number, block in enumerate(list(of.model.diffusion_model)):
        of.object_patches_backup[f"diffusion_model.{number}"] = block
        of.model.diffusion_model[number] = torch.nn.ModuleDict({"_orig_mod": block})
        of.backup[f"diffusion_model.{number}.{inside}weight"] = SimpleNamespace(weight=block.weight.detach().clone())
        block.weight += 1.0


def swapped_out(of: Any) -> None:
    for weight in of.model.parameters():
        weight.zero_()


def merged(of: Any) -> None:
    """As the file of a model with a LoRA in it: some matrices are others, and nothing else."""
    for number in (1, 2):
        of.model.diffusion_model[number].weight *= 1 + 1e-6


def replaced_by_another_branch(of: Any) -> None:
    of.object_patches_backup["diffusion_model.1"] = of.model.diffusion_model[1]
    of.model.diffusion_model[1] = torch.nn.Linear(2, 2)


def replaced_by_another_file(of: Any) -> None:
    for weight in of.model.parameters():
        weight *= 1 + 1e-6


def around(of: Any) -> None:
    of.object_patches["model_sampling"] = 7
    of.model_options["sampler_post_cfg_function"] = [len]


@pytest.mark.parametrize(
    "change",
    [
        lambda of: None,
        patched_in_place,
        replaced_by_another_branch,
        swapped_out,
        lambda of: lora_and_compiled_by_another_branch(of, ""),
        lambda of: lora_and_compiled_by_another_branch(of, "_orig_mod."),
        around,
        lambda of: set_patch(of, 0.8 * (1 + 1e-6), lambda weight: weight * (1 + 1e-3)),
        lambda of: setattr(of, "model", of.model.to("meta")),
        lambda of: of.model.diffusion_model[1].weight.mul_(1.5),
    ],
    ids=[
        "nothing",
        "weights patched in place",
        "another branch's module",
        "another branch's swapped blocks",
        "another branch's LoRA, then compiled blocks",
        "another branch's compiled blocks, then a LoRA",
        "around the model",
        "last bits",
        "weights elsewhere",
        "a weight that no file has",
    ],
)
def test_the_same_model(change: Callable[[Any], None]) -> None:
    assert other(change) is None


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda of: of.model.diffusion_model.half(), "the weights are others"),
        (replaced_by_another_file, "the weights have other values"),
        (merged, "the weights have other values"),
        (lambda of: of.model.diffusion_model.append(torch.nn.Linear(2, 2)), "the weights are others"),
        (lambda of: set_patch(of, 0.5), "the weight patches have other values"),
        (lambda of: set_patch(of, 0.8, lambda weight: -weight), "the weight patches have other values"),
        (lambda of: of.patches.clear(), "the weight patches are others"),
        (lambda of: of.patches["diffusion_model.0.weight"].append((1.0, None, 1.0, None, None)), "the weight patches are others"),
        (lambda of: of.object_patches.update({"diffusion_model.0.forward": len}), "functions and modules"),
        (lambda of: of.model_options["transformer_options"].update(patches={"double_block": [copy.copy]}), "functions and modules"),
    ],
)
def test_another_model(change: Callable[[Any], None], what: str) -> None:
    assert what in (other(change) or "nothing")


class Packed(torch.Tensor):
    """A weight of a file format of its own, which cannot be read at a place."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__getitem__:
            raise AssertionError("this unpacks the whole weight")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("kind", ["float8", "packed", "scalar", "empty", "quantised"])
def test_every_kind_of_weight_can_be_told_apart(kind: str) -> None:
    def weight(value: float) -> Any:
        full = torch.full((6, 4), value)
        if kind == "quantised":
            full.__dict__["_qdata"] = torch.full((3, 4), int(value * 8), dtype=torch.uint8)
        kinds = {"float8": full.to(torch.float8_e4m3fn), "packed": full.as_subclass(Packed), "scalar": full[0, 0], "empty": full[:0]}
        return kinds.get(kind, full)

    def digest(value: float) -> Any:
        of = patcher()
        of.patches = {"diffusion_model.0.weight": [(1.0, weight(value), 1.0, None, None)]}
        return model_digest(of, {})

    assert difference(digest(1.0), digest(1.0)) is None
    assert (difference(digest(1.0), digest(2.0)) is None) == (kind == "empty")
