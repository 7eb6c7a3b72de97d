"""The replayed graph: which nodes it has, and when two of them are the same model."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from sp_core.errors import SPError
from sp_core.host.ui.computed_values import AboutModels, ComputedValues
from sp_core.host.ui.recipe import Recipe, is_link, is_object, names_of_loaders, samples, trace, union

LOADER = {"class_type": "UNETLoader", "inputs": {"unet_name": "a.safetensors", "weight_dtype": "default"}}


NOTHING = ComputedValues(lambda node_id: None, AboutModels(lambda a, b: False, lambda a, b: False, lambda model, weights: {}))


def lora(source: list[Any], strength: float) -> dict[str, Any]:
    return {"class_type": "LoraLoaderModelOnly", "inputs": {"model": source, "lora_name": "l.safetensors", "strength_model": strength}}


def made(graph: dict[str, Any], link: Any) -> Recipe:
    return trace(graph.__getitem__, link, NOTHING)


def test_only_the_ancestors() -> None:
    graph = {"1": LOADER, "2": lora(["1", 0], 1.0), "3": {"class_type": "KSampler", "inputs": {"model": ["2", 0], "seed": 4}}}
    recipe = made(graph, ["2", 0])
    assert sorted(node["class_type"] for node in recipe.graph.values()) == ["LoraLoaderModelOnly", "UNETLoader"]
    assert recipe.graph[recipe.node]["inputs"]["model"][0] in recipe.graph
    assert sorted(recipe.origin.values()) == ["LoraLoaderModelOnly (node 2)", "UNETLoader (node 1)"]
    json.dumps(recipe.graph)


def test_a_seed_behind_it_changes_nothing() -> None:
    one = {"1": LOADER, "9": {"class_type": "KSampler", "inputs": {"model": ["1", 0], "seed": 4}}}
    other = {"1": LOADER, "9": {"class_type": "KSampler", "inputs": {"model": ["1", 0], "seed": 5}}}
    assert made(one, ["1", 0]) == made(other, ["1", 0])


def test_names_of_nodes_do_not_matter() -> None:
    one = made({"1": LOADER, "2": lora(["1", 0], 0.5)}, ["2", 0])
    other = made({"sub:7": LOADER, "x": lora(["sub:7", 0], 0.5)}, ["x", 0])
    assert one.key == other.key
    assert one.graph == other.graph


def test_order_of_inputs_does_not_matter() -> None:
    turned = {"class_type": "UNETLoader", "inputs": dict(reversed(LOADER["inputs"].items()))}  # type: ignore[attr-defined]
    assert made({"1": LOADER}, ["1", 0]).key == made({"1": turned}, ["1", 0]).key


def test_a_changed_strength_renames_that_node_and_those_behind_it() -> None:
    def chain(strength: float) -> Recipe:
        return made({"1": LOADER, "2": lora(["1", 0], strength), "3": lora(["2", 0], 1.0)}, ["3", 0])

    weak, strong = chain(0.5), chain(0.6)
    assert weak.key != strong.key
    shared = weak.graph.keys() & strong.graph.keys()
    assert [weak.graph[name]["class_type"] for name in shared] == ["UNETLoader"]


def test_outputs_of_one_node_are_different_models() -> None:
    graph = {"1": {"class_type": "CheckpointPair", "inputs": {}}}
    assert made(graph, ["1", 0]).key != made(graph, ["1", 1]).key


def test_members_of_a_list_are_different_models() -> None:
    keys = {trace({"1": LOADER}.__getitem__, ["1", 0], NOTHING, index).key for index in (None, 0, 1)}
    assert len(keys) == 3


def test_two_loaders_of_one_file_are_one_node() -> None:
    graph = {"1": LOADER, "2": dict(LOADER), "3": {"class_type": "ModelMergeSimple", "inputs": {"model1": ["1", 0], "model2": ["2", 0]}}}
    recipe = made(graph, ["3", 0])
    assert len(recipe.graph) == 2
    inputs = recipe.graph[recipe.node]["inputs"]
    assert inputs["model1"] == inputs["model2"]


def test_union_shares_what_is_equal() -> None:
    weak = made({"1": LOADER, "2": lora(["1", 0], 0.5)}, ["2", 0])
    strong = made({"1": LOADER, "2": lora(["1", 0], 0.6)}, ["2", 0])
    assert len(union([weak, strong])) == 3
    assert union([]) == {}


@pytest.mark.parametrize("value", [["1", 0], ["sub:1", 2], ["1", 1.0]])
def test_links(value: Any) -> None:
    assert is_link(value)


@pytest.mark.parametrize("value", ["1", None, [], ["1"], [1, 0], ["1", "0"], ["1", 0, 2], ("1", 0), {"1": 0}])
def test_values_that_are_no_links(value: Any) -> None:
    assert not is_link(value)


def test_a_model_that_came_over_no_wire() -> None:
    with pytest.raises(SPError, match="has to be a wire"):
        made({}, None)


@pytest.mark.parametrize(
    ("class_type", "inputs", "answer"),
    [
        ("KSampler", ["model", "seed", "sampler_name", "latent_image"], True),
        ("SamplerCustomAdvanced", ["guider", "noise", "sampler", "sigmas", "latent_image"], True),
        ("SomePackSampler", ["pipe", "sampler_name", "latent"], True),
        ("SPModelPatch", ["model", "devices"], True),
        ("SPSampler", ["model"], True),
        ("KSamplerSelect", ["sampler_name"], False),
        ("ModelSamplingLTXV", ["model", "max_shift", "latent"], False),
        ("BasicScheduler", ["model", "scheduler", "steps"], False),
        ("UNETLoader", ["unet_name"], False),
    ],
)
def test_what_samples(class_type: str, inputs: list[str], answer: bool) -> None:
    assert samples(class_type, inputs) is answer


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (1.0, False),
        (["a", {"b": None}], False),
        (["1", 0], False),
        (object(), True),
        ({"deep": [object()]}, True),
        ([torch.zeros(2)], True),
    ],
    ids=str,
)
def test_what_no_prompt_can_hold(value: Any, answer: bool) -> None:
    assert is_object(value) is answer


def test_an_object_in_the_place_of_a_wire_is_refused_by_name() -> None:
    with pytest.raises(SPError, match=r"^LoraLoaderModelOnly \(node 7.0.3\) got its input 'model' as an object and not over a wire"):
        made({"7.0.3": lora(object(), 1.0)}, ["7.0.3", 0])  # type: ignore[arg-type]


def test_a_model_behind_a_sampler_is_refused_by_name() -> None:
    inputs = {"model": ["1", 0], "sampler_name": "euler", "latent_image": None}
    with pytest.raises(SPError, match=r"what KSampler \(node 5\) gives"):
        made({"1": LOADER, "5": {"class_type": "KSampler", "inputs": inputs}, "6": lora(["5", 1], 1.0)}, ["6", 0])


def test_loaders_have_the_names_that_recipes_give_them() -> None:
    nodes = {
        "1": {"class_type": "Loader", "inputs": {"name": "a", "dtype": "default"}},
        "2": {"class_type": "Lora", "inputs": {"model": ["1", 0], "strength": 1.0}},
        "3": {"class_type": "Empty"},
    }
    names = names_of_loaders(nodes.values())
    loader, lora = (trace(nodes.__getitem__, [node, 0], NOTHING) for node in "12")
    assert len(names) == 2 and set(lora.graph) & names == {loader.node}


def test_a_worker_has_the_vae_of_its_graph_to_itself() -> None:
    """A MODEL that a VAE helps to make: the recipe takes the loader's VAE, as a worker must not start workers."""
    graph = {
        "1": LOADER,
        "2": {"class_type": "VAELoader", "inputs": {"vae_name": "v.safetensors"}},
        "3": {"class_type": "SPVAEPatch", "inputs": {"vae": ["2", 0], "devices": "cpu:2"}},
        "4": {"class_type": "ModelAndVAE", "inputs": {"model": ["1", 0], "vae": ["3", 0]}},
    }
    recipe = made(graph, ["4", 0])
    assert sorted(node["class_type"] for node in recipe.graph.values()) == ["ModelAndVAE", "UNETLoader", "VAELoader"]
    assert recipe == made({**graph, "4": {"class_type": "ModelAndVAE", "inputs": {"model": ["1", 0], "vae": ["2", 0]}}}, ["4", 0])
