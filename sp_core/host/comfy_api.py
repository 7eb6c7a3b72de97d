"""What this extension uses of ComfyUI that differs between its versions, or is private to it.

Other files of ``host``, ``models`` and ``demo`` import modules that ComfyUI's node packs use too (its ModelPatcher, its list of
nodes), and ``worker/comfy_memory.py`` does so for its memory management. Not to be mistaken for ComfyUI's own package
``comfy_api``, by which the nodes are declared. Supported are ComfyUI 0.20.1 to 0.33. Each function names what it relies on, and
its test says in a sentence what a ComfyUI has changed (``tests/host``). The sections say which process a function is for; no
state is kept here.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import sys
import types
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# -- both processes --------------------------------------------------------------------------------


def host_root() -> str:
    """Folder of the running ComfyUI."""
    import folder_paths

    return os.path.dirname(os.path.abspath(folder_paths.__file__))


def version() -> str:
    import comfyui_version

    return comfyui_version.__version__


def dynamic_vram() -> bool:
    """ComfyUI brings weights to the device when they are needed, and takes them off when anything else needs its memory."""
    import comfy.memory_management

    return bool(getattr(comfy.memory_management, "aimdo_enabled", False))


def memory_managers() -> tuple[list[Any], list[Any]]:
    """The Python modules of ComfyUI whose code writes attributes of models' modules, to manage where weights lie and what is patched.

    Returns those that write them on others' objects, and those that define modules.
    """
    found = [
        [sys.modules[f"comfy.{name}"] for name in names if f"comfy.{name}" in sys.modules]
        for names in (("model_patcher", "model_management", "pinned_memory", "model_prefetch", "memory_management"), ("ops",))
    ]
    return found[0], found[1]


# -- ComfyUI's own process (host/ui) ---------------------------------------------------------------


def node_catalogue() -> dict[str, tuple[str, str]]:
    """Where every registered node class comes from: class type -> (module parent, path).

    Relies on ``RELATIVE_PYTHON_MODULE`` and on packs lying in one of the folders for custom nodes.
    """
    import nodes

    root = host_root()
    catalogue: dict[str, tuple[str, str]] = {}
    for class_type, node in nodes.NODE_CLASS_MAPPINGS.items():
        module = getattr(node, "RELATIVE_PYTHON_MODULE", "nodes")
        parent, _, name = module.partition(".")
        if parent in ("comfy_extras", "comfy_api_nodes"):
            path = os.path.join(root, parent, f"{name}.py")
        elif parent == "custom_nodes":
            found = _custom_node_path(name)
            if found is None:
                continue
            path = found
        else:
            continue  # the host's own nodes.py is always there
        catalogue[class_type] = (parent, path)
    return catalogue


def _custom_node_path(name: str) -> str | None:
    for folder in custom_node_folders():
        for candidate in (folder / name, folder / f"{name}.py"):
            if candidate.exists():
                return str(candidate)
    return None


def custom_node_folders() -> list[Path]:
    """The folders in which node packs lie; none where ComfyUI does not run."""
    folder_paths = sys.modules.get("folder_paths")
    return [Path(folder) for folder in folder_paths.get_folder_paths("custom_nodes")] if folder_paths is not None else []


def output_types(class_type: str) -> tuple[str, ...]:
    """The types of a node's outputs (``RETURN_TYPES``); none for a class that is not known."""
    import nodes

    return tuple(map(str, getattr(nodes.NODE_CLASS_MAPPINGS.get(class_type), "RETURN_TYPES", None) or ()))


def executing_node() -> tuple[str | None, str | None]:
    """(node id, class type) of the node that runs in this thread, where ComfyUI knows it."""
    try:
        from comfy_execution.utils import get_executing_context

        context = get_executing_context()
        node_id = context.node_id if context is not None else None
    except ImportError:
        return None, None
    if node_id is None:
        return None, None
    return node_id, _class_type(node_id)


def executing_list_index() -> int | None:
    """Which call this is where ComfyUI runs the node in this thread once for each member of a list; None where it does not say."""
    try:
        from comfy_execution.utils import get_executing_context
    except ImportError:
        return None
    context = get_executing_context()
    return None if context is None else context.list_index


def outputs_so_far() -> Callable[[str], list[list[Any]] | None]:
    """What ComfyUI has computed of the prompt that it runs in this thread: node id -> its outputs, each a list.

    The function returns None for a node that was not computed, or whose result was dropped. Relies on ``caches`` of
    ``execution.execute``, which calls the node that calls this, and on its ``outputs.get_local``.
    """
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code.co_name == "execute" and "caches" in frame.f_code.co_varnames):
        frame = frame.f_back
    outputs: Any = getattr(frame.f_locals["caches"], "outputs", None) if frame is not None else None

    def of_node(node_id: str) -> list[list[Any]] | None:
        entry = outputs.get_local(node_id) if hasattr(outputs, "get_local") else None
        return getattr(entry, "outputs", None)

    return of_node


