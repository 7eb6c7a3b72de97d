"""SP Sampler as the one node: what it patched once stays patched, and stays in the workers."""

from __future__ import annotations

from host.graphs import SETTINGS, Branch, Graph, latent, load, read, relative, sample, text

DEVICES = "cpu:2"


def _run(server, seed: int) -> tuple[float, str]:
    """Relative L2 distance from KSampler, and the report."""
    graph = Graph()
    branch = Branch(graph)
    model, (positive, negative), start = load(branch, "tiny_wan_t2v"), text(branch, 4096), latent(branch, "1,16,3,10,14")
    inputs = {**SETTINGS, "seed": seed, "devices": DEVICES}
    node = branch.add("SPSampler", model=model, positive=positive, negative=negative, latent_image=start, **inputs)
    saved = [
        branch.add("SPTestSaveLatent", samples=sample(branch, model, (positive, negative), start, seed=seed), name="stock").id,
        branch.add("SPTestSaveLatent", samples=node[0], name="sp", report=node[1]).id,
    ]
    outputs = server.run(graph.prompt)
    stock, sp = (read(outputs[node]) for node in saved)
    return relative(sp.parts[0], stock.parts[0]), sp.report


def test_a_new_seed_loads_nothing_anew(server):
    loads, before = [], len(server.log())
    for seed in (1, 2, 3):
        error, report = _run(server, seed)
        assert error <= 2e-5
        assert "on 2 devices" in report
        loads.append(server.log(before).count("in 2 workers after"))
    # the MODEL may be one that another test has had patched before
    assert loads[0] <= 1 and loads == loads[:1] * 3, "the model was replayed in the workers for every run"
