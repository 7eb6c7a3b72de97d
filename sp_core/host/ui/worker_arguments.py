"""The command line of ComfyUI's process, as its workers get it."""

from __future__ import annotations

from collections.abc import Sequence

#: flags that belong to the server, to device choice or to the caches of ComfyUI's process; value = how many words follow
#: (None: all words up to the next flag)
_NOT_FOR_WORKERS: dict[str, int | None] = {
    "--listen": None,
    "--port": 1,
    "--tls-keyfile": 1,
    "--tls-certfile": 1,
    "--enable-cors-header": None,
    "--auto-launch": 0,
    "--disable-auto-launch": 0,
    "--windows-standalone-build": 0,
    "--cuda-device": 1,
    "--default-device": 1,
    "--oneapi-device-selector": 1,
    "--enable-manager": 0,
    "--enable-manager-legacy-ui": 0,
    "--disable-manager-ui": 0,
    "--quick-test-for-ci": 0,
    "--disable-all-custom-nodes": 0,
    "--whitelist-custom-nodes": None,
    "--disable-api-nodes": 0,
    "--database-url": 1,
    "--enable-assets": 0,
    "--enable-asset-hashing": 0,
    "--multi-user": 0,
    "--debug-hang": 0,
    "--log-stdout": 0,
    "--list-feature-flags": 0,
    "--front-end-version": 1,
    "--front-end-root": 1,
    "--cache-ram": None,
    "--cache-classic": 0,
    "--cache-lru": 1,
    "--cache-none": 0,
    "--verbose": None,
}

#: the host does not start with one of these and --cpu
_NOT_WITH_CPU = ("--gpu-only", "--highvram", "--normalvram", "--lowvram", "--novram", "--enable-dynamic-vram")


def worker_arguments(argv: Sequence[str], cpu: bool) -> list[str]:
    """Flags for a worker: memory, attention, precision and paths as in ComfyUI's process, no server, no packs.

    Node packs are loaded one by one when a replayed graph needs them.

    Args:
        argv: the flags of ComfyUI's process, without the program name.
        cpu: the worker computes on the CPU whatever ComfyUI's process does.
    """
    kept: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, _, attached = word.partition("=")
        if flag not in _NOT_FOR_WORKERS:
            kept.append(word)
            continue
        follow = _NOT_FOR_WORKERS[flag]
        if not attached:
            while words and (follow is None or follow > 0) and not words[0].startswith("--"):
                words.pop(0)
                follow = None if follow is None else follow - 1
    kept += ["--disable-all-custom-nodes", "--disable-api-nodes"]
    if cpu and "--cpu" not in kept:
        kept = [word for word in kept if word not in _NOT_WITH_CPU] + ["--cpu"]
    return kept
