"""GGUF files of LongCat-Video-Avatar through ComfyUI-GGUF's own loader: they are what the file's numbers stand for.

That all devices together compute the same with them is a row of ``test_real_packs.py``.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.avatar_ranks import expected, inputs, load_avatar
from host.longcat_files import avatar_lora, avatar_weights, rekeyed
from host.real_packs.trial import REQUIREMENTS, packs_folder
from safetensors.torch import save_file
from torch import Tensor

FOLDER = packs_folder()
PACK = "ComfyUI-GGUF"
pytestmark = [
    pytest.mark.campaign,
    pytest.mark.usefixtures("comfyui_here"),
    pytest.mark.skipif(FOLDER is None or not (FOLDER / PACK).is_dir(), reason=f"no {PACK}: set SP_PACKS to run the cases with real packs"),
]
CASE = "ai2v_two.cond"
WRITE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import gguf
from files import write_gguf
write_gguf(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], gguf.GGMLQuantizationType[sys.argv[5]])
"""


@pytest.fixture(scope="module")
def pack(comfyui_here: str) -> Iterator[Any]:
    """The pack as ComfyUI imports it: a package in a folder whose name is no module's."""
    assert FOLDER is not None
    before = list(sys.path)
    sys.path.append(str(FOLDER / REQUIREMENTS))
    spec = importlib.util.spec_from_file_location(
        "gguf_pack", FOLDER / PACK / "__init__.py", submodule_search_locations=[str(FOLDER / PACK)]
    )
    assert spec is not None and spec.loader is not None
    module = sys.modules["gguf_pack"] = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        # ComfyUI's module of this name, of which only the pack's text encoder loaders need something; this repository has one, too
        patch.setitem(sys.modules, "nodes", types.ModuleType("nodes"))
        spec.loader.exec_module(module)
    yield module
    sys.path[:] = before


def write(state_dict: dict[str, Tensor], folder: Path, kind: str, architecture: str = "wan") -> Path:
    """A GGUF file, in a process that has the pack's requirements."""
    assert FOLDER is not None
    here, plain, made = Path(__file__).parent / "real_packs", folder / "plain.safetensors", folder / f"{architecture}_{kind}.gguf"
    save_file(state_dict, plain)
    environment = {"PYTHONPATH": str(FOLDER / REQUIREMENTS)}
    subprocess.run([sys.executable, "-c", WRITE, str(here), str(plain), str(made), architecture, kind], check=True, env=environment)
    return made


def loaded(pack: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A ModelPatcher of the pack's advanced loader, which multiplies in fp32."""
    import folder_paths

    from sp_core.models.registration import register_models

    assert register_models()
    monkeypatch.setattr(folder_paths, "get_full_path", lambda kind, name: name)
    return pack.NODE_CLASS_MAPPINGS["UnetLoaderGGUFAdvanced"]().load_unet(str(path), "float32", "float32", False)[0]


def meant(pack: Any, path: Path, comfyui: str, folder: Path) -> Any:
    """A model of the numbers that the file stands for."""
    dequantised = {
        key: torch.Tensor(sys.modules["gguf_pack.dequant"].dequantize_tensor(value, torch.float32, torch.float32)).contiguous()
        for key, value in sys.modules["gguf_pack.loader"].gguf_sd_loader(str(path)).items()
    }
    save_file({key: value.clone() for key, value in dequantised.items()}, folder / "meant.safetensors")
    return load_avatar(comfyui, folder / "meant.safetensors")


@pytest.mark.parametrize("layout", ["official", "rekeyed"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_gguf_file_is_what_its_numbers_stand_for(
    pack: Any, comfyui_here: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, kind: str
) -> None:
    path = write(avatar_weights() if layout == "official" else rekeyed(avatar_weights()), tmp_path, kind)
    patcher = loaded(pack, path, monkeypatch)
    model = patcher.model.diffusion_model
    assert type(model).__name__ == "LongCatAvatarModel" and model.blocks[0].ffn.w1.is_ggml_quantized()
    assert patcher.model.get_dtype_inference() == torch.float32
    out = -model(**inputs(CASE))
    other = -meant(pack, path, comfyui_here, tmp_path).model.diffusion_model(**inputs(CASE))
    torch.testing.assert_close(out, other, atol=1e-5, rtol=0)
    assert (out - expected(CASE)).abs().max() > 1e-3, "nothing was quantised"


@pytest.mark.parametrize("layout", ["official", "rekeyed"])
def test_a_lora_on_a_gguf_file(
    pack: Any, comfyui_here: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    import comfy.model_management
    import comfy.sd

    path = write(avatar_weights() if layout == "official" else rekeyed(avatar_weights()), tmp_path, "Q8_0")
    outputs = []
    for patcher in (loaded(pack, path, monkeypatch), meant(pack, path, comfyui_here, tmp_path)):
        plain = patcher.model.diffusion_model(**inputs(CASE))
        patched, _ = comfy.sd.load_lora_for_models(patcher, None, avatar_lora(), 1.0, 0)
        assert not [record for record in caplog.records if "not loaded" in record.message.lower()]
        comfy.model_management.load_models_gpu([patched], force_full_load=True)
        outputs.append(patched.model.diffusion_model(**inputs(CASE)))
        assert (outputs[-1] - plain).abs().max() > 1e-2
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)


def test_an_architecture_that_the_pack_does_not_know_is_refused_by_it(pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page for users says of such files."""
    path = write(rekeyed(avatar_weights()), tmp_path, "Q8_0", "longcat")
    with pytest.raises(ValueError, match="Unexpected architecture type in GGUF file: 'longcat'"):
        loaded(pack, path, monkeypatch)
