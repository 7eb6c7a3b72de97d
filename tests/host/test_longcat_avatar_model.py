"""LongCat-Video-Avatar in one process, through the host's own loading and sampling: every output of the reference, and its traps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from distributed.avatar_ranks import (
    AUDIO,
    CACHED,
    FIXTURE,
    FORWARDS,
    TEXT,
    context,
    expected,
    forward,
    inputs,
    load_avatar,
    reference,
)
from torch import Tensor

pytestmark = pytest.mark.usefixtures("comfyui_here")

TOLERANCE = 1e-5
VECTORS = json.loads((FIXTURE.parent / "longcat_avatar_vectors.json").read_text())


@pytest.fixture(scope="module")
def patcher(comfyui_here: str) -> Any:
    return load_avatar(comfyui_here)


@pytest.fixture
def model(patcher: Any) -> Iterator[Any]:
    yield patcher.model.diffusion_model
    patcher.model.diffusion_model.clear_cache()


# -- forwards -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*FORWARDS, *CACHED])
def test_equals_the_reference(model: Any, case: str) -> None:
    difference = (forward(model, case) - expected(case)).abs().max().item()
    print(f"\n{case}: max abs difference {difference:.2e}")
    assert difference <= TOLERANCE


@pytest.mark.parametrize("kind", ["at2v", "ai2v", "ai2v_two", "avc", "avc_two"])
def test_three_branches(patcher: Any, model: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Summed in fp32 by the host's own guider, as a user's sampling is. The sum's weights add up to 1: velocities serve as pictures do."""
    import comfy.samplers
    from comfy_extras.nodes_custom_sampler import Guider_DualCFG

    outputs = [forward(model, f"{kind}.{branch}") for branch in ("uncond", "uncond_text", "cond")]
    monkeypatch.setattr(comfy.samplers, "calc_cond_batch", lambda *arguments: outputs)
    guider = Guider_DualCFG(patcher)
    guider.inner_model, guider.conds = patcher.model, {}
    guider.set_cfg(TEXT, AUDIO)
    out = guider.predict_noise(outputs[0], torch.tensor([0.7]))
    assert out.dtype == torch.float32
    difference = (out - expected(f"{kind}.guided")).abs().max().item()
    print(f"\n{kind}: max abs difference {difference:.2e}")
    assert difference <= TOLERANCE


@pytest.mark.parametrize("kind", ["ai2v_two", "ai2v_three"])
def test_who_looks_at_whom(model: Any, kind: str) -> None:
    """What lies between: audio tokens, maps, places of queries and keys on the line."""
    from sp_core.models.longcat.people import extremes, key_places, query_places

    given = inputs(f"{kind}.cond")
    maps: list[Tensor] = []
    hooks = [block.audio_cross_attn.extremes.register_forward_pre_hook(lambda module, args: maps.append(args[0])) for block in model.blocks]
    model(**given)
    for hook in hooks:
        hook.remove()
    mid = {key.rpartition(".")[2]: value for key, value in reference().items() if key.startswith(f"mid.{kind}.")}
    torch.testing.assert_close(torch.cat(maps).movedim(2, 1), mid["maps"], atol=1e-6, rtol=0)
    places = torch.cat([query_places(each, extremes(each)) for each in maps])
    torch.testing.assert_close(places, mid["q_pos"], atol=1e-4, rtol=0)
    voices, count = given["audio_embed"].size(1), maps[0].size(2)
    one = key_places(voices, 4, count, torch.device("cpu"))
    torch.testing.assert_close(one.repeat(6), mid["k_pos"])
    if "audio_tokens" in mid:
        tokens = model.project_audio(given["audio_embed"], given["x"])
        torch.testing.assert_close(tokens[0].unflatten(1, (2, 4)).movedim(1, 0), mid["audio_tokens"], atol=1e-6, rtol=0)


@pytest.mark.parametrize("vector", VECTORS["masked_noise_frames"], ids=str)
def test_frames_that_do_not_see_the_reference(vector: dict[str, Any]) -> None:
    from sp_core.models.longcat.avatar import hidden_frames

    found = hidden_frames(vector["ref_img_index"], vector["mask_frame_range"], vector["num_cond_latents"], vector["noisy"])
    assert ([found.start, found.stop] if found else None) == vector["range"]


