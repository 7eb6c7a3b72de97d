"""Real node packs beside SP Model Patch: the picture is stock's, or the prompt is refused in a true sentence.

The packs are checked out by whoever runs this (``SP_PACKS``); nothing of them is in this repository.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from host.boundary import base_beside
from host.family_checkpoints import write_families
from host.real_packs.cases import Case, Setting
from host.real_packs.rows import CASES
from host.real_packs.trial import Trial, chosen, environment, expected, keep, link_packs, packs_folder, write_files

from sp_core.demo.comfy_server import ComfyServer

FOLDER = packs_folder()
pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(FOLDER is None, reason="no checked out node packs: set SP_PACKS to run the cases with real packs"),
]


def rows() -> list[object]:
    found = chosen(CASES, lambda pack: FOLDER is not None and (FOLDER / pack).is_dir())
    return [pytest.param(*row, id=f"{row[0].id}-{row[1]}-{row[2].name}") for row in found]


@pytest.fixture(scope="module")
def trial(comfyui: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    assert FOLDER is not None
    folder = base_beside(base, tmp_path_factory.mktemp("packs"))
    link_packs(FOLDER, folder)
    write_families(comfyui, base, ["tiny_hunyuan", "tiny_hunyuan_i2v", "tiny_hunyuan15", "tiny_minimax"])
    write_files(FOLDER, base / "models")
    with ComfyServer(comfyui, folder, "--cpu", environment={"SP_VERIFY_RANKS": "1", **environment(FOLDER)}) as server:
        yield Trial(server)


@pytest.mark.parametrize(("case", "side", "setting"), rows())
def test_never_a_wrong_picture(trial: Trial, case: Case, side: str, setting: Setting) -> None:
    found = trial.run(case, side, setting)
    if os.environ.get("SP_PACKS_RESULTS"):
        keep(Path(os.environ["SP_PACKS_RESULTS"]), {"case": case.id, "side": side, "setting": setting.name, **vars(found)})
    assert found.verdict == expected(case, side), str(found)
    if found.effect is not None:
        assert case.changes in (None, found.effect > 1e-4), f"{case.node} changes the picture by {found.effect:.2g}"
