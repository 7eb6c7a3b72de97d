"""What this extension relies on in ComfyUI, tried one by one. ``python comfy_api_probes.py <ComfyUI>`` prints JSON: probe -> problem or "".

Each probe does the smallest real thing that would go wrong, and its message says what the host changed.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROBES: dict[str, Callable[[], None]] = {}


def probe(function: Callable[[], None]) -> Callable[[], None]:
    PROBES[function.__name__] = function
    return function


def expect(truth: Any, changed: str) -> None:
    if not truth:
        raise AssertionError(changed)


class Server:
    """What the worker gives the executor."""

    client_id = None
    last_node_id = None
    last_prompt_id = None

    def send_sync(self, event: str, data: Any, sid: Any = None) -> None:
        pass


IMAGE = {"a": {"class_type": "EmptyImage", "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0}}}
INVERTED = {**IMAGE, "b": {"class_type": "ImageInvert", "inputs": {"image": ["a", 0]}}}


@probe
def where_the_host_is_and_which() -> None:
    from sp_core.host import comfy_api

    expect(Path(comfy_api.host_root(), "main.py").is_file(), "folder_paths.py no longer lies in the host's root")
    expect(comfy_api.version()[0].isdigit(), "comfyui_version.__version__ is no version")


@probe
def the_executor_runs_a_part_of_a_graph_and_remembers_it() -> None:
    import copy

    import torch

    from sp_core.host import comfy_api

    executor = comfy_api.make_executor(Server())
    with torch.inference_mode():
        executor.execute(copy.deepcopy(INVERTED), "one", {}, ["b"])
    expect(executor.success, f"PromptExecutor.execute(graph, id, extra, [node]) failed: {executor.status_messages}")
    outputs = comfy_api.cached_outputs(executor, "b")
    expect(outputs and tuple(outputs[0][0].shape) == (1, 8, 8, 3), "PromptExecutor.caches.outputs.get(node).outputs is not slot by slot")
    first = outputs[0][0]
    with torch.inference_mode():
        executor.execute(copy.deepcopy(INVERTED), "two", {}, ["b"])
    expect(comfy_api.cached_outputs(executor, "b")[0][0] is first, "the classic cache computes an unchanged graph again")
    comfy_api.trim_cache(executor, IMAGE)
    expect(comfy_api.cached_outputs(executor, "b") is None, "the classic cache keeps nodes that are no longer in the graph")


@probe
def a_node_knows_which_member_of_a_list_it_gets() -> None:
    from sp_core.host import comfy_api

    expect(comfy_api.executing_list_index() is None, "there is an executing context where no node runs")
    seen: list[Any] = []
    _run_probe_node(lambda: seen.append(comfy_api.executing_list_index()))
    expect(seen == [0], "get_executing_context().list_index no longer tells which call of a node this is")


@probe
def nodes_say_what_they_give() -> None:
    from sp_core.host import comfy_api

    expect(comfy_api.output_types("LoraLoader") == ("MODEL", "CLIP"), "RETURN_TYPES of a node class are no longer its outputs' types")


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


def _patcher() -> tuple[Any, list[str]]:
    import comfy.model_management as management
    import comfy.model_patcher
    import torch

    calls: list[str] = []

    class Recording(comfy.model_patcher.ModelPatcher):
        resident = 0

        def loaded_size(self) -> int:
            return self.resident

        def partially_load(self, device_to: Any, extra_memory: Any = 0, force_patch_weights: bool = False) -> int:
            calls.append("partially_load")
            self.patch_model(device_to, load_weights=False)
            self.model.device = device_to
            self.resident = 1 << 20
            return self.resident

        def partially_unload(self, device_to: Any, memory_to_free: Any = 0, force_patch_weights: bool = False) -> int:
            calls.append("partially_unload")
            return int(memory_to_free)

        def detach(self, unpatch_all: bool = True) -> Any:
            calls.append("detach")
            self.resident = 0
            return super().detach(unpatch_all)

    device = management.get_torch_device()
    return Recording(torch.nn.Linear(4, 4), load_device=device, offload_device=device, size=1 << 20), calls


@probe
def memory_management_asks_a_patched_model() -> None:
    import comfy.model_management as management
    import torch

    from sp_core.host.worker import comfy_memory

    patcher, calls = _patcher()
    management.load_models_gpu([patcher])
    expect("partially_load" in calls, "load_models_gpu does not call ModelPatcher.partially_load")
    expect(
        comfy_memory.loaded_weights(torch.device("cpu")) >= 1 << 20,
        "current_loaded_models has no device and model_loaded_memory() any more",
    )
    calls.clear()
    measured = management.get_free_memory
    management.get_free_memory = lambda device=None, torch_free_too=False: (0, 0) if torch_free_too else 0
    try:
        management.free_memory(1 << 10, patcher.load_device)
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
    sp: Any = SimpleNamespace(weight_bytes=1 << 20, keep_loaded="auto", release=lambda device: released.append(device))
    sp.resident_bytes = lambda device: 0 if released else 1 << 20
    share = DeviceShare(sp, second, torch.device("cpu"))
    patcher, calls = _patcher()
    patcher.model_patches_models = lambda: [share]
    expect(not comfy_api.uses_device(second), "a device is in use on which nothing is loaded")
    management.load_models_gpu([patcher])
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

    patcher, calls = _patcher()
    management.load_models_gpu([patcher])
    calls.clear()
    comfy_memory.unload(patcher)
    expect("detach" in calls, "unload_model_and_clones (or unload_all_models) does not detach the model")
    expect(comfy_memory.loaded_weights(torch.device("cpu")) == 0, "an unloaded model is still counted")


@probe
def host_memory_is_shared_among_workers() -> None:
    import copy

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
            lambda: comfy_api.trim_cache(executor, IMAGE),
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

    expect(comfy_memory.spare_memory(_patcher()[0]) == 0, "a CPU has memory in reserve")
    parts = management.get_free_memory(torch.device("cpu"), torch_free_too=True)
    expect(len(parts) == 2, "get_free_memory(torch_free_too=True) no longer gives the total and torch's part")
    expect(comfy_api.dynamic_vram() is False, "dynamic VRAM without a GPU")


@probe
def patches_behind_our_node_come_through_these_methods() -> None:
    from comfy.model_patcher import ModelPatcher

    from sp_core.host.ui.patcher import SPModelPatcher

    for name, mine in vars(SPModelPatcher).items():
        theirs = getattr(ModelPatcher, name, None)
        if not inspect.isfunction(mine) or theirs is None or name.startswith("__"):
            continue
        parameters = inspect.signature(theirs).parameters.values()
        wanted = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        have = inspect.signature(mine).parameters
        takes_any = any(p.kind is p.VAR_POSITIONAL for p in have.values())
        expect(takes_any or set(wanted) <= set(have), f"ModelPatcher.{name} takes {wanted}, our override takes {list(have)}")
    for name in ("add_patches", "add_object_patch", "set_model_patch", "set_model_patch_replace", "clone", "pre_run", "cleanup"):
        expect(hasattr(ModelPatcher, name), f"ModelPatcher.{name} is gone: patches behind SP Model Patch would not be noticed")


@probe
def attention_asks_an_override() -> None:
    import torch
    from comfy.ldm.modules.attention import optimized_attention

    seen = []

    def override(function: Any, q: Any, k: Any, v: Any, heads: int, *args: Any, **kwargs: Any) -> Any:
        seen.append(heads)
        return function(q, k, v, heads, *args, **kwargs)

    x = torch.randn(1, 6, 8)
    out = optimized_attention(x, x, x, 2, transformer_options={"optimized_attention_override": override})
    expect(seen == [2] and out.shape == x.shape, "optimized_attention does not call transformer_options['optimized_attention_override']")


@probe
def wrappers_run_around_the_diffusion_model() -> None:
    from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers

    options = {"wrappers": {WrappersMP.DIFFUSION_MODEL: {"key": [lambda executor, x: executor(x) + 1]}}}
    wrappers = get_all_wrappers(WrappersMP.DIFFUSION_MODEL, options)
    run = WrapperExecutor.new_class_executor(lambda x: 2 * x, None, wrappers)
    expect(run.execute(3) == 7, "DIFFUSION_MODEL wrappers are found or run in another way")


@probe
def samplers_have_names_and_one_function() -> None:
    import nodes
    from sp_core.host.ui.sampler_node import sampler_choices

    samplers, schedulers = sampler_choices()
    expect("euler" in samplers and "simple" in schedulers, "comfy.samplers.KSampler has no SAMPLERS and SCHEDULERS")
    wanted = ["model", "seed", "steps", "cfg", "sampler_name", "scheduler", "positive", "negative", "latent"]
    expect(list(inspect.signature(nodes.common_ksampler).parameters)[:9] == wanted, "nodes.common_ksampler takes other arguments")


@probe
def workers_understand_the_command_line() -> None:
    from comfy.cli_args import parser

    from sp_core.host.ui.worker_arguments import worker_arguments

    line = "--listen 0.0.0.0 --port 8188 --lowvram --reserve-vram 1.5 --fp32-unet --cuda-device 0 --cache-lru 3 --preview-method auto"
    flags = worker_arguments([*line.split(), "--disable-smart-memory"], cpu=False)
    try:
        parsed = parser.parse_args(flags)
    except SystemExit:
        raise AssertionError(f"the host does not understand {flags}") from None
    expect(parsed.lowvram and parsed.disable_smart_memory and parsed.disable_all_custom_nodes, "a flag got lost on the way to the workers")
    expect(parsed.cuda_device is None and parsed.cache_lru == 0, "a flag of the server reached the workers")
    groups = parser._mutually_exclusive_groups
    memory = next((group for group in groups if any("--cpu" in a.option_strings for a in group._group_actions)), None)
    expect(memory is not None, "--cpu is in no group of flags that exclude each other")
    for flag in (action.option_strings[0] for action in memory._group_actions):
        try:
            expect(parser.parse_args(worker_arguments([flag], cpu=True)).cpu, "--cpu is not what CPU workers are told with")
        except SystemExit:
            raise AssertionError(f"CPU workers of a host that runs with {flag} do not start") from None
        if flag != "--cpu":
            told = worker_arguments([flag], cpu=False)
            expect(flag in told and parser.parse_args(told), f"GPU workers of a host that runs with {flag} are not told")


@probe
def the_node_that_runs_is_known() -> None:
    from comfy_execution.utils import CurrentNodeContext

    from sp_core.host import comfy_api

    with CurrentNodeContext("prompt", "17"):
        expect(comfy_api.executing_node()[0] == "17", "get_executing_context() does not tell the running node")


@probe
def nodes_tell_whether_they_give_a_model() -> None:
    from sp_core.host import comfy_api

    expect(comfy_api.gives_model("UNETLoader") and comfy_api.gives_model("no such node"), "RETURN_TYPES of a loader names no MODEL")
    expect(not comfy_api.gives_model("KSampler"), "RETURN_TYPES of a sampler names a MODEL")


@probe
def the_server_takes_routes_and_progress_lines() -> None:
    import asyncio

    import server

    from sp_core.host import comfy_api
    from sp_core.host.ui.status import register_routes

    if not hasattr(server.PromptServer, "instance"):
        expect(comfy_api.server_routes() is None, "a server is found where none was made")
        server.PromptServer(asyncio.new_event_loop())
    expect(register_routes(), "PromptServer.instance.routes is gone")
    paths = [route.path for route in server.PromptServer.instance.routes]
    expect("/sp/status" in paths, "a route that was added is not in the table")
    parameters = list(inspect.signature(server.PromptServer.send_progress_text).parameters)
    expect(parameters[1:3] == ["text", "node_id"], f"PromptServer.send_progress_text takes {parameters}")


@probe
def a_model_has_what_a_twin_of_it_needs() -> None:
    import comfy.model_base
    from comfy.model_patcher import ModelPatcher

    source = inspect.getsource(ModelPatcher.__init__) + inspect.getsource(comfy.model_base.BaseModel.__init__)
    counted = ("model_loaded_weight_memory", "lowvram_patch_counter", "model_lowvram")
    for name in (*counted, "current_weight_patches_uuid", "memory_usage_factor"):
        expect(name in source, f"a model has no {name} any more, so a second patcher on one model would share what it replaces it by")
    expect(hasattr(comfy.model_base.BaseModel, "memory_required"), "BaseModel.memory_required is gone")


@probe
def clones_share_the_backup_of_what_they_patch() -> None:
    patcher, _ = _patcher()
    other = patcher.clone()
    before = patcher.model.weight
    other.add_object_patch("in_features", 7)
    other.patch_model(load_weights=False)
    expect(patcher.model.in_features == 7, "object patches no longer land in the model that clones share")
    expect(
        patcher.object_patches_backup.get("in_features") == 4,
        "a clone no longer sees what another one replaced, so SP Model Patch would inherit another branch's patches",
    )
    other.unpatch_model()
    expect(patcher.model.in_features == 4 and patcher.model.weight is before, "unpatching does not restore what was there")


@probe
def a_patched_model_goes_with_its_last_clone() -> None:
    """What the workers hold for it goes then, and Python may look for circles of references much later."""
    import gc
    import weakref
    from types import SimpleNamespace

    import comfy.ldm.wan.model
    import comfy.ops
    import comfy.sample
    import comfy.sd
    import torch

    from sp_core.demo.checkpoints import WAN, random_weights
    from sp_core.host.ui.patcher import make_sp_patcher
    from sp_core.pool.devices import WorkerDevice

    shape = {name: WAN[name] for name in ("model_type", "in_dim", "out_dim")} | {"dim": 128, "ffn_dim": 64, "num_heads": 1, "num_layers": 1}
    module = comfy.ldm.wan.model.WanModel(**shape, dtype=torch.float32, device="meta", operations=comfy.ops.disable_weight_init)
    source = comfy.sd.load_diffusion_model_state_dict(random_weights(module, 0))
    stats = {"exchange_s": 0, "exchange_bytes": 0, "exchanges": 0, "whole": [], "decision": "", "transport": ""}
    workers = SimpleNamespace(out_of_step=False, last_call=SimpleNamespace(bytes_sent=0, bytes_reused=0))
    workers.call = lambda operation, body, **_: {"output": torch.zeros_like(body["named"]["x"]), "stats": stats}
    session: Any = SimpleNamespace(ensure=lambda model: workers, running_pool=lambda *_: None, holds=lambda model: True)
    session.finish = session.release = lambda *_: None
    devices = (WorkerDevice("cpu", 0), WorkerDevice("cpu", 1))
    words = [[torch.zeros(1, 7, 4096), {}]]
    gc.collect()
    gc.disable()
    try:
        patcher: Any = make_sp_patcher(source, SimpleNamespace(key="key"), session, devices)  # type: ignore[arg-type]
        parts = {"MODEL": patcher, "stand-in": patcher.model.diffusion_model, "remote model": patcher.sp}
        left = {name: weakref.ref(part) for name, part in parts.items()}
        parts.clear()
        latent = torch.zeros(1, 16, 1, 4, 4)
        settings = (2, 4.0, "euler", "simple", words, words, latent)
        out = comfy.sample.sample(patcher.clone(), latent, *settings, disable_pbar=True, seed=1)
        expect(out.shape == latent.shape, "nothing was sampled")
        expect(all(reference() is not None for reference in left.values()), "a MODEL goes while ComfyUI holds it")
        del patcher
        stays = [name for name, reference in left.items() if reference() is not None]
        expect(not stays, f"the {' and the '.join(stays)} of a patched MODEL stay until Python looks for circles")
    finally:
        gc.enable()


@probe
def callbacks_and_wrappers_have_the_names_that_are_looked_for() -> None:
    from comfy.patcher_extension import CallbacksMP, WrappersMP

    from sp_core.host.compiled import COMPILE_KEY
    from sp_core.host.ui.late_callbacks import _WHERE_IT_COMPUTES

    known = {value for name, value in vars(CallbacksMP).items() if name.startswith("ON_")}
    expect(set(_WHERE_IT_COMPUTES) <= known, f"ComfyUI has no callbacks {sorted(set(_WHERE_IT_COMPUTES) - known)}")
    expect(WrappersMP.OUTER_SAMPLE == "outer_sample", "there is no wrapper around a sampling run")
    from comfy_api.torch_helpers import torch_compile

    expect(torch_compile.COMPILE_KEY == COMPILE_KEY, "a compiled model is no longer told by its wrapper's key")


@probe
def nodes_can_be_declared() -> None:
    from comfy_api.latest import ComfyExtension, io

    expect(hasattr(ComfyExtension, "on_load"), "ComfyExtension.on_load is gone: /sp/status would not be registered")
    for name in ("search_aliases", "is_output_node", "hidden", "description"):
        expect(name in inspect.signature(io.Schema.__init__).parameters, f"io.Schema takes no {name}")
    expect(all(hasattr(io, name) for name in ("AnyType", "Model", "Latent", "Conditioning", "Hidden")), "an io type is gone")


def main(host: str) -> None:
    root = Path(__file__).resolve().parents[2]
    # as in a worker: the host's own folder first, both have a module called nodes
    sys.path[:0] = [host, str(root)]
    sys.argv = [str(Path(host, "main.py")), "--cpu", "--disable-all-custom-nodes"]
    import comfy.options

    comfy.options.enable_args_parsing()
    from sp_core.host import comfy_api

    comfy_api.import_main()
    found = {}
    for name, function in PROBES.items():
        try:
            function()
            found[name] = ""
        except AssertionError as error:
            found[name] = str(error)
        except BaseException:
            found[name] = traceback.format_exc(limit=-3)
    print("\nprobes: " + json.dumps({"version": comfy_api.version(), "found": found}))


if __name__ == "__main__":
    main(sys.argv[1])