@pytest.mark.parametrize("vector", VECTORS["key_positions"], ids=str)
def test_places_of_keys(vector: dict[str, Any]) -> None:
    from sp_core.models.longcat.people import key_places

    places = key_places(vector["people"], vector["tokens_a_person"], vector["masks"], torch.device("cpu"))
    assert places.tolist() == vector["positions"]


def test_silence_is_no_audio(model: Any) -> None:
    """Trap 6: zeros in the features, which are not zeros in the tokens."""
    given = inputs("ai2v.uncond")
    torch.testing.assert_close(model(**{**given, "audio_embed": None}), model(**given), atol=1e-6, rtol=0)


def test_masks_mean_nothing_to_one_voice(model: Any) -> None:
    """Trap 2."""
    given = inputs("ai2v.cond")
    assert torch.equal(model(**given, people_masks=reference()["in.masks"][None, :3]), model(**given))


def test_two_videos_at_once_are_as_each_alone(model: Any) -> None:
    """ComfyUI may batch the branches: people's statistics are of each item."""
    each = [inputs(f"ai2v_two.{branch}") for branch in ("cond", "uncond")]
    joined = {key: torch.cat([given[key] for given in each]) for key in ("x", "timestep", "context", "audio_embed", "people_masks")}
    together = model(**joined, num_cond_latents=1)
    for item, given in enumerate(each):
        torch.testing.assert_close(together[item : item + 1], model(**given), atol=TOLERANCE, rtol=0)


def test_the_reference_frame_counts_as_a_frame_of_memory(patcher: Any) -> None:
    base = patcher.model
    shapes = base.extra_conds_shapes(reference_latents=[torch.zeros(1, 16, 1, 8, 12)])
    assert shapes == {"reference_latent": [1, 16, 1, 8, 12]} and base.extra_conds_shapes() == {}
    with_reference = base.memory_required([1, 16, 7, 8, 12], {name: [shape] for name, shape in shapes.items()})
    assert with_reference == pytest.approx(base.memory_required([1, 16, 8, 8, 12]))
    assert with_reference > base.memory_required([1, 16, 7, 8, 12])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"audio_embed": torch.zeros(1, 1, 21, 5, 3, 8)}, "audio is for a video of 21 frames, this one has 25"),
        ({"audio_embed": torch.zeros(1, 1, 25, 5, 5, 8)}, "5 x 8 features a frame, this Avatar model takes 24"),
        ({"audio_embed": torch.zeros(1, 2, 25, 5, 3, 8)}, "Several voices need a mask"),
        ({"transformer_options": {"longcat_block_sparse": {}}}, "not for its Avatar"),
        ({"num_cond_latents": None, "denoise_mask": torch.zeros(1, 16, 7, 8, 12)}, "noise mask keeps every frame"),
    ],
)
def test_what_does_not_fit_is_told(model: Any, changed: dict[str, Any], message: str) -> None:
    from sp_core.errors import SPError

    with pytest.raises(SPError, match=message):
        model(**{**inputs("at2v.cond"), **changed})


# -- sampling through the host --------------------------------------------------------------


def conditionings(kind: str, **values: Any) -> list[list[Any]]:
    """cond, uncond_text and uncond as LongCat Avatar Conditioning gives them."""
    given = inputs(f"{kind}.cond")
    shared = {name: given[key] for name, key in (("longcat_people_masks", "people_masks"),) if key in given} | values
    silent = torch.zeros_like(given["audio_embed"])
    return [
        [[context([row]), {**shared, "audio_embed": sound}]]
        for row, sound in ((1, given["audio_embed"]), (0, given["audio_embed"]), (0, silent))
    ]


def start_of(kind: str) -> Tensor | None:
    """Clean first frames in the model's space."""
    if kind.startswith("avc"):
        return reference()["in.previous_reencoded"]
    return reference()["in.image_latent"] if kind.startswith("ai2v") else None


