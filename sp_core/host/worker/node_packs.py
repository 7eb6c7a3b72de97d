"""Node packs in a worker: each is loaded when a graph needs it, as ComfyUI loaded it in its own process."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from types import ModuleType
from typing import Any

import torch

from ...errors import SPError
from ...host_path import EXTENSION
from .. import comfy_api, travel

log = logging.getLogger(__name__)

#: where each node class comes from, in the order in which ComfyUI's process loaded them: class type -> (parent of its module, path)
Catalogue = dict[str, tuple[str, str]]
#: a graph in API format
Graph = dict[str, dict[str, Any]]

CUSTOM, EXTRAS = "custom_nodes", "comfy_extras"
#: packages of ComfyUI's own, and of others, whose functions and classes may come with a forward by their names
COMFYUIS = ("comfy", "comfy_extras", "comfy_execution", "node_helpers", "nodes", "latent_preview")
LIBRARIES = ("torch", "numpy", "einops", "triton", "sageattention", "sageattn3", "flash_attn", "xformers", *travel.LIBRARIES)


#: a pack that did not load is tried once more then. All ranks load it at once, and some packs write a settings file meanwhile
TRY_AGAIN_S = 2.0


class PackFailed(SPError):
    """A node pack that ComfyUI's process has does not load in the worker."""


class NoSuchNode(SPError, KeyError):
    """ComfyUI's process has no node of this class. Packs that ask for one which may be missing expect a KeyError."""

    __str__ = Exception.__str__


class NodePacks:
    """The node packs of one worker. ``nodes.NODE_CLASS_MAPPINGS`` loads a pack when somebody asks it for one of the pack's nodes."""

    def __init__(self, catalogue: Catalogue, before_each: Callable[[], None]) -> None:
        """``before_each`` is called before a pack is loaded, which can take a while."""
        import nodes

        # a pair is a list once it has been sent
        self._catalogue = {class_type: (parent, path) for class_type, (parent, path) in catalogue.items()}
        self._before_each = before_each
        self._loading: set[str] = set()
        self._loaded: set[str] = set()
        #: why a pack did not load, in this graph; it is tried again in the next one
        self._failed: dict[str, str] = {}
        self._prepared = self._rest_loaded = False
        #: what the executor takes for ComfyUI's server
        self.server: Any = _Server()
        nodes.NODE_CLASS_MAPPINGS = LazyNodes(nodes.NODE_CLASS_MAPPINGS, self)

    def load_for(self, graph: Graph, node: str) -> Graph:
        """Load the packs of all nodes that ``node`` needs. To be called in the main thread, where ComfyUI loads packs too.

        Returns:
            ``graph`` without the nodes whose packs are not loaded: nothing was computed for them here that could be kept.

        Raises:
            PackFailed: a pack does not load.
            NoSuchNode: ComfyUI's process has no such node.
        """
        import nodes

        self._failed.clear()
        for class_type in dict.fromkeys(graph[name]["class_type"] for name in ancestors(graph, node)):
            nodes.NODE_CLASS_MAPPINGS[class_type]
        return self.loaded_part(graph)

    @staticmethod
    def loaded_part(graph: Graph) -> Graph:
        """``graph`` without the nodes whose packs are not loaded, and without those behind them."""
        import nodes

        return runnable_part(graph, set(nodes.NODE_CLASS_MAPPINGS))

    def load(self, class_type: str) -> None:
        """Load the pack that has the node ``class_type``."""
        import nodes

        if class_type not in self._catalogue:
            raise NoSuchNode(f"the graph needs the node {class_type}, which ComfyUI's process does not have")
        parent, path = self._catalogue[class_type]
        try:
            self._load(parent, path)
        except ImportError as error:
            reason = str(error)
        else:
            if dict.__contains__(nodes.NODE_CLASS_MAPPINGS, class_type):
                return
            reason = "in the worker it does not have this node"
        raise PackFailed(
            f"{os.path.basename(path)}, which has the node {class_type}, does not load in the worker: {reason}. "
            "Mend the pack, or take its node out of the graph"
        )

    def can_load(self, class_type: str) -> bool:
        """The pack that has the node ``class_type`` is loaded now. False for a pack that asks for a node of its own while it is loaded."""
        if class_type not in self._catalogue or self._catalogue[class_type][1] in self._loading:
            return False
        try:
            self.load(class_type)
        except PackFailed as error:
            log.warning("%s", error)
            return False
        return True

    def load_rest(self) -> bool:
        """Load every pack that ComfyUI has loaded. Returns false when that was done before."""
        if self._rest_loaded:
            return False
        self._rest_loaded = True
        self._failed.clear()
        self._load_all(CUSTOM)
        return True

    def module(self, name: str) -> ModuleType:
        """A Python module by its name: ComfyUI's, a pack's that ComfyUI has loaded (the pack is loaded first), or one of a library.

        Raises:
            SPError: it is none of these, or does not load.
        """
        for parent, path in dict.fromkeys(self._catalogue.values()):
            pack = module_of_pack(path)
            if name == pack or name.startswith(f"{pack}."):
                try:
                    self._load(parent, path)
                    return importlib.import_module(name)
                except ImportError as error:
                    raise PackFailed(f"{os.path.basename(path)}, which has a patch of the model, does not load: {error}") from error
        if name.split(".")[0] in (*COMFYUIS, *LIBRARIES):
            return importlib.import_module(name)
        raise SPError(f"a patch of the model is of {name}, which is neither ComfyUI's nor a loaded node pack's. Remove its node")

    def is_custom(self, class_type: str | None) -> bool:
        return class_type in self._catalogue and self._catalogue[class_type][0] == CUSTOM

    def _load_all(self, parent: str) -> None:
        for where, path in dict.fromkeys(self._catalogue.values()):
            if where == parent and os.path.realpath(path) != str(EXTENSION):
                try:
                    self._load(where, path)
                except ImportError as error:
                    log.warning("%s does not load: %s", os.path.basename(path), error)

    def _load(self, parent: str, path: str) -> None:
        if path in self._loaded or path in self._loading:
            return
        if path in self._failed:
            raise ImportError(self._failed[path])
        self._before_each()
        if parent == CUSTOM:
            self._prepare()
        log.log(logging.INFO if parent == CUSTOM else logging.DEBUG, "loading %s", os.path.basename(path))
        self._loading.add(path)
        try:
            self._import(parent, path)
        except ImportError as error:
            self._failed[path] = str(error)
            raise
        finally:
            self._loading.discard(path)
        self._loaded.add(path)

    def _import(self, parent: str, path: str) -> None:
        others = self._classes_of_others(path)
        try:
            import_pack(path, parent, others)
        except ImportError as error:
            if parent != CUSTOM:
                raise
            log.warning("%s does not load (%s), and is tried once more", os.path.basename(path), error)
            time.sleep(TRY_AGAIN_S)
            self._before_each()
            import_pack(path, parent, others)

    def _prepare(self) -> None:
        """Make what a pack may rely on: the server, and ComfyUI's extra nodes, which import each other and load in one order only."""
        if self._prepared:
            return
        self._prepared = True
        server = comfy_api.make_prompt_server()
        server.last_prompt_id = self.server.last_prompt_id
        self.server = server
        self._load_all(EXTRAS)

    def _classes_of_others(self, path: str) -> set[str]:
        """Of two packs that have a node of the same name, the one counts that counts in ComfyUI's process."""
        return {class_type for class_type, (_, other) in self._catalogue.items() if other != path}


