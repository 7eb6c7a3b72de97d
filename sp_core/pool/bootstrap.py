"""First file of a worker process: ``python bootstrap.py <config.json> <rank>``.

Loads the package under its one name without touching sys.path: ComfyUI has a module
called ``nodes`` and so has this extension, and ``import nodes`` must mean the host's.
"""

import importlib.util
import json
import sys
from pathlib import Path


def load_package() -> None:
    root = Path(__file__).resolve().parent.parent
    spec = importlib.util.spec_from_file_location("sp_core", root / "__init__.py", submodule_search_locations=[str(root)])
    assert spec is not None and spec.loader is not None
    sys.modules["sp_core"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    sys.path.pop(0)  # this file's own folder
    load_package()
    config = json.loads(Path(sys.argv[1]).read_text())
    rank = int(sys.argv[2])
    if config["before_torch"]:
        module_name, function = config["before_torch"].split(":")
        getattr(importlib.import_module(module_name), function)(config["service_options"])
    from sp_core.pool.worker import run

    run(config, rank)
