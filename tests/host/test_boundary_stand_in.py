"""The stand-in is the model for whoever looks, also where another branch of the prompt left something in the model that they share."""

from __future__ import annotations

import pytest
from host.boundary import alone, behind, check_sentence, copy_checkpoint, named, on_wan, refusal
from host.graphs import TOLERANCE, Branch, Link, compare, load, read, relative, run_sp

from sp_core.demo.comfy_server import ComfyServer

DEVICES = "cpu:2"

# -- the stand-in is the model for whoever looks -----------------------------------------


QUESTIONS = [
    *("class", "class name", "type name", "module of the class", "isinstance", "attribute", "missing attribute"),
    *("submodule", "submodule by path", "names of modules", "children", "names of weights", "parameters"),
]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.replace(" ", "_"))
def test_the_stand_in_answers_as_the_model(server: ComfyServer, question: str) -> None:
    compare(server, behind("SPForeignLook", question=question), DEVICES)


def test_a_number_that_a_node_sets_deep_in_it_is_refused_by_its_place(server: ComfyServer) -> None:
    copy_checkpoint(server, "tiny_wan_heads")
    message = refusal(server, behind("SPForeignHeads", checkpoint="tiny_wan_heads"), DEVICES)
    assert "The model's blocks.0.self_attn.num_heads was changed from 3 to 1 behind SP Model Patch" in message, message
    check_sentence(message, r"SPForeignHeads \(node")


# -- what another branch left behind ---------------------------------------------------------------


def test_a_class_that_another_branch_left_behind(server: ComfyServer) -> None:
    copy_checkpoint(server, "tiny_wan_class")
    stock = alone(None)
    model = stock.add("SPForeignClass", model=load(stock, "tiny_wan_class"))[0]
    stock.add("SPTestSaveLatent", samples=on_wan(stock, model, seed=81), name="class-left")
    server.run(stock.graph.prompt)

    def other_branch(branch: Branch) -> Link:
        return on_wan(branch, branch.patch(load(branch, "tiny_wan_class")), seed=82)

    mine = run_sp(server, other_branch).parts[0]
    expected = alone(None)
    saved = expected.add("SPTestSaveLatent", samples=other_branch(expected), name="class-left-other")
    assert relative(mine, read(server.run(expected.graph.prompt)[saved.id]).parts[0]) <= TOLERANCE


def test_patches_that_another_branch_left_are_no_foreign_code(server: ComfyServer) -> None:
    """ComfyUI leaves a stock branch's patches in the model that the branches share; the workers have a model without them."""
    stock = alone(None)
    model = stock.add("SPForeignModuleForward", model=load(stock, "tiny_wan_t2v"), module="self_attn")[0]
    stock.add("SPTestSaveLatent", samples=on_wan(stock, model, seed=83), name="patches-left")
    server.run(stock.graph.prompt)
    other = named("other_branch", lambda branch: on_wan(branch, branch.patch(load(branch, "tiny_wan_t2v")), seed=84))
    mine = run_sp(server, other).parts[0]
    expected = alone(None)
    saved = expected.add("SPTestSaveLatent", samples=other(expected), name="patches-left-other")
    assert relative(mine, read(server.run(expected.graph.prompt)[saved.id]).parts[0]) <= TOLERANCE
