"""What a decode plan says: which modules of a VAE need rows of other ranks, beside its convolutions.

Plans are declarations, by names of the VAE's own classes. What a convolution needs is taken from the convolution: its
kernel, stride, dilation and padding. No forward is copied: causal padding, caches over time and the rules for the first
frame stay the host's own code, which sees a shorter frame.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

#: (above, below)
Rows = tuple[int, int]
#: in this order everywhere
DECODE_AND_ENCODE = ("decode", "encode")


@dataclass(frozen=True)
class DecodePlan:
    """One class of VAE, for decode and for encode."""

    #: module and name of the class in ComfyUI, for two of its VAEs have one class name. In brackets the decoder's, where the
    #: class takes any decoder
    architecture: str
    #: the VAE's name for people, the same in every language
    title: str
    #: rows of a picture for each row of its latent
    ratio: Callable[[nn.Module], int]
    #: classes of modules that need the whole frame, such as attention: every rank computes them in full
    whole: tuple[str, ...] = ()
    #: classes of modules that keep rows apart, whatever they call, such as attention over time: they compute on the band
    apart: tuple[str, ...] = ()
    #: functions of torch that keep rows apart as the VAE calls them, such as a pooling that begins at a band's first row
    apart_functions: tuple[str, ...] = ()
    #: classes whose code pads the frame by (rows above, rows below) and hands it to a convolution below it, which has no padding;
    #: or what says it of a module of the class
    padded: Mapping[str, Rows | Callable[[nn.Module], Rows]] = field(default_factory=dict)
    #: what runs in the workers: methods of the VAE, or modules of it where the method around them draws random numbers
    calls: tuple[str, str] = DECODE_AND_ENCODE
    #: functions of the class's Python module that say how many bytes a chunk of frames may have, which all ranks must agree on
    chunk_sizes: tuple[str, ...] = ()
    #: numbers of GiB from which on the class cuts what it computes, which ranks with other bands would do elsewhere: attributes of
    #: its modules and functions of its Python module. None are cut, as a band is a part already
    limits: tuple[str, ...] = ()
    #: (VAE, device): sets what the method around a call sets, where that does not run in the workers
    before_call: Callable[[nn.Module, torch.device], None] = lambda vae, device: None
    #: (VAE, shape of a latent) -> shape of its pixels, so that room for them is made once; None where the class says it by itself
    decoded_shape: Callable[[nn.Module, Sequence[int]], tuple[int, ...]] | None = None
    #: False where no band can be computed: each device computes whole tiles
    bands: bool = True
    #: methods of the VAE that cut the frame into tiles and join them -> which of ``calls`` they make for each tile
    tiles: Mapping[str, str] = field(default_factory=dict)
    #: why a VAE of this class cannot be shared out, for people; None where it can
    refuses: Callable[[nn.Module], str | None] = lambda vae: None
    #: a VAE keeps nothing after a call
    after_run: None = None
    keeps_state: bool = False

    def rows_added(self, parent: nn.Module) -> Rows:
        """Rows (above, below) that the code of ``parent`` adds to the frame for a convolution below it."""
        rows = self.padded.get(type(parent).__name__, (0, 0))
        return rows(parent) if callable(rows) else rows

    def decodes(self, call: str) -> bool:
        """This one of ``calls`` makes pixels of latents, and not the other way round."""
        return call in (self.calls[0], DECODE_AND_ENCODE[0])


def without_plan(architecture: str) -> DecodePlan:
    """For a VAE whose class has no plan: each device can compute whole tiles of it, by its own decode and encode."""
    return DecodePlan(architecture, architecture.rpartition(".")[2], lambda vae: 1, bands=False)
