"""CausalWan by ComfyUI's own sampler, some frames after the others: keys and values of the earlier ones stay in the workers."""

from __future__ import annotations

import json

import campaign
import pytest
from host.families import FAMILIES
from host.graphs import Branch, Case, Link, compare, latent, sample, text

from sp_core.demo.comfy_server import ComfyServer


def model(branch: Branch) -> Link:
    arguments = json.dumps(FAMILIES["Causal Wan"].arguments)
    return branch.add("SPTestTinyModel", kind="WAN21_CausalAR_T2V", arguments=arguments, seed=3)[0]


def sampled(frames: int, picture: bool) -> Case:
    """``frames`` at a time, with or without a first picture."""

    def case(branch: Branch) -> Link:
        wire, start = model(branch), latent(branch, "1,16,5,10,14")
        if picture:
            vae = branch.add("SPTestVAE", channels=16, time_stride=4, stride=8)[0]
            image = branch.add("SPTestImage", frames=1, height=80, width=112, seed=3)[0]
            made = branch.add("ARVideoI2V", model=wire, vae=vae, start_image=image, width=112, height=80, length=17, batch_size=1)
            wire, start = made[0], made[1]
        wire = branch.patch(wire)
        positive, negative = text(branch, 24)
        sigmas = branch.add("BasicScheduler", model=wire, scheduler="simple", steps=2, denoise=1.0)[0]
        sampler = branch.add("SamplerARVideo", num_frame_per_block=frames)[0]
        settings = {"add_noise": True, "noise_seed": 5, "cfg": 1.0, "positive": positive, "negative": negative}
        return branch.add("SamplerCustom", model=wire, sampler=sampler, sigmas=sigmas, latent_image=start, **settings)[0]

    return case


def at_once(branch: Branch) -> Link:
    return sample(branch, branch.patch(model(branch)), text(branch, 24), latent(branch, "1,16,3,9,13"))


CASES = {
    "a picture, two frames at a time": sampled(2, True),
    "frame by frame": sampled(1, False),
    "three frames at a time, which do not divide": sampled(3, False),
    "all at once": at_once,
}
_PLAIN = ("a picture, two frames at a time",)


@pytest.mark.parametrize("devices", campaign.parameters(plain=["cpu:3"], campaign=["cpu:2"]))
@pytest.mark.parametrize("name", campaign.parameters(plain=_PLAIN, campaign=[name for name in CASES if name not in _PLAIN]))
def test_same_as_stock(server: ComfyServer, devices: str, name: str) -> None:
    found = compare(server, CASES[name], devices)
    assert "flat" in found.decision, found.sp.report
