"""What is relied on in ComfyUI's memory management."""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from typing import Any

from .registry import IMAGE, Server, expect, patcher, probe


@probe
def memory_management_asks_a_patched_model() -> None:
    import comfy.model_management as management
    import torch

    from sp_core.host.worker import comfy_memory

    model, calls = patcher()
    management.load_models_gpu([model])
    expect("partially_load" in calls, "load_models_gpu does not call ModelPatcher.partially_load")
    expect(
        comfy_memory.loaded_weights(torch.device("cpu")) >= 1 << 20,
        "current_loaded_models has no device and model_loaded_memory() any more",
    )
    calls.clear()
    measured = management.get_free_memory
    management.get_free_memory = lambda device=None, torch_free_too=False: (0, 0) if torch_free_too else 0
    try:
        management.free_memory(1 << 10, model.load_device)
    finally:
        management.get_free_memory = measured
    expect(calls == ["partially_unload"], f"a small demand calls {calls} instead of partially_unload")
    calls.clear()
    management.unload_all_models()
    expect(calls == ["detach"], f"unload_all_models calls {calls} instead of detach")


@probe
def what_workers_hold_on_another_device_is_counted_with_the_model() -> None:
    from types import SimpleNamespace

    import comfy.model_management as management
    import torch

    from sp_core.host import comfy_api
    from sp_core.host.ui.device_memory import DeviceShare

    second, released = torch.device("cpu", 1), []
    sp: Any = SimpleNamespace(device_bytes=1 << 20, keep_loaded="auto", release=lambda device: released.append(device))
    sp.bytes_on_devices = lambda device: 0 if released else 1 << 20
    share = DeviceShare(sp, second, torch.device("cpu"))
    model, calls = patcher()
    model.model_patches_models = lambda: [share]
    expect(not comfy_api.uses_device(second), "a device is in use on which nothing is loaded")
    management.load_models_gpu([model])
    expect(comfy_api.uses_device(second), "load_models_gpu does not load what model_patches_models() gives")
    calls.clear()
    measured = management.get_free_memory
    management.get_free_memory = lambda device=None, torch_free_too=False: (0, 0) if torch_free_too else 0
    try:
        management.free_memory(1 << 10, second)
    finally:
        management.get_free_memory = measured
    expect(released == [second], f"a demand on the second device asks for {released}")
    expect(not calls, f"a demand on the second device calls {calls} of a model on the first")
    management.free_memory(1e30, second)
    expect(not comfy_api.uses_device(second), "a share cannot be unloaded")


@probe
def one_model_can_be_unloaded() -> None:
    import comfy.model_management as management
    import torch

    from sp_core.host.worker import comfy_memory

    model, calls = patcher()
    management.load_models_gpu([model])
    calls.clear()
    comfy_memory.unload(model)
    expect("detach" in calls, "unload_model_and_clones (or free_memory) does not detach the model")
    expect(comfy_memory.loaded_weights(torch.device("cpu")) == 0, "an unloaded model is still counted")


@probe
def weights_of_models_that_nobody_named_can_be_unloaded() -> None:
    import comfy.model_management as management

    from sp_core.host.worker import comfy_memory

    (kept, _), (other, calls) = patcher(), patcher()
    management.load_models_gpu([kept, other])
    comfy_memory.unload_others([kept.clone()])
    expect(comfy_memory.is_loaded(kept), "a model is unloaded although a clone of it was named")
    expect(not comfy_memory.is_loaded(other) and "detach" in calls, "current_loaded_models has no model that can be unloaded")
    comfy_memory.unload_others([])
    expect(not comfy_memory.is_loaded(kept), "a model that nobody named is still loaded")


@probe
def host_memory_is_shared_among_workers() -> None:
    import comfy.memory_management
    import comfy.model_management as management

    from sp_core.host import comfy_api
    from sp_core.host.worker import comfy_memory

    before = management.MAX_PINNED_MEMORY, comfy.memory_management.RAM_CACHE_HEADROOM
    try:
        for pinned, share in ((-1, -1), (8 << 30, 2 << 30)):
            management.MAX_PINNED_MEMORY = pinned
            comfy_memory.share_pinned_memory(4)
            expect(share == management.MAX_PINNED_MEMORY, f"{pinned} bytes to pin became {management.MAX_PINNED_MEMORY} for one of four")
        executor = comfy_api.make_executor(Server())
        for run in (
            lambda: comfy_api.execute(executor, copy.deepcopy(IMAGE), "probe", ["a"]),
            lambda: comfy_api.trim_cache(executor, copy.deepcopy(IMAGE)),
        ):
            run()
            headroom = comfy.memory_management.RAM_CACHE_HEADROOM
            expect(4 << 30 <= headroom <= 20 << 30, f"memory that pinned tensors leave free behind a graph: {headroom}")
    finally:
        management.MAX_PINNED_MEMORY, comfy.memory_management.RAM_CACHE_HEADROOM = before


def called(tree: ast.AST) -> set[str]:
    """Names of the functions that a piece of code calls, without the modules that they are in."""
    return {ast.unparse(node.func).rpartition(".")[2] for node in ast.walk(tree) if isinstance(node, ast.Call)}


@probe
def what_the_host_does_behind_a_node_can_be_done_here() -> None:
    import comfy.model_management as management
    import comfy.model_prefetch

    from sp_core.host import comfy_api

    behind = [
        part
        for attempt in ast.walk(ast.parse(inspect.getsource(__import__("execution"))))
        if isinstance(attempt, ast.Try)
        for part in attempt.finalbody
        if isinstance(part, ast.If) and ast.unparse(part.test).endswith("aimdo_enabled")
    ]
    expect(len(behind) == 1, "execution.py does nothing under dynamic VRAM behind a node, or does it in more than one place")
    theirs = called(behind[0]) - {"analyze", "get_console_log_level"}  # words for a debug log
    ours = called(ast.parse(textwrap.dedent(inspect.getsource(comfy_api.end_of_node)))) - {"dynamic_vram"}
    expect(theirs - ours == set(), f"behind a node execution.py also calls {sorted(theirs - ours)}, which comfy_api.end_of_node does not")
    expect(ours - theirs == set(), f"behind a node execution.py no longer calls {sorted(ours - theirs)}, which comfy_api.end_of_node does")
    expect(callable(management.reset_cast_buffers) and callable(comfy.model_prefetch.cleanup_prefetch_queues), "a function is gone")
    comfy_api.end_of_node()


@probe
def free_memory_of_a_device_has_a_part_of_torchs() -> None:
    import comfy.model_management as management
    import torch

    from sp_core.host import comfy_api
    from sp_core.host.worker import comfy_memory

    expect(comfy_memory.spare_memory(patcher()[0]) == 0, "a CPU has memory in reserve")
    parts = management.get_free_memory(torch.device("cpu"), torch_free_too=True)
    expect(len(parts) == 2, "get_free_memory(torch_free_too=True) no longer gives the total and torch's part")
    expect(comfy_api.dynamic_vram() is False, "dynamic VRAM without a GPU")
