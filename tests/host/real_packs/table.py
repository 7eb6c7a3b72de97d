"""The cases as the table of docs/patches.md: what the test expects is what the page says."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from host.real_packs.cases import PACKS, Case

MODELS = {
    "wan": "Wan",
    "ltxv": "LTXV",
    "ltxav": "LTX-2",
    "ltx23": "LTX-2.3",
    "hunyuan": "HunyuanVideo",
    "hunyuan_i2v": "HunyuanVideo",
    "hunyuan15": "HunyuanVideo 1.5",
    "minimax": "MiniMax-H3",
    "avatar": "LongCat-Video-Avatar",
}


def table(cases: Iterable[Case]) -> str:
    """Markdown: a table a pack, a row for all cases of a node that come out alike."""
    rows = list(cases)
    parts = []
    for pack in PACKS:
        mine = [case for case in rows if case.pack == pack.folder]
        head = ["| node | tried with | before | behind | |", "|---|---|---|---|---|"]
        parts += [f"**{pack.folder}** ({pack.commit}, {pack.date})", "", *head, *_rows(mine), ""]
    return "\n".join(parts)


def _rows(cases: list[Case]) -> list[str]:
    def alike(case: Case) -> tuple[str, ...]:
        return (case.node, case.before or "-", case.behind or "-", case.note)

    found = []
    for (node, before, behind, note), group in groupby(sorted(cases, key=alike), alike):
        found.append(f"| {node} | {', '.join(_tried(list(group)))} | {before} | {behind} | {note} |")
    return found


def _tried(cases: list[Case]) -> list[str]:
    return list(dict.fromkeys(MODELS[case.model] + (f" ({case.label})" if case.label else "") for case in cases))
