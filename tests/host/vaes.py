"""ComfyUI's own VAEs, tiny, with random weights: decode and encode in one process, and the same on bands over ranks.

Run as a script it writes their files: ``python vaes.py <ComfyUI> <folder>``.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import json
import sys
import traceback
import types
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def _random_weights(vae: Any) -> dict[str, Tensor]:
    from sp_core.demo.checkpoints import random_weights

    # by their scale it divides
    scales = {name: tensor for name, tensor in vae.state_dict().items() if "latent" in name}
    return {**random_weights(vae, 17), **scales}


_WAN = {"dim": 8, "z_dim": 4, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
_HUNYUAN = {
    "double_z": True,
    "z_channels": 4,
    "resolution": 256,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 32,
    "ch_mult": [1, 1, 2, 2],
    "num_res_blocks": 1,
    "attn_resolutions": [],
    "dropout": 0.0,
    "conv3d": True,
    "time_compress": 4,
}
_HUNYUAN_15 = {
    "in_channels": 3,
    "out_channels": 3,
    "z_channels": 8,
    "block_out_channels": [16, 32, 32],
    "num_res_blocks": 1,
    "ffactor_spatial": 4,
    "ffactor_temporal": 2,
    "downsample_match_channel": True,
    "upsample_match_channel": True,
}
#: three levels, of which two halve the frames as well
_LTX = {
    "dims": 3,
    "latent_channels": 128,
    "encoder_blocks": [
        *(["res_x", 1], ["compress_space_res", {"multiplier": 2}], ["compress_all_res", {"multiplier": 2}]),
        *(["compress_all_res", {"multiplier": 2}], ["res_x", 1]),
    ],
    "decoder_blocks": [
        *(["res_x", 1], ["compress_all", {"residual": True, "multiplier": 2}], ["compress_space", {"multiplier": 2}]),
        *(["compress_all", {"residual": True, "multiplier": 2}], ["res_x", 1]),
    ],
    "encoder_base_channels": 16,
    "decoder_base_channels": 16,
    "norm_layer": "pixel_norm",
    "patch_size": 4,
    "latent_log_var": "uniform",
    "timestep_conditioning": False,
}

_VIDEO_VAE = ("comfy.ldm.lightricks.vae.causal_video_autoencoder", "VideoVAE")


def _engine(params: dict[str, Any]) -> dict[str, Any]:
    parts = {"encoder_config": "hunyuan_video.vae_refiner.Encoder", "decoder_config": "hunyuan_video.vae_refiner.Decoder"}
    configs: dict[str, Any] = {name: {"target": f"comfy.ldm.{target}", "params": params} for name, target in parts.items()}
    return {**configs, "regularizer_config": {"target": "comfy.ldm.models.autoencoder.EmptyRegularizer"}}


def with_arguments(arguments: dict[str, Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Of a class, what makes it with these arguments, whatever it is called with."""
    return lambda kind: lambda **given: kind(**{**given, **arguments})


@dataclass(frozen=True)
class TinyVAE:
    """A class of ComfyUI and its arguments."""

    module: str
    class_name: str
    arguments: dict[str, Any]
    latent_channels: int
    #: pixels for each place of the latent, in height and width
    ratio: int
    #: (latent frames, frames of pixels) that are tried
    frames: tuple[tuple[int, int], ...] = ((1, 1), (3, 9))
    input_channels: int = 3
    #: rows of the latent that are tried; a frame of one row cannot be padded by its mirror image, as LTX does
    heights: tuple[int, ...] = (7, 3, 1)
    metadata: dict[str, str] | None = None
    #: of the module, what makes the class smaller than its arguments can
    smaller: dict[str, Any] = field(default_factory=dict)
    weights: Callable[[Any], dict[str, Tensor]] = field(default=lambda vae: _random_weights(vae))

    def build(self) -> Any:
        vae = self._made()
        vae.load_state_dict(self.weights(vae))
        return vae.eval().requires_grad_(False)

    def _made(self) -> Any:
        module = importlib.import_module(self.module)
        changed = {name: change(getattr(module, name)) for name, change in self.smaller.items()}
        with unittest.mock.patch.dict(vars(module), changed):
            return getattr(module, self.class_name)(**self.arguments)

    def write(self, path: Path) -> None:
        """A file that ComfyUI's VAELoader takes for this class."""
        from safetensors.torch import save_file

        vae = self._made()
        save_file(self.weights(vae), path, self.metadata)

    def inputs(self, method: str, height: int, frames: int) -> Tensor:
        channels, scale = (self.latent_channels, 1) if method == "decode" else (self.input_channels, self.ratio)
        shape = (1, channels, frames, height * scale, 3 * scale)
        return torch.randn(shape, generator=torch.Generator().manual_seed(23))


