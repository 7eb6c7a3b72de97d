"""First file of a worker process: ``python bootstrap.py <config.json> <rank>``. This file does not import torch.

It loads the package under its one name without touching sys.path: ComfyUI has a module
called ``nodes`` and so has this extension, and ``import nodes`` must mean ComfyUI's.
"""

import importlib.util
import json
import sys
from pathlib import Path


def load_package() -> None:
    """Make ``sp_core`` importable under that one name. ComfyUI's process runs this function too (``__init__.py`` of the extension).

    Raises:
        ImportError: a package of that name from another place is loaded.
    """
    location = Path(__file__).resolve().parent.parent / "__init__.py"
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


if __name__ == "__main__":
    if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
        sys.path.pop(0)  # an interpreter that runs isolated has not put it there
    load_package()
    config = json.loads(Path(sys.argv[1]).read_text())
    rank = int(sys.argv[2])
    from sp_core.pool.orphaned import leave_with

    leave_with(config["parent"], Path(config["directory"]))
    if config["before_torch"]:
        module_name, function = config["before_torch"].split(":")
        getattr(importlib.import_module(module_name), function)(config["service_options"])
    from sp_core.pool.worker import run

    run(config, rank)