@pytest.mark.parametrize(
    ("name", "schedule", "scales"),
    [
        ("sample.at2v", ("base", 3, 12.0), (TEXT, AUDIO)),
        ("sample.ai2v", ("base", 3, 12.0), (TEXT, AUDIO)),
        ("sample.ai2v_two", ("base", 3, 12.0), (TEXT, AUDIO)),
        ("sample.avc", ("base", 3, 12.0), (TEXT, AUDIO)),
        ("sample.avc_two", ("base", 3, 12.0), (TEXT, AUDIO)),
        ("sample15.ai2v_distill", ("avatar_distill", 8, 7.0), (1.0, 1.0)),
        ("sample15.avc_two_distill", ("avatar_distill", 8, 7.0), (1.0, 1.0)),
        ("sample15.avc", ("base", 3, 7.0), (TEXT, AUDIO)),
    ],
)
def test_sampling_through_the_host(patcher: Any, monkeypatch: pytest.MonkeyPatch, name: str, schedule: Any, scales: Any) -> None:
    """The host's own guider of three branches and its euler sampler, with the cache where the reference has it."""
    import comfy.model_base
    import comfy.samplers
    from comfy_extras.nodes_custom_sampler import Guider_DualCFG

    from sp_core.models.longcat.config import LongCatVideo
    from sp_core.models.longcat.patches import with_kv_cache
    from sp_core.models.longcat.schedules import SCHEDULES

    version, kind_of_steps = "1.5" if name.startswith("sample15") else "1.0", " distill" if name.endswith("distill") else ""
    steps = VECTORS["schedules"][f"avatar-v{version} shift {schedule[2]:.0f} steps {schedule[1]}{kind_of_steps}"]
    known = torch.tensor(steps["timesteps"])

    def unrounded(self: Any, timestep: Tensor, **kwargs: Any) -> Tensor:
        """The fixture's timesteps: not rounded to bf16, and a bit of fp32 beside 1000 sigma."""
        nearest = known[(timestep[:, None] - known).abs().argmin(1)]
        assert (nearest - timestep).abs().max() < 1e-3
        return comfy.model_base.WAN22.process_timestep(self, nearest, **kwargs)

    monkeypatch.setattr(LongCatVideo, "process_timestep", unrounded)
    kind = name.partition(".")[2].removesuffix("_distill")
    data, base = reference(), patcher.model
    continuation = kind.startswith("avc")
    values: dict[str, Any] = {}
    if continuation:
        values["reference_latents"] = [base.process_latent_out(data["in.latent_continuation"][:, :, :1])]
        values |= {"longcat_reference_frame": 4, "longcat_hidden_around": 1}
        if version == "1.0":
            values["longcat_sampled_start"] = base.process_latent_out(data["in.previous_latent"][:, :, -2:])
    start = start_of(kind)
    noise = data["in.latent"][:1].clone()
    latent, mask = torch.zeros_like(noise), torch.ones_like(noise)
    if start is not None:
        latent[:, :, : start.size(2)], mask[:, :, : start.size(2)] = start, 0
    guider = Guider_DualCFG(with_kv_cache(patcher, "gpu") if continuation else patcher)
    guider.set_conds(*conditionings(kind, **values))
    guider.set_cfg(*scales)
    out = guider.sample(
        noise,
        base.process_latent_out(latent),
        comfy.samplers.sampler_object("euler"),
        SCHEDULES[schedule[0]](*schedule[1:]),
        denoise_mask=mask,
        disable_pbar=True,
    )
    out = base.process_latent_in(out)
    difference = (out - data[f"out.{name}"]).abs().max().item()
    print(f"\n{name}: max abs difference {difference:.2e}, of values up to {out.abs().max():.1f}")
    assert difference <= TOLERANCE


