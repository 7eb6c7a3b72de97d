"""What the workers do right now, as plain data and as the route ``GET /sp/status``. Reading it never waits for a worker and starts none."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ...pool.processes import resident_bytes
from .. import comfy_api
from .session import session

if TYPE_CHECKING:
    from ...pool.coordinator import Pool
    from .remote_model import RemoteModel

#: of how many forwards of the newest sampling run the times are shown
LAST_FORWARDS = 10


def status() -> dict[str, Any]:
    """The pools, their workers, and the patched MODELs that ComfyUI holds.

    Sizes are bytes, times seconds. ``state``: none, starting (some pool still starts), ready.
    """
    current = session()
    pools = [models.pool for models in current.pools]
    return {
        "state": "none" if not pools else "ready" if all(pool.usable for pool in pools) else "starting",
        "workers": [worker for pool in pools for worker in _workers(pool)],
        "models": [_model(model) for model in current.models],
    }


def register_routes() -> bool:
    """Add ``GET /sp/status`` to ComfyUI's server. Returns false where there is no server (tests, command line)."""
    routes = comfy_api.server_routes()
    if routes is None:
        return False
    from aiohttp import web

    @routes.get("/sp/status")
    async def get_status(request: Any) -> Any:
        # reading /proc takes a moment, and the event loop has others to serve
        return web.json_response(await asyncio.get_running_loop().run_in_executor(None, status))

    return True


def _workers(pool: Pool) -> list[dict[str, Any]]:
    pids, codes = pool.workers.pids(), pool.workers.exit_codes()
    workers = []
    for rank, device in enumerate(pool.devices):
        state = pool.shared_state.ranks[rank]
        workers.append(
            {
                "pool": [str(other) for other in pool.devices],
                "rank": rank,
                "pid": pids.get(rank),
                "device": str(device),
                "alive": rank in pids and rank not in codes,
                "phase": state.phase.text,
                "block": state.block,
                "blocks": state.blocks,
                "weight_bytes": state.weight_bytes,
                "resident_bytes": resident_bytes(pids[rank]) if rank in pids else None,
            }
        )
    return workers


def _model(model: RemoteModel) -> dict[str, Any]:
    run = model.stats
    return {
        "key": model.recipe.key,
        "architecture": model.plan.architecture,
        "devices": [str(device) for device in model.devices],
        "keep_loaded": model.keep_loaded,
        "weight_bytes": model.weight_bytes,
        "on_devices": model.bytes_on_devices() > 0,
        "forwards": len(run.forward_s),
        "last_forwards_s": [round(seconds, 4) for seconds in run.forward_s[-LAST_FORWARDS:]],
        "decision": run.decision,
        "transport": run.transport,
    }
