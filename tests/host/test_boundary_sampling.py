"""Samplers of packs put a MODEL's ``model_sampling`` into the options: code inside the model finds the workers' own, or is refused."""

from __future__ import annotations

from host.boundary import alone, check_sentence, named, on_wan, refusal
from host.graphs import Branch, Case, Link, compare, load, read, relative

from sp_core.demo.comfy_server import ComfyServer

DEVICES = "cpu:2"


def sampled(*, reader: bool, told: bool = True, shift: bool = False) -> Case:
    """``shift``: a node behind SP Model Patch replaces the part that is told."""

    def case(branch: Branch) -> Link:
        model = load(branch, "tiny_wan_t2v")
        if reader:
            model = branch.add("SPForeignReadsSampling", model=model)[0]
        model = branch.patch(model)
        if shift:
            model = branch.add("ModelSamplingSD3", model=model, shift=5.0)[0]
        if told:
            model = branch.add("SPForeignSamplingInOptions", model=model)[0]
        return on_wan(branch, model)

    return named(f"sampling_reader_{reader}_told_{told}_shift_{shift}", case)


def test_code_inside_the_model_reads_the_workers_own(server: ComfyServer) -> None:
    comparison = compare(server, sampled(reader=True), DEVICES, cfg_split=1)
    stock = alone(None)
    saved = stock.add("SPTestSaveLatent", samples=sampled(reader=True, told=False)(stock), name="sampling-not-told")
    untold = read(server.run(stock.graph.prompt)[saved.id])
    assert relative(comparison.stock.parts[0], untold.parts[0]) > 1e-3, "nobody reads it"


def test_one_that_nobody_inside_the_model_reads(server: ComfyServer) -> None:
    compare(server, sampled(reader=False, shift=True), DEVICES)


def test_one_of_a_node_behind_is_refused_where_somebody_reads_it(server: ComfyServer) -> None:
    sentence = refusal(server, sampled(reader=True, shift=True))
    assert "model_sampling" in sentence
    check_sentence(sentence, "model_sampling")
