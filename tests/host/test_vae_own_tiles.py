"""A VAE whose class cuts every frame into tiles: the devices compute them at once, and its own code joins them."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from distributed.ranks import RankPool
from host.vaes import serve_own_tiles


def test_the_tiles_of_minimax_h3_are_spread(comfyui: Path) -> None:
    if not (comfyui / "comfy" / "ldm" / "minimax" / "vae.py").exists():
        pytest.skip("this ComfyUI has no MiniMax-H3")
    with RankPool(1, functools.partial(serve_own_tiles, str(comfyui))) as pool:
        # of 64 x 64 pixels, which overlap by 16: three times two, in each of three chunks of frames
        cases = {
            ("decode", 1, 9, 6): [3, 3],
            ("decode", 12, 9, 6): [3, 3] * 2,
            ("encode", 1, 144, 96): [3, 3],
            ("encode", 22, 64, 96): [2, 2],
        }
        for case, asked in cases.items():
            (answer,) = pool.call(*case)
            assert answer["same"] and answer["alive"] > 1e-3, case
            assert answer["asked"] == asked, case
