"""A small audio-video diffusion transformer in plain torch: everything that a forward passes, without ComfyUI."""

from .model import AudioVideoDiT, ReferenceConfig
from .plan import REFERENCE

__all__ = ["REFERENCE", "AudioVideoDiT", "ReferenceConfig"]