class LazyNodes(dict):
    """``nodes.NODE_CLASS_MAPPINGS``: who looks for a node of ComfyUI's process finds it, and its pack is loaded."""

    def __init__(self, known: dict[str, Any], packs: NodePacks) -> None:
        super().__init__(known)
        self._packs = packs

    def __missing__(self, class_type: str) -> Any:
        self._packs.load(class_type)
        return self[class_type]

    def __contains__(self, class_type: Any) -> bool:
        return super().__contains__(class_type) or self._packs.can_load(class_type)

    def get(self, class_type: Any, default: Any = None) -> Any:
        has = class_type in self
        return self[class_type] if has else default


def module_of_pack(path: str) -> str:
    """Name of a pack's module, as ``nodes.load_custom_node`` makes it of its path."""
    return os.path.splitext(path)[0] if os.path.isfile(path) else path.replace(".", "_x_")


def ancestors(graph: Graph, node: str) -> list[str]:
    """``node`` and all that it needs, each behind what it needs itself."""
    found: dict[str, None] = {}

    def visit(name: str) -> None:
        if name not in found:
            for above in needed_by(graph[name], graph):
                visit(above)
            found[name] = None

    visit(node)
    return list(found)


def runnable_part(graph: Graph, classes: set[str]) -> Graph:
    """``graph`` without the nodes of other classes than these, and without those that need one of them."""
    return {name: entry for name, entry in graph.items() if all(graph[above]["class_type"] in classes for above in ancestors(graph, name))}


def needed_by(entry: dict[str, Any], graph: Graph) -> list[str]:
    """Names of the nodes whose outputs are inputs of ``entry``."""
    wires = (value for value in entry["inputs"].values() if isinstance(value, list) and len(value) == 2)
    return [name for name, _ in wires if isinstance(name, str) and name in graph]


def import_pack(path: str, parent: str, ignore: Collection[str]) -> None:
    """Load the pack at ``path``, but for the classes ``ignore``.

    Raises:
        ImportError: it does not load; the text is the reason.
    """
    warnings: list[str] = []
    loaded = False
    try:
        # tensors that a pack makes while it is imported outlive this request
        with torch.inference_mode(False), _warnings_into(warnings):
            loaded = comfy_api.load_node_pack(path, parent, ignore)
    except SystemExit as error:
        raise ImportError(f"it ended Python ({error})") from error
    finally:
        if not loaded:
            forget_modules(module_of_pack(path))
    if not loaded:
        raise ImportError(reason_of_warnings(warnings))


def forget_modules(package: str) -> None:
    """Take a pack's modules out of Python: those of an import that failed are half made, and the next import would find them."""
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]


@contextlib.contextmanager
def _warnings_into(lines: list[str]) -> Iterator[None]:
    """While the block runs, what ComfyUI logs as a warning is added to ``lines`` too: it tells nobody else why a pack does not load."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def reason_of_warnings(warnings: list[str]) -> str:
    """Why a pack did not load, from what ``nodes.load_custom_node`` logged: a traceback and a line, or a line."""
    if not warnings:
        return "ComfyUI's log has the reason"
    traceback = next((text for text in warnings[-2:] if text.startswith("Traceback")), None)
    if traceback is None:
        return warnings[-1].strip()
    lines = traceback.strip().splitlines()
    # the error's own words begin behind the last line of code
    last = max((number for number, line in enumerate(lines) if line.startswith("  ")), default=-1)
    return " ".join(line.strip() for line in lines[last + 1 :])


class _Server:
    """Stands where the executor expects ComfyUI's server, until a pack needs one. It would send news, and nobody here reads them."""

    client_id: str | None = None
    last_node_id: str | None = None
    last_prompt_id: str | None = None

    def send_sync(self, event: str, data: Any, sid: str | None = None) -> None:
        pass
