"""What a recipe says of values, as ComfyUI's process writes it and the workers read it."""

from __future__ import annotations

#: class type of the node that stands in a recipe for a value; its input ``digest`` says which
VALUE_NODE = "SPValue"
