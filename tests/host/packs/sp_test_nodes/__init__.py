"""Nodes for host tests: seeded inputs, stand-ins for encoders, patches of every kind, and a way to save what came out."""

from . import families, faults, latents, media, patches, second_device, talking, third_party, tiny_models

NODE_CLASS_MAPPINGS = {
    name: value
    for module in (families, faults, latents, media, patches, second_device, talking, third_party, tiny_models)
    for name, value in vars(module).items()
    if name.startswith("SPTest")
}
