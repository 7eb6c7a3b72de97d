"""SP Release and SP Doctor as nodes of a graph."""

from __future__ import annotations

import torch
from host.graphs import Branch, Link
from host.observe import alive, pids, run, status, video, wait_for, workers

from sp_core.demo.comfy_server import ComfyServer

DEVICES = "cpu:2"


def released(what: str):
    def after(branch: Branch, samples: Link) -> Link:
        return branch.add("SPRelease", anything=samples, what=what)[0]

    return after


def test_nothing_to_release_is_no_error(own: ComfyServer) -> None:
    outputs = own.run({"1": {"class_type": "SPRelease", "inputs": {"what": "weights"}}})
    assert outputs["1"]["text"] == ["No workers are running."]


def test_it_passes_its_input_on_and_frees_in_the_middle_of_a_graph(own: ComfyServer) -> None:
    stock = run(own, *video(None)).parts[0]
    passed = run(own, *video(DEVICES, after=released("weights"))).parts[0]
    torch.testing.assert_close(passed, stock, rtol=0, atol=2e-4)
    assert len(workers(own)) == 2 and not any(worker["weight_bytes"] for worker in workers(own))
    before = pids(own)
    # the same prompt again: sampling is cached, releasing is not
    assert torch.equal(run(own, *video(DEVICES, after=released("weights"), seed=6)).parts[0], run(own, *video(DEVICES, seed=6)).parts[0])
    assert pids(own) == before
    run(own, *video(DEVICES, after=released("workers"), seed=7))
    wait_for(lambda: not any(map(alive, before)), 5, "the workers to end")
    assert status(own)["state"] == "none"


def test_the_doctor_reports_in_a_graph(own: ComfyServer) -> None:
    prompt = {
        "1": {"class_type": "SPDoctor", "inputs": {}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 1], "filename_prefix": "links"}},
    }
    outputs = own.run(prompt)
    assert "one device is faster" in outputs["1"]["text"][0] or "times as fast" in outputs["1"]["text"][0]
    assert outputs["2"]["images"]