VAES: dict[str, TinyVAE] = {
    "Wan 2.1": TinyVAE("comfy.ldm.wan.vae", "WanVAE", _WAN, 4, 8),
    "Wan 2.2": TinyVAE("comfy.ldm.wan.vae2_2", "WanVAE", {**_WAN, "dec_dim": 8}, 4, 16),
    "LTX-Video": TinyVAE(*_VIDEO_VAE, {"config": _LTX}, 128, 32, heights=(7, 3, 2)),
    "HunyuanVideo": TinyVAE("comfy.ldm.models.autoencoder", "AutoencoderKL", {"ddconfig": _HUNYUAN, "embed_dim": 4}, 4, 8),
    "HunyuanVideo 1.5": TinyVAE("comfy.ldm.models.autoencoder", "AutoencodingEngine", _engine(_HUNYUAN_15), 8, 4, ((1, 1), (3, 5))),
}

_COG = {"block_out_channels": (32, 32, 64, 64), "latent_channels": 4, "layers_per_block": 1}
VAES["CogVideoX"] = TinyVAE("comfy.ldm.cogvideo.vae", "AutoencoderKLCogVideoX", _COG, 4, 8, ((1, 1), (3, 9), (6, 21)))

_MOCHI = {"base_channels": 32, "channel_multipliers": [1, 2, 1, 2], "num_res_blocks": [1, 1, 1, 1, 1]}
_SMALL_MOCHI = dict.fromkeys(("Encoder", "Decoder"), with_arguments(_MOCHI))
VAES["Mochi"] = TinyVAE("comfy.ldm.genmo.vae.model", "VideoVAE", {}, 12, 8, ((1, 1), (3, 7)), smaller=_SMALL_MOCHI)
_COSMOS = {
    "z_channels": 4,
    "latent_channels": 4,
    "z_factor": 1,
    "in_channels": 3,
    "out_channels": 3,
    "channels": 16,
    "channels_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "resolution": 32,
    "attn_resolutions": [4],
    "dropout": 0.0,
    "patch_size": 4,
    "num_groups": 1,
    "temporal_compression": 8,
    "spatial_compression": 8,
}
VAES["Cosmos"] = TinyVAE("comfy.ldm.cosmos.vae", "CausalContinuousVideoTokenizer", _COSMOS, 4, 8)
VAES["SeedVR2"] = TinyVAE(
    *("comfy.ldm.seedvr.vae", "VideoAutoencoderKLWrapper", {}, 16, 8, ((1, 1), (4, 13))),
    smaller={"BYTEDANCE_BLOCK_OUT_CHANNELS": lambda channels: (32, 32, 64, 64)},
)

#: it computes tiles by itself
_SMALL_VIT = {"ViT3DDecoder": with_arguments({"num_layers": 1, "heads": 2, "dim_head": 32})}
MINIMAX_H3 = TinyVAE(
    *(
        "comfy.ldm.minimax.vae",
        "MiniMaxH3VideoVAE",
        {"ch": 32, "ch_mult": (1,) * 6, "num_res_blocks": 1, "tile_size": 64, "tile_overlap_min": 16},
    ),
    *(24, 16),
    smaller=_SMALL_VIT,
)


