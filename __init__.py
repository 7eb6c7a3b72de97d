"""ComfyUI extension: runs any video model on all of a machine's GPUs at once.

Importing never fails and starts nothing. Export is either ``comfy_entrypoint`` or, when a
requirement is missing, stand-in nodes that say which.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

WEB_DIRECTORY = "./web"
_ROOT = Path(__file__).resolve().parent


def _load_core() -> None:
    """Make ``sp_core`` importable under that one name, in every process, without putting this folder on sys.path.

    ComfyUI has a module called ``nodes``, and so has this extension.
    """
    location = _ROOT / "sp_core" / "__init__.py"
    loaded = sys.modules.get("sp_core")
    if loaded is not None:
        if Path(loaded.__file__ or "").resolve() != location:
            raise ImportError(
                f"another package called sp_core is loaded from {loaded.__file__}; two copies of this extension may be installed"
            )
        return
    spec = importlib.util.spec_from_file_location("sp_core", location, submodule_search_locations=[str(location.parent)])
    assert spec is not None and spec.loader is not None
    sys.modules["sp_core"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _problem() -> str | None:
    """Why the nodes cannot work here, as a sentence; None when they can."""
    try:
        _load_core()
        from .nodes import doctor, patch, release, sampler  # noqa: F401

        _longcat_nodes()
    except ImportError as error:
        missing = f"The Python package '{error.name}' is missing" if isinstance(error, ModuleNotFoundError) else str(error)
        return f"{missing}. Install this extension's requirements.txt into ComfyUI's Python environment and restart."
    except Exception as error:  # a host so different that the nodes cannot even be declared
        return f"{type(error).__name__}: {error}"
    return None


def _longcat_nodes() -> list[type]:
    """LongCat-Video's nodes, with the model made known to the host; none where the host does not take it (it logs why)."""
    from sp_core.models.registration import register_models

    if not register_models():
        return []
    from .nodes.longcat import NODES

    return list(NODES)


# collected by tests as a plain package, outside any host: declare nothing then
if "folder_paths" in sys.modules:
    _reason = _problem()
    if _reason is None:
        from comfy_api.latest import ComfyExtension, io

        class SequenceParallelExtension(ComfyExtension):
            async def on_load(self) -> None:
                from sp_core.host.ui.routes import register_routes

                register_routes()

            async def get_node_list(self) -> list[type[io.ComfyNode]]:
                from .nodes.doctor import SPDoctor
                from .nodes.patch import SPModelPatch
                from .nodes.release import SPRelease
                from .nodes.sampler import SPSampler

                return [SPModelPatch, SPSampler, SPRelease, SPDoctor, *_longcat_nodes()]

        async def comfy_entrypoint() -> SequenceParallelExtension:
            return SequenceParallelExtension()
    else:
        from .nodes.missing import stand_in

        _NAMES = {"SPModelPatch": "SP Model Patch", "SPSampler": "SP Sampler", "SPRelease": "SP Release", "SPDoctor": "SP Doctor"}
        NODE_CLASS_MAPPINGS = {node_id: stand_in(node_id, name, _reason) for node_id, name in _NAMES.items()}
        NODE_DISPLAY_NAME_MAPPINGS = {node_id: f"{name} (unavailable)" for node_id, name in _NAMES.items()}
