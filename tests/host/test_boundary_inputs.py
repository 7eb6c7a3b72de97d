"""SP Model Patch's inputs over wires, and hooks of a conditioning."""

from __future__ import annotations

from host.boundary import EVEN, LORA, alone, check_sentence, named, on_wan, plain, refusal
from host.graphs import Branch, Case, Link, compare, latent, load, read, sample, text

from sp_core.demo.comfy_server import ComfyServer, PromptFailed

DEVICES = "cpu:2"

# -- inputs over wires ----------------------------------------------------------------------
# ComfyUI runs the branch that it accepts, so what the refused one would have saved is missing: a KeyError


def devices_on_a_wire(value: str) -> Case:
    def case(branch: Branch) -> Link:
        model = load(branch, "tiny_wan_t2v")
        if branch.devices is not None:
            wire = branch.add("PrimitiveString", value=value)[0]
            branch.patched.append(branch.add("SPModelPatch", model=model, devices=wire)[0])
            model = branch.patched[-1]
        return on_wan(branch, model)

    return named("devices_on_a_wire", case)


def test_devices_come_over_a_wire(server: ComfyServer) -> None:
    compare(server, devices_on_a_wire("cpu:2"), DEVICES)


def test_devices_on_a_wire_that_do_not_exist(server: ComfyServer) -> None:
    assert "no device list" in refusal(server, devices_on_a_wire("gpu"))


def test_degrees_come_over_a_wire(server: ComfyServer) -> None:
    def case(branch: Branch) -> Link:
        if branch.devices is not None:
            branch.requested = {"ulysses": branch.add("PrimitiveInt", value=2)[0], "cfg_split": branch.add("PrimitiveInt", value=1)[0]}
        return plain(branch)

    assert "Ulysses 2" in compare(server, named("degrees_on_a_wire", case), DEVICES).decision


def test_devices_of_the_sampler_come_over_a_wire(server: ComfyServer) -> None:
    branch = alone(None)
    positive, negative = text(branch, 4096)
    settings = {"seed": 5, "steps": 2, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    inputs = {"model": load(branch, "tiny_wan_t2v"), "positive": positive, "negative": negative, "latent_image": latent(branch, EVEN)}
    node = branch.add("SPSampler", devices=branch.add("PrimitiveString", value=DEVICES)[0], **inputs, **settings)
    saved = branch.add("SPTestSaveLatent", samples=node[0], report=node[1], name="sampler-on-a-wire")
    assert "on 2 devices" in read(server.run(branch.graph.prompt)[saved.id]).report


# -- hooks of a conditioning ----------------------------------------------------------------


def hooked(branch: Branch) -> Link:
    lora = branch.add("CreateHookLoraModelOnly", lora_name=LORA["lora_name"], strength_model=0.8)[0]
    positive, negative = text(branch, 4096)
    more = {"strength": 1.0, "set_cond_area": "default", "hooks": lora}
    pair = branch.add("PairConditioningSetProperties", positive_NEW=positive, negative_NEW=negative, **more)
    return sample(branch, branch.patch(load(branch, "tiny_wan_t2v")), (pair[0], pair[1]), latent(branch, EVEN))


def test_hooks_of_a_conditioning_work_or_are_refused_with_the_truth(server: ComfyServer) -> None:
    try:
        comparison = compare(server, hooked, DEVICES, check=False)
    except PromptFailed as error:
        check_sentence(str(error), "[Hh]ook")
    else:
        comparison.check(DEVICES)
