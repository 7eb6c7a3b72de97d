"""What the user sees: one file a node, and one row for it in :data:`NODES`. ``docs/add-a-node.md`` shows how to add one."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One node."""

    #: also the name of its class
    node_id: str
    #: the file in this folder that has the class
    file: str
    #: the node is of use only with a model of ``sp_core/models``, so it is left out where ComfyUI does not take these
    needs_our_models: bool = False


NODES = (
    Row("SPModelPatch", "patch"),
    Row("SPVAEPatch", "vae_patch"),
    Row("SPSampler", "sampler"),
    Row("SPRelease", "release"),
    Row("SPDoctor", "doctor"),
    Row("SPLongCatSigmas", "longcat_sigmas", needs_our_models=True),
    Row("SPLongCatLatent", "longcat_latent", needs_our_models=True),
    Row("SPLongCatCFGZero", "longcat_cfg_zero", needs_our_models=True),
    Row("SPLongCatKVCache", "longcat_kv_cache", needs_our_models=True),
    Row("SPLongCatBlockSparse", "longcat_block_sparse", needs_our_models=True),
    Row("SPLongCatRefineLatent", "longcat_refine", needs_our_models=True),
    Row("SPLongCatAvatarAudio", "longcat_avatar_audio", needs_our_models=True),
    Row("SPLongCatAvatar", "longcat_avatar", needs_our_models=True),
)
