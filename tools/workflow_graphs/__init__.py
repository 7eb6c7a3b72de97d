"""The shipped workflows, as the graphs that they are: nodes, places, wires, model files."""

from .graph import Graph, Node, Wire
from .longcat import longcat, longcat_avatar, longcat_avatar_two, longcat_refine
from .ltx import ltx2, ltx2_i2v, ltx23
from .model_files import MODELS
from .wan import wan21, wan22_5b, wan22_14b, wan22_14b_i2v

__all__ = ["MODELS", "Graph", "Node", "Wire", "all_graphs"]


def all_graphs() -> list[Graph]:
    wan = [wan22_14b(), wan22_14b_i2v(), wan22_5b(), wan21()]
    return [*wan, ltx2(), ltx2_i2v(), ltx23(), longcat(), longcat_refine(), longcat_avatar(), longcat_avatar_two()]
