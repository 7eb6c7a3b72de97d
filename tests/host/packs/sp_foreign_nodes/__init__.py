"""Stand-ins for what other node packs do to a model: one node a kind, as small as the kind allows, and nodes that look on."""

from . import apart, around, classes, compiling, in_options, inside, looking, replay, sampling, settings, steps

NODE_CLASS_MAPPINGS = {
    name: value
    for module in (apart, around, classes, compiling, in_options, inside, looking, replay, sampling, settings, steps)
    for name, value in vars(module).items()
    if name.startswith("SPForeign")
}

looking.add_restart_route()