def _class_type(node_id: str) -> str | None:
    try:
        from comfy_execution.progress import get_progress_state

        dynprompt = get_progress_state().dynprompt
        return dynprompt.get_node(node_id)["class_type"] if dynprompt.has_node(node_id) else None
    except (ImportError, AttributeError, KeyError):
        return None


def gives_model(class_type: str) -> bool:
    """A node of this class has a MODEL output (``RETURN_TYPES``), or nobody knows its class."""
    import nodes

    node = nodes.NODE_CLASS_MAPPINGS.get(class_type)
    return node is None or "MODEL" in (getattr(node, "RETURN_TYPES", None) or ())


@contextlib.contextmanager
def without_progress() -> Iterator[None]:
    """Inside, a ``ProgressBar`` of ComfyUI's code shows nothing, and looks for no cancel."""
    utils: Any = sys.modules.get("comfy.utils", types.SimpleNamespace(PROGRESS_BAR_HOOK=None))
    hook, utils.PROGRESS_BAR_HOOK = utils.PROGRESS_BAR_HOOK, None
    try:
        yield
    finally:
        utils.PROGRESS_BAR_HOOK = hook


def interrupted() -> bool:
    """The user pressed Cancel and ComfyUI has not acted on it yet."""
    import comfy.model_management

    return bool(comfy.model_management.processing_interrupted())


def running_prompts() -> set[str]:
    """Ids of the prompts that ComfyUI runs now. None run where no server was made."""
    return {item[1] for item in _running()}


def _running() -> list[Any]:
    """Relies on ``PromptQueue.currently_running``: (number, prompt id, nodes by id, ...)."""
    server = sys.modules.get("server")
    queue = getattr(getattr(getattr(server, "PromptServer", None), "instance", None), "prompt_queue", None)
    return [] if queue is None else list(queue.currently_running.values())


def running_nodes() -> list[dict[str, Any]]:
    """The nodes of the prompts that ComfyUI runs now, without those that a node expands into."""
    return [node for item in _running() for node in item[2].values()]


def raise_interrupt() -> None:
    """Raise what ComfyUI raises for a cancel, and take the request back.

    Raises:
        InterruptProcessingException: always.
    """
    import comfy.model_management

    comfy.model_management.throw_exception_if_processing_interrupted()
    raise comfy.model_management.InterruptProcessingException


def off_the_device(patcher: Any) -> None:
    """Move weights that the loader put on an accelerator (``--highvram``), where nothing could evict them, to main memory."""
    import comfy.model_management as management

    model = patcher.model.diffusion_model
    tracked = any(entry.model is not None and patcher.is_clone(entry.model) for entry in management.current_loaded_models)
    if not tracked and any(weight.device.type not in ("cpu", "meta") for weight in model.parameters()):
        model.to("cpu")


def uses_device(device: Any) -> bool:
    """This process has something on ``device`` already, so that asking for its memory takes none there.

    Relies on ``current_loaded_models`` and, for what was there once, on torch's knowledge of a CUDA context.
    """
    import comfy.model_management as management
    import torch

    if any(entry.device == device for entry in management.current_loaded_models):
        return True
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return device.type == "cuda" and has_context is not None and bool(has_context(device.index))


def server_routes() -> Any:
    """The server's route table (``PromptServer.instance.routes``), or None where no server was made."""
    server = sys.modules.get("server")
    instance = getattr(getattr(server, "PromptServer", None), "instance", None)
    return getattr(instance, "routes", None)


def show_text(node_id: str | None, text: str) -> None:
    """Show a line under a node in the frontend. Does nothing where ComfyUI has no such lines."""
    import server

    instance = getattr(server.PromptServer, "instance", None)
    if node_id is not None and instance is not None and hasattr(instance, "send_progress_text"):
        instance.send_progress_text(text, node_id, instance.client_id)


# -- a worker (host/worker): replaying graphs ------------------------------------------------------


