"""A text encoder on another device makes room for the worker there, and gets room from it. The devices are simulated on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from host.graphs import Branch, Graph, Link, latent, load, read, sample, text
from host.observe import run, video

from sp_core.demo.comfy_server import ComfyServer


def sampled_then_encoded(server: ComfyServer, seed: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """The picture, and what the encoder's node saw."""
    branch = Branch(Graph(), "cpu:2")
    model: Link = branch.patch(branch.add("SPTestOnFirstDevice", model=load(branch, "tiny_wan_t2v"))[0])
    samples = sample(branch, model, text(branch, 4096), latent(branch, "1,16,3,10,14"), seed=seed)
    behind = branch.add("SPTestEncoderOnSecondDevice", samples=samples, model=model)
    saved = branch.add("SPTestSaveLatent", samples=behind[0], name=f"second-device-{seed}")
    outputs = server.run(branch.graph.prompt)
    return read(outputs[saved.id]).parts[0], outputs[behind.id]


@pytest.mark.campaign
def test_an_encoder_on_another_device_and_the_worker_there_take_turns(own: ComfyServer) -> None:
    found = []
    for seed in (1, 2, 3):
        picture, saw = sampled_then_encoded(own, seed)
        torch.testing.assert_close(picture, run(own, *video(None, seed=seed)).parts[0], rtol=0, atol=2e-4)
        assert min(saw["before"]) > 0
        found.append((saw["encoder"][0], [size > 0 for size in saw["held"]]))
    # before the first encoding nothing told ComfyUI's process that it would use the device
    assert found[0] == (False, [True, True])
    # sampling evicts the encoder from the second device, and encoding the weights of the worker on it, of no other
    assert found[1:] == [(False, [True, False])] * 2
