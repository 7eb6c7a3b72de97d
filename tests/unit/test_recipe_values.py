"""Where a recipe ends: wires that carry data are cut, and a node that left its MODEL alone is not run again for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sp_core.host.ui.computed_values import AboutModels, ComputedValues, digest
from sp_core.host.ui.recipe import Recipe, trace


class Model:
    """Something that cannot be sent. Models of one ``kind`` are the same to the workers."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


def same(a: Any, b: Any) -> bool:
    return isinstance(a, Model) and isinstance(b, Model) and a.kind == b.kind


def same_but_for_weights(a: Any, b: Any) -> bool:
    return same(a, b) or (isinstance(a, Model) and isinstance(b, Model) and {a.kind, b.kind} == {"bare", "lora"})


TYPES: dict[str, tuple[str, ...]] = {"CLIPLoader": ("CLIP",), "LoraLoader": ("MODEL", "CLIP")}
GRAPH = {
    "load": {"class_type": "UNETLoader", "inputs": {"unet_name": "a.safetensors"}},
    "draw": {"class_type": "Draw", "inputs": {}},
    "vae": {"class_type": "VAELoader", "inputs": {"vae_name": "v.safetensors"}},
    "sample": {"class_type": "KSampler", "inputs": {"model": ["load", 0], "seed": 4}},
    "lora": {"class_type": "LoraLoaderModelOnly", "inputs": {"model": ["load", 0], "strength_model": ["draw", 0]}},
    "shift": {"class_type": "ModelSamplingLTXV", "inputs": {"model": ["lora", 0], "latent": ["sample", 0]}},
    "clip": {"class_type": "CLIPLoader", "inputs": {"clip_name": "c.safetensors"}},
    "both": {"class_type": "LoraLoader", "inputs": {"model": ["load", 0], "clip": ["clip", 0], "strength_clip": 0.5}},
    "sound": {"class_type": "LTXVReferenceAudio", "inputs": {"model": ["shift", 0], "vae": ["vae", 0], "scale": 2.0}},
}
OUTPUTS: dict[str, list[list[Any]]] = {
    "load": [[Model("bare")]],
    "draw": [[0.7]],
    "vae": [[object()]],
    "sample": [[{"samples": torch.ones(1, 4, 2, 2)}]],
    "lora": [[Model("lora")]],
    "shift": [[Model("shifted")]],
    "clip": [[object()]],
    "both": [[Model("lora")], [object()]],
    "sound": [[Model("shifted")]],
}


def made(node: str, **changed: list[list[Any]]) -> Recipe:
    about = AboutModels(same, same_but_for_weights, lambda model, weights: {})
    computed = ComputedValues({**OUTPUTS, **changed}.get, about)
    return trace(GRAPH.__getitem__, [node, 0], computed, None, lambda class_type: TYPES.get(class_type, ()))


def classes(recipe: Recipe) -> list[str]:
    return sorted(node["class_type"] for node in recipe.graph.values())


def test_data_crosses_and_models_are_replayed() -> None:
    recipe = made("shift")
    assert classes(recipe) == ["LoraLoaderModelOnly", "ModelSamplingLTXV", "SPValue", "SPValue", "UNETLoader"]
    strength = recipe.graph[recipe.graph[recipe.node]["inputs"]["model"][0]]["inputs"]["strength_model"]
    assert strength[1] == 0 and recipe.values[recipe.graph[strength[0]]["inputs"]["digest"]] == [0.7]
    assert recipe.origin[strength[0]] == "the value of Draw (node draw)"


def test_what_is_not_there_is_computed_by_the_workers() -> None:
    recipe = made("shift", sample=[])
    assert "KSampler" in classes(recipe)


def test_another_value_is_another_model() -> None:
    assert made("lora").key == made("lora", draw=[[0.7]]).key
    assert made("lora").key != made("lora", draw=[[0.8]]).key
    assert made("lora").key != made("lora", draw=[[0.7, 0.8]]).key


def test_a_node_that_left_its_model_alone_needs_no_vae() -> None:
    assert made("sound").key == made("shift").key


@pytest.mark.parametrize(
    "sound",
    [[[Model("changed")]], [[Model("shifted"), Model("shifted")]], [[Model("shifted"), Model("changed")]]],
    ids=["changed", "a list", "one of a list"],
)
def test_a_node_that_did_not_is_replayed(sound: list[list[Any]]) -> None:
    assert {"LTXVReferenceAudio", "VAELoader"} <= set(classes(made("sound", sound=sound)))


def test_a_node_that_needs_no_object_is_replayed_for_what_it_does_besides() -> None:
    assert "ModelSamplingLTXV" in classes(made("shift", shift=[[Model("lora")]]))


def test_a_clip_that_is_only_passed_on_is_left_out() -> None:
    recipe = made("both")
    assert classes(recipe) == ["LoraLoader", "UNETLoader"]
    assert recipe.graph[recipe.node]["inputs"]["clip"] is None
    assert recipe.fallback is not None and classes(recipe.fallback) == ["CLIPLoader", "LoraLoader", "UNETLoader"]
    assert recipe.fallback.fallback is None and recipe.fallback.key != recipe.key


def test_a_clip_stays_where_the_node_changed_more_than_weights() -> None:
    recipe = made("both", both=[[Model("guided")], [object()]])
    assert "CLIPLoader" in classes(recipe) and recipe.fallback is None


SENDABLE: list[list[Any]] = [
    [1],
    [1.0],
    ["1"],
    [None],
    [[1]],
    [{"a": 1}],
    [1, 1],
    [torch.ones(4)],
    [torch.ones(2, 2)],
    [torch.ones(4).bfloat16()],
    [torch.zeros(4)],
    [torch.ones(())],
    [{"samples": torch.ones(0)}],
]


def test_digests_tell_values_apart_and_not_where_they_lie() -> None:
    digests = [digest(members) for members in SENDABLE]
    assert len(set(digests)) == len(SENDABLE)
    assert digest([torch.arange(12).reshape(3, 4).t()]) == digest([torch.arange(12).reshape(3, 4).t().contiguous()])