#: with the numbers that ComfyUI's loader expects: its tiles are joined by them
_LTX_EIGHT = {
    **_LTX,
    "encoder_blocks": [["res_x", 1], *[["compress_all_res", {"multiplier": 2}]] * 3, ["res_x", 1]],
    "decoder_blocks": [["res_x", 1], *[["compress_all", {"residual": True, "multiplier": 2}]] * 3, ["res_x", 1]],
}
_LTX_FILE = {"config": json.dumps({"vae": _LTX_EIGHT})}
#: it has no decode plan
_TAESD = TinyVAE("comfy.taesd.taesd", "TAESD", {"latent_channels": 4}, 4, 8)
#: the encoder is as wide as the release's, for the loader takes no other
_SD = {
    **{name: value for name, value in _HUNYUAN.items() if name not in ("conv3d", "time_compress")},
    "ch": 128,
    "ch_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
}
_SD_VAE = TinyVAE(
    "comfy.ldm.models.autoencoder", "AutoencoderKL", {"ddconfig": _SD, "decoder_ddconfig": {**_SD, "ch": 32}, "embed_dim": 4}, 4, 8
)
#: are written only where a test asks for them by name
LARGE = {"tiny_sd_vae": _SD_VAE}
FILES: dict[str, TinyVAE] = {
    "tiny_taesd_vae": _TAESD,
    "tiny_wan21_vae": TinyVAE("comfy.ldm.wan.vae", "WanVAE", {**_WAN, "z_dim": 16, "num_res_blocks": 2}, 16, 8),
    "tiny_ltx_vae": TinyVAE(*_VIDEO_VAE, {"config": _LTX_EIGHT}, 128, 32, metadata=_LTX_FILE),
}


@contextlib.contextmanager
def chunks_of_its_own() -> Iterator[None]:
    """Each rank has another amount of free memory, from which LTX's VAE takes the size of its chunks of frames."""
    import comfy.ldm.lightricks.vae.causal_video_autoencoder as host
    import torch.distributed as dist

    right = host.get_max_chunk_size
    # a multiple of the tests' seven rows
    host.get_max_chunk_size = lambda device: 21_000 * (1 + dist.get_rank())
    try:
        yield
    finally:
        host.get_max_chunk_size = right


@contextlib.contextmanager
def counted_convolutions(vae: torch.nn.Module) -> Iterator[list[None]]:
    """As many entries as convolutions of ``vae`` are computed meanwhile."""
    calls: list[None] = []
    with contextlib.ExitStack() as undo:
        for module in vae.modules():
            if isinstance(module, torch.nn.Conv3d):
                undo.callback(module.register_forward_pre_hook(lambda *_: calls.append(None)).remove)
        yield calls


def computes(plan: Any, vae: Any, method: str) -> Callable[[Tensor], Tensor]:
    """What of ``vae`` runs in the workers for decode or encode; where that is a module, the method around it runs with it."""
    call = plan.calls[method == "encode"]
    plan.before_call(vae, torch.device("cpu"))
    return getattr(vae, method if isinstance(getattr(vae, call), torch.nn.Module) else call)  # type: ignore[no-any-return]


