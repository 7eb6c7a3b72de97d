"""What the workers rely on to replay a graph: the executor, its cache, node packs, cancel."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .registry import IMAGE, INVERTED, Server, expect, probe


@probe
def a_node_knows_which_member_of_a_list_it_gets() -> None:
    from sp_core.host import comfy_api

    expect(comfy_api.executing_list_index() is None, "there is an executing context where no node runs")
    seen: list[Any] = []
    _run_probe_node(lambda: seen.append(comfy_api.executing_list_index()))
    expect(seen == [0], "get_executing_context().list_index no longer tells which call of a node this is")


@probe
def what_was_computed_can_be_read_by_a_node() -> None:
    from sp_core.host import comfy_api

    expect(comfy_api.outputs_so_far()("a") is None, "there are outputs where no prompt runs")
    seen: list[Any] = []
    _run_probe_node(lambda: seen.append(comfy_api.outputs_so_far()("a")))
    expect(
        seen and seen[0] is not None and tuple(seen[0][0][0].shape) == (1, 8, 8, 3),
        "execution.execute has no caches.outputs.get_local(node).outputs any more, so the workers would compute every value again",
    )


def _run_probe_node(work: Callable[[], Any]) -> None:
    """Have the executor run ``work`` as a node that takes an image from another node."""
    import torch

    import nodes
    from sp_core.host import comfy_api

    class Probe:
        INPUT_TYPES = classmethod(lambda cls: {"required": {"image": ("IMAGE",)}})
        RETURN_TYPES = ("IMAGE",)
        FUNCTION = "run"

        def run(self, image: Any) -> tuple[Any]:
            work()
            return (image,)

    nodes.NODE_CLASS_MAPPINGS["SPProbe"] = Probe
    executor = comfy_api.make_executor(Server())
    graph = {**IMAGE, "p": {"class_type": "SPProbe", "inputs": {"image": ["a", 0]}}}
    try:
        with torch.inference_mode():
            executor.execute(graph, "probe", {}, ["p"])
    finally:
        del nodes.NODE_CLASS_MAPPINGS["SPProbe"]
    expect(executor.success, f"a node of a class in NODE_CLASS_MAPPINGS failed: {executor.status_messages}")


@probe
def the_executor_runs_a_part_of_a_graph_and_remembers_it() -> None:
    import torch

    from sp_core.host import comfy_api

    executor = comfy_api.make_executor(Server())
    with torch.inference_mode():
        executor.execute(copy.deepcopy(INVERTED), "one", {}, ["b"])
    expect(executor.success, f"PromptExecutor.execute(graph, id, extra, [node]) failed: {executor.status_messages}")
    outputs = comfy_api.cached_outputs(executor, "b")
    expect(outputs and tuple(outputs[0][0].shape) == (1, 8, 8, 3), "caches.outputs.get(node).outputs is not a list for each output")
    first = outputs[0][0]
    with torch.inference_mode():
        executor.execute(copy.deepcopy(INVERTED), "two", {}, ["b"])
    expect(comfy_api.cached_outputs(executor, "b")[0][0] is first, "the classic cache computes an unchanged graph again")
    comfy_api.trim_cache(executor, copy.deepcopy(IMAGE))
    expect(comfy_api.cached_outputs(executor, "b") is None, "the classic cache keeps nodes that are no longer in the graph")


@probe
def a_failed_graph_says_which_node() -> None:
    import torch

    from sp_core.host import comfy_api
    from sp_core.host.worker.replay import execution_error

    executor = comfy_api.make_executor(Server())
    graph = {"bad": {"class_type": "ImageInvert", "inputs": {}}}
    with torch.inference_mode():
        executor.execute(graph, "three", {}, ["bad"])
    expect(not executor.success, "PromptExecutor.success is true after a failure")
    expect(execution_error(executor.status_messages).startswith("bad: "), "status_messages has no execution_error with node_id")


@probe
def running_prompts_are_known_and_a_server_can_be_made_for_packs() -> None:
    from types import SimpleNamespace

    import execution

    from sp_core.host import comfy_api

    instance = comfy_api.make_prompt_server()
    import server

    expect(server.PromptServer.instance is instance, "PromptServer() does not become PromptServer.instance")
    expect(hasattr(instance, "routes") and instance.client_id is None, "PromptServer has no routes or client_id any more")
    instance.send_sync("executing", {})
    queue = instance.prompt_queue = execution.PromptQueue(SimpleNamespace(queue_updated=lambda: None))
    queue.put((0, "four", IMAGE, {}, []))
    expect(comfy_api.running_prompts() == set(), "a prompt that waits counts as running")
    queue.get()
    expect(comfy_api.running_prompts() == {"four"}, "PromptQueue.currently_running does not have the prompt's id second")
    expect(comfy_api.running_nodes() == list(IMAGE.values()), "PromptQueue.currently_running does not have the prompt's nodes third")


@probe
def one_node_pack_can_be_loaded() -> None:
    import nodes
    from sp_core.host import comfy_api

    path = Path(comfy_api.host_root(), "comfy_extras", "nodes_model_advanced.py")
    expect(path.is_file(), "comfy_extras/nodes_model_advanced.py is gone")
    loaded = comfy_api.load_node_pack(str(path), "comfy_extras", {"ModelSamplingFlux"})
    expect(loaded, "nodes.load_custom_node(path, module_parent=...) does not load a file")
    expect("ModelSamplingFlux" not in nodes.NODE_CLASS_MAPPINGS, "nodes.load_custom_node(path, ignore, ...) ignores no class")
    expect("ModelSamplingSD3" in nodes.NODE_CLASS_MAPPINGS, "a loaded pack's nodes are not in NODE_CLASS_MAPPINGS")
    known = comfy_api.node_catalogue()
    expect(known.get("ModelSamplingSD3") == ("comfy_extras", str(path)), "RELATIVE_PYTHON_MODULE does not lead to the file")


@probe
def cancel_is_asked_for_and_taken_back() -> None:
    import comfy.model_management as management

    from sp_core.host import comfy_api

    comfy_api.set_interrupt(True)
    expect(comfy_api.interrupted(), "processing_interrupted() does not see interrupt_current_processing()")
    with contextlib.suppress(management.InterruptProcessingException):
        comfy_api.raise_interrupt()
    expect(not comfy_api.interrupted(), "throwing InterruptProcessingException does not take the request back")


@probe
def the_node_that_runs_is_known() -> None:
    from comfy_execution.utils import CurrentNodeContext

    from sp_core.host import comfy_api

    with CurrentNodeContext("prompt", "17"):
        expect(comfy_api.executing_node()[0] == "17", "get_executing_context() does not tell the running node")
