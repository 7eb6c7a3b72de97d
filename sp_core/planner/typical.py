"""Models at the sizes that people run, and links that people have, for tables and expectations."""

from __future__ import annotations

from .cost import MeasuredRates, ModelShape
from .traffic import CrossAttention
from .weights import Weights

#: (shape, size, tokens). FLOP of the linear layers are a factor times width^2; the factors follow from the models' papers and code
MODELS: tuple[tuple[ModelShape, str, int], ...] = (
    (ModelShape("Wan 2.1/2.2 14B", 40, 40, 128, 22.8 * 5120**2), "1280x720x81", 75_600),
    (ModelShape("Wan 2.2 5B", 30, 24, 128, 22.8 * 3072**2), "1280x704x121", 27_280),
    (ModelShape("LTX-2", 48, 32, 128, 32.0 * 4096**2, 128, cross=CrossAttention(126, 32, 64)), "1280x704x121", 14_080),
    (ModelShape("HunyuanVideo", 60, 24, 128, 24.0 * 3072**2), "1280x720x129", 119_056),
    (ModelShape("LongCat-Video", 48, 32, 128, 28.1 * 4096**2), "832x480x93", 37_440),
    (ModelShape("MiniMax-H3", 50, 56, 128, 15.0 * 7168**2), "1344x768x124", 38_592),
)
#: (name in :data:`MODELS`, what the weights are, their bytes): outside the blocks are embeddings and the last layer
WEIGHTS: tuple[tuple[str, str, Weights], ...] = (
    ("Wan 2.1/2.2 14B", "bf16", Weights(27.4e9, 1.2e9, 0.69e9)),
    ("Wan 2.1/2.2 14B", "fp8", Weights(13.7e9, 0.8e9, 0.35e9)),
    ("LTX-2", "fp8", Weights(18e9, 3e9, 0.38e9)),
    ("MiniMax-H3", "bf16", Weights(95e9, 3e9, 1.9e9)),
)
#: bytes of activations for each token and channel that a forward has at its peak, assumed
ACTIVATION_BYTES = 40.0
#: sustained rates, assumed for tables; in use they are measured
LINKS = (
    MeasuredRates("NVLink (H100)", 600e12, 450e9),
    MeasuredRates("PCIe 4 P2P (4090)", 140e12, 25e9),
    MeasuredRates("staged (4090 without P2P)", 140e12, 10e9),
)

#: picture models; text tokens are few and not counted
PICTURES: tuple[ModelShape, ...] = (
    ModelShape("Flux", 57, 24, 128, 24.0 * 3072**2),
    ModelShape("Flux 2", 56, 48, 128, 26.0 * 6144**2),
    ModelShape("Qwen-Image", 60, 24, 128, 24.0 * 3072**2),
    ModelShape("Z-Image", 30, 30, 128, 24.0 * 3840**2),
    ModelShape("Stable Diffusion 3.5 large", 38, 38, 64, 24.0 * 2432**2),
)
#: edges of square pictures in pixels; a token stands for 16 x 16 of them
EDGES = (512, 768, 1024, 1536, 2048)
