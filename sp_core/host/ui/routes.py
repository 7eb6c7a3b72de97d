"""Routes on the host's own server: ``GET /sp/status``."""

from __future__ import annotations

import asyncio
from typing import Any

from .. import comfy_api
from .status import status


def register_routes() -> bool:
    """Add the routes, once the server exists; false where there is none (tests, command line)."""
    routes = comfy_api.server_routes()
    if routes is None:
        return False
    from aiohttp import web

    @routes.get("/sp/status")
    async def get_status(request: Any) -> Any:
        # reading /proc takes a moment, and the event loop has others to serve
        return web.json_response(await asyncio.get_running_loop().run_in_executor(None, status))

    return True