def import_main() -> None:
    """Import ComfyUI's ``main`` for what it sets up while it is imported."""

    class _TorchFirst(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            return "Torch already imported" not in record.getMessage()

    drop = _TorchFirst()
    logging.getLogger().addFilter(drop)
    try:
        import main  # noqa: F401
    finally:
        logging.getLogger().removeFilter(drop)


def make_executor(server: Any) -> Any:
    """A ``PromptExecutor`` with the classic cache: keeps what the current graph names, drops the rest."""
    import execution

    parameters = inspect.signature(execution.PromptExecutor.__init__).parameters
    kwargs: dict[str, Any] = {"cache_type": execution.CacheType.CLASSIC}
    if "cache_args" in parameters:
        kwargs["cache_args"] = {"lru": 0, "ram": 0.0, "ram_inactive": 0.0}
    return execution.PromptExecutor(server, **kwargs)


def execute(executor: Any, graph: dict[str, Any], prompt_id: str, outputs: list[str]) -> None:
    """Run a graph, and set again how much main memory pinned weights leave free for ComfyUI's process.

    The executor resets that limit at its end (``set_ram_cache_release_state``), but weights are pinned later, in forwards.
    """
    try:
        executor.execute(graph, prompt_id, {}, outputs)
    finally:
        _leave_memory_free()


def _leave_memory_free() -> None:
    """Relies on ``memory_management.RAM_CACHE_HEADROOM``: ComfyUI pins no more weights once less than half of it is free."""
    import comfy.memory_management
    import comfy.model_management as management

    # with less free memory than this, ComfyUI's process drops its cached results (main.py, prompt_worker)
    cache_bytes = min(10.0, max(2.0, management.total_ram * 0.10 / 1024)) * 1024**3
    comfy.memory_management.RAM_CACHE_HEADROOM = max(comfy.memory_management.RAM_CACHE_HEADROOM, int(2 * cache_bytes))


def cached_outputs(executor: Any, node_id: str) -> list[list[Any]] | None:
    """Outputs of a node that the executor ran (``caches.outputs.get``), one list for each of its outputs."""
    entry = executor.caches.outputs.get(node_id)
    if inspect.isawaitable(entry):
        entry = run_async(entry)
    return None if entry is None else entry.outputs


def trim_cache(executor: Any, graph: dict[str, Any]) -> None:
    """Drop cached outputs of nodes that are not in ``graph``, as the executor does whenever it gets a prompt. It may change ``graph``."""
    import torch

    with torch.inference_mode():
        execute(executor, graph, "sp-trim", [])


def load_node_pack(path: str, parent: str, ignore: Collection[str] = ()) -> bool:
    """Load one node pack, its pre-start script first, as ComfyUI would (``nodes.load_custom_node``), but for the classes ``ignore``.

    Returns false where the pack does not load; ComfyUI has logged warnings then, which say why.
    """
    import nodes

    if parent == "custom_nodes":
        comfy_folder = os.path.join(host_root(), "comfy")
        if comfy_folder not in sys.path:
            # ComfyUI does this before it loads custom nodes, and some of them rely on it
            sys.path.insert(1, comfy_folder)
        script = os.path.join(path, "prestartup_script.py")
        if os.path.exists(script):
            _run_script(script)
    return bool(run_async(nodes.load_custom_node(path, set(ignore), module_parent=parent)))


def _run_script(path: str) -> None:
    """Run a pre-start script. Its failure is a line in the log, as in ``main.py`` (``execute_prestartup_script``)."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(os.path.splitext(path)[0], path)
    assert spec is not None and spec.loader is not None
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except Exception as error:
        logging.getLogger(__name__).error("Failed to execute startup-script: %s / %s", path, error)


def make_prompt_server() -> Any:
    """ComfyUI's server, which packs add routes to while they are imported. It is never started, and sends nothing."""
    import server

    instance = getattr(server.PromptServer, "instance", None) or server.PromptServer(asyncio.new_event_loop())
    instance.send_sync = lambda event, data, sid=None: None
    return instance


def run_async(awaitable: Any) -> Any:
    """Run a coroutine to its end: in this thread, or in another one where this one has a running event loop already."""

    async def wait() -> Any:
        return await awaitable

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait())
    with ThreadPoolExecutor(1, thread_name_prefix="sp-async") as thread:
        return thread.submit(asyncio.run, wait()).result()


def set_interrupt(wanted: bool) -> None:
    """Ask ComfyUI's executor in this process to stop before its next node, or take that back."""
    import comfy.model_management

    comfy.model_management.interrupt_current_processing(wanted)


def end_of_node() -> None:
    """Give back the buffers for weights on their way to the device, as ``execution.py`` does after every node under dynamic VRAM."""
    if not dynamic_vram():
        return
    import comfy.model_management
    import comfy.model_prefetch
    import comfy_aimdo.model_vbar

    comfy.model_management.reset_cast_buffers()
    comfy.model_prefetch.cleanup_prefetch_queues()
    comfy_aimdo.model_vbar.vbars_reset_watermark_limits()
