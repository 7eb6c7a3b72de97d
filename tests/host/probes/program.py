"""What is relied on in ComfyUI as a program: where it lies, its command line, its server, its nodes."""

from __future__ import annotations

import inspect
from pathlib import Path

from .registry import expect, probe


@probe
def where_the_host_is_and_which() -> None:
    from sp_core.host import comfy_api

    expect(Path(comfy_api.host_root(), "main.py").is_file(), "folder_paths.py no longer lies in the host's root")
    expect(comfy_api.version()[0].isdigit(), "comfyui_version.__version__ is no version")


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
def nodes_say_what_they_give() -> None:
    from sp_core.host import comfy_api

    expect(comfy_api.output_types("LoraLoader") == ("MODEL", "CLIP"), "RETURN_TYPES of a node class are no longer its outputs' types")


@probe
def nodes_tell_whether_they_give_a_model() -> None:
    from sp_core.host import comfy_api

    expect(comfy_api.gives_model("UNETLoader") and comfy_api.gives_model("no such node"), "RETURN_TYPES of a loader names no MODEL")
    expect(not comfy_api.gives_model("KSampler"), "RETURN_TYPES of a sampler names a MODEL")


@probe
def samplers_have_names_and_one_function() -> None:
    import nodes
    from sp_core.host.ui.sampler_node import sampler_choices

    samplers, schedulers = sampler_choices()
    expect("euler" in samplers and "simple" in schedulers, "comfy.samplers.KSampler has no SAMPLERS and SCHEDULERS")
    wanted = ["model", "seed", "steps", "cfg", "sampler_name", "scheduler", "positive", "negative", "latent"]
    expect(list(inspect.signature(nodes.common_ksampler).parameters)[:9] == wanted, "nodes.common_ksampler takes other arguments")


@probe
def nodes_can_be_declared() -> None:
    from comfy_api.latest import ComfyExtension, io

    expect(hasattr(ComfyExtension, "on_load"), "ComfyExtension.on_load is gone: /sp/status would not be registered")
    for name in ("search_aliases", "is_output_node", "hidden", "description"):
        expect(name in inspect.signature(io.Schema.__init__).parameters, f"io.Schema takes no {name}")
    expect(all(hasattr(io, name) for name in ("AnyType", "Model", "Latent", "Conditioning", "Hidden")), "an io type is gone")