class Encoder:
    """In the place of a VAE: the mean of what it encodes."""

    def encode(self, pixels: Tensor) -> Tensor:
        return pixels.new_full((1, 16, (len(pixels) - 1) // 4 + 1, pixels.shape[1] // 8, pixels.shape[2] // 8), float(pixels.mean()))


#: the picture that the fixture's masks were painted over
IMAGE = torch.full((1, 90, 112, 3), 0.25)


def spoken(piece: Any, masks: Any = None) -> Any:
    """What the node gives for the fixture's voices, two of which speak where there are masks."""
    from sp_core.models.longcat.audio import Features
    from sp_core.models.longcat.avatar_node import Persons, condition

    # the fixture's features end before the piece that goes on, and are repeated there
    voices = [Features(values, 2, padded_nGC=values) for values in reference()["in.audio_features"][: 1 if masks is None else len(masks)]]
    text = [[context([1]), {}]]
    return condition(text, text, Encoder(), piece, voices, None if masks is None else Persons(masks), (4, 1))


def test_the_conditioning_node_gives_these_conditionings() -> None:
    """Windows, masks and order of the node against the fixture's, for two persons that go on."""
    from sp_core.models.longcat.avatar_node import Piece

    data = reference()
    masks = (data["in.masks_source"][:1], data["in.masks_source"][1:2])
    previous = torch.full((25, 64, 96, 3), 0.5)
    first = spoken(Piece(96, 64, 25, IMAGE), masks)
    assert torch.equal(first[0][0][1]["audio_embed"][0], data["in.audio"][:2])
    torch.testing.assert_close(first[0][0][1]["longcat_people_masks"][0, :2], data["in.masks"][:2])
    assert torch.equal(first[0][0][1]["longcat_people_masks"][0, 2] > 0, data["in.masks"][2] > 0)
    assert first[3]["noise_mask"][0, 0, :, 0, 0].tolist() == [0, 1, 1, 1, 1, 1, 1] and first[4] == 0
    following = spoken(Piece(96, 64, 25, IMAGE, previous, kept=5), masks)
    assert torch.equal(following[1][0][1]["audio_embed"][0], data["in.audio_next"][:2])
    assert not following[2][0][1]["audio_embed"].any()
    assert following[0][0][1]["reference_latents"][0].unique().tolist() == [0.25]
    assert following[3]["samples"][:, :, :2].unique().tolist() == [0.5] and following[4] == 5


def test_the_model_goes_on_from_what_was_sampled_and_the_vae_from_what_was_encoded_again() -> None:
    from sp_core.models.longcat.avatar_node import Piece

    sampled = {"samples": reference()["in.previous_latent"]}
    made = spoken(Piece(96, 64, 25, IMAGE, torch.full((25, 64, 96, 3), 0.5), sampled, kept=5))
    for conditioning in made[:3]:
        assert torch.equal(conditioning[0][1]["longcat_sampled_start"], sampled["samples"][:, :, -2:])
    assert made[3]["samples"][:, :, :2].unique().tolist() == [0.5]


BLANK, LEFT, RIGHT = torch.zeros(1, 90, 112), torch.zeros(1, 90, 112), torch.zeros(1, 90, 112)
LEFT[..., :56], RIGHT[..., 56:] = 1, 1


@pytest.mark.parametrize(
    ("piece", "masks", "message"),
    [
        ({"previous_latent": {"samples": torch.zeros(1, 16, 7, 8, 12)}}, None, "previous_latent .* Connect .* to previous_frames"),
        (
            {"previous": torch.zeros(25, 64, 96, 3), "previous_latent": {"samples": torch.zeros(1, 16, 7, 8, 10)}},
            None,
            "previous_latent has 7 latent frames of 80 x 64 pixels, .* 4 of 96 x 64",
        ),
        (
            {"previous": torch.zeros(25, 64, 96, 3), "previous_latent": {"samples": torch.zeros(1, 16, 3, 8, 12)}},
            None,
            "previous_latent has 3 latent frames of 96 x 64 pixels, .* 4 of 96 x 64",
        ),
        ({}, (LEFT, RIGHT), "nothing of the background .* Paint smaller areas for the persons"),
        ({}, (LEFT, BLANK), "nothing of mask_2 .* Paint a larger area"),
        ({}, (LEFT, LEFT.clone()), "mask_1 and mask_2 are the same"),
        ({"previous": torch.zeros(0, 64, 96, 3)}, None, "video to go on from has no frames"),
        ({}, (torch.zeros(1, 64, 64), torch.ones(1, 64, 64)), "masks have 64 x 64 pixels, the picture 112 x 90"),
    ],
)
def test_what_does_not_fit_together_is_told(piece: dict[str, Any], masks: Any, message: str) -> None:
    from sp_core.errors import SPError
    from sp_core.models.longcat.avatar_node import Piece

    with pytest.raises(SPError, match=message):
        spoken(Piece(96, 64, 25, IMAGE, **piece), masks)


def test_masks_may_be_smaller_than_the_picture() -> None:
    from sp_core.models.longcat.avatar_node import Piece

    masks = tuple(torch.nn.functional.interpolate(mask[None], size=(45, 56))[0] for mask in (LEFT * 0.0 + LEFT.roll(-20, 2) * LEFT, RIGHT))
    assert spoken(Piece(96, 64, 25, IMAGE), masks)[0][0][1]["longcat_people_masks"].shape == (1, 3, 64, 96)
