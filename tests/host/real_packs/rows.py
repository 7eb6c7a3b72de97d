"""All cases, in the order of the table in docs/patches.md."""

from __future__ import annotations

from host.real_packs import kjnodes, ltxvideo, others
from host.real_packs.cases import Case

CASES: list[Case] = [*kjnodes.CASES, *ltxvideo.CASES, *others.CASES]