def serve(comfyui: str, rank: int, world_size: int) -> Callable[..., dict[str, Any] | None]:
    """One rank: answers (VAE, method, rows of the latent, frames, ranks) with the errors of its rows."""
    import torch.distributed as dist
    from distributed.longcat_ranks import enter_host

    enter_host(comfyui)
    from sp_core.comm import CollectiveTransport
    from sp_core.comm.point_to_point import PointToPoint
    from sp_core.demo.run import relative_l2
    from sp_core.layout.bands import cut_bands
    from sp_core.vae import BandEngine, RowExchange, plan_for, why_not

    groups = {size: dist.new_group(list(range(size))) for size in range(1, world_size + 1)}
    vaes: dict[str, Any] = {}

    @torch.inference_mode()
    def compared(
        name: str, method: str, height: int, frames: int, size: int, spoil: Callable[[], Any], dtype: torch.dtype
    ) -> dict[str, Any]:
        vae = vaes.setdefault(name, VAES[name].build() if name not in vaes else None)
        plan = plan_for(vae)
        assert plan is not None and why_not(plan, vae) is None
        assert plan.ratio(vae) == VAES[name].ratio
        whole = VAES[name].inputs(method, height, frames)
        expected = computes(plan, vae, method)(whole)
        if dtype != torch.float32:
            vae, whole = copy.deepcopy(vae).to(dtype), whole.to(dtype)
        with spoil(), counted_convolutions(vae) as of_one:
            one_device = computes(plan, vae, method)(whole)
        bands = cut_bands(height, size)
        if rank >= bands.ranks:
            return {"idle": True}
        neighbours = PointToPoint(groups[bands.ranks])
        exchange = RowExchange(neighbours, CollectiveTransport(groups[bands.ranks]))
        start, stop = bands.scaled(whole.size(-2) // height).range(rank)
        with spoil(), counted_convolutions(vae) as of_band, BandEngine(plan, bands, exchange).installed(vae):
            out = computes(plan, vae, method)(whole[..., start:stop, :])
        start, stop = bands.scaled(expected.size(-2) // height).range(rank)
        wanted = expected[..., start:stop, :]
        if method == "decode" and plan.decoded_shape is not None:
            assert plan.decoded_shape(vae, whole.shape) == tuple(expected.shape)
        assert out.shape == wanted.shape and out.dtype == one_device.dtype
        return {
            "error": relative_l2(out, wanted),
            "at cuts": max(relative_l2(out[..., row, :], wanted[..., row, :]) for row in (0, out.size(-2) - 1)),
            "one device": relative_l2(one_device[..., start:stop, :], wanted),
            "alive": float(expected.std()),
            "messages": neighbours.stats.exchanges,
            "bytes": neighbours.stats.bytes_sent,
            "convolutions": len(of_band),
            "convolutions on one device": len(of_one),
        }

    def answer(
        name: str,
        method: str,
        height: int,
        frames: int,
        size: int,
        spoil: Callable[[], Any] = contextlib.nullcontext,
        dtype: torch.dtype = torch.float32,
    ) -> dict[str, Any] | None:
        try:
            return compared(name, method, height, frames, size, spoil, dtype) if rank < size else None
        except Exception:
            # not raised: the ranks stay in step for the next case
            return {"failure": traceback.format_exc()}

    return answer


def serve_own_tiles(comfyui: str, rank: int, world_size: int) -> Callable[..., dict[str, Any]]:
    """Answers (method, shape) with what three devices were asked for, where the class of MiniMax H3 cuts frames into tiles."""
    from distributed.longcat_ranks import enter_host

    enter_host(comfyui)
    from sp_core.host.ui.vae_module import make_stand_in_vae
    from sp_core.host.ui.watch import VaeWatch
    from sp_core.vae import plan_for, why_not

    vae = MINIMAX_H3.build()
    plan = plan_for(vae)
    assert plan is not None and why_not(plan, vae) is None and plan.ratio(vae) == MINIMAX_H3.ratio

    class Devices:
        """The tiles that each of three is given, computed here."""

        ranks = 3

        def __init__(self) -> None:
            self.asked: list[int] = []

        def compute_tiles(self, method: str, tiles: list[Tensor]) -> list[Tensor]:
            self.asked.append(len(tiles))
            return [getattr(vae, method)(tile) for tile in tiles]

    @torch.inference_mode()
    def answer(method: str, frames: int, height: int, width: int) -> dict[str, Any]:
        channels = 24 if method == "decode" else 3
        x = torch.randn((1, channels, frames, height, width), generator=torch.Generator().manual_seed(29))
        devices = Devices()
        shared = make_stand_in_vae(vae, plan, devices, VaeWatch(vae, types.SimpleNamespace(object_patches_backup={}, backup={})))
        expected = getattr(vae, method)(x)
        return {"same": torch.equal(getattr(shared, method)(x), expected), "alive": float(expected.std()), "asked": devices.asked}

    return answer


def write_upscaler(path: Path) -> None:
    """A file that ComfyUI's LatentUpscaleModelLoader takes for LTX's."""
    import comfy.ops
    from comfy.ldm.lightricks.latent_upsampler import LatentUpsampler
    from safetensors.torch import save_file

    config = {
        "in_channels": 128,
        "mid_channels": 32,
        "num_blocks_per_stage": 1,
        "dims": 3,
        "spatial_upsample": True,
        "temporal_upsample": False,
    }
    # older hosts make it of torch's own layers
    takes = inspect.signature(LatentUpsampler.from_config).parameters
    upscaler = LatentUpsampler.from_config(config, **({"operations": comfy.ops.disable_weight_init} if "operations" in takes else {}))
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(_random_weights(upscaler), path, {"config": json.dumps(config)})


if __name__ == "__main__":
    host, target, *large = sys.argv[1:]
    del sys.argv[1:]
    sys.path[:0] = [host, str(Path(__file__).resolve().parents[2])]
    from comfy.cli_args import args

    args.cpu = True
    Path(target).mkdir(parents=True, exist_ok=True)
    for file_name, tiny in {**FILES, **{name: LARGE[name] for name in large}}.items():
        tiny.write(Path(target) / f"{file_name}.safetensors")
    write_upscaler(Path(target).parent / "latent_upscale_models" / "tiny_ltx_upscaler.safetensors")
