"""Runs the probes on one ComfyUI. ``python comfy_api_probes.py <ComfyUI>`` prints JSON: probe -> problem or ""."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from probes import PROBES


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
