"""Shares of ranks that are not equally fast: what each gets of the tokens and of the heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from .sharding import Weights


@dataclass(frozen=True)
class Shares:
    """Weights of ranks: ``tokens`` by how fast linear layers are on each, ``heads`` by how fast attention is.

    Raises:
        ValueError: a weight is below one, or the two are of different numbers of ranks.
    """

    tokens: Weights
    heads: Weights

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.heads) or not self.tokens or min(self.tokens + self.heads) < 1:
            raise ValueError(f"shares need one positive number a rank, for tokens and for heads, got {self.tokens} and {self.heads}")

    @classmethod
    def of(cls, weights: Sequence[int]) -> Shares:
        """The same weights for tokens and heads."""
        return cls(tuple(weights), tuple(weights))

    def part(self, start: int, stop: int) -> Shares | None:
        """The shares of the ranks ``start`` to ``stop``; None where these are equal."""
        return uneven(Shares(self.tokens[start:stop], self.heads[start:stop]))

    def of_columns(self, ring: int) -> Weights:
        """Weights of the heads of each column of a ring of rows: one number for all its ranks, as they pass on the same heads.

        A row's ranks attend for the queries of their row, whose number follows the row's tokens. The slowest rank of a column counts.
        """
        width = len(self.heads) // ring
        rows = [slice(row * width, (row + 1) * width) for row in range(ring)]
        columns = [min(Fraction(self.heads[row][column], sum(self.tokens[row])) for row in rows) for column in range(width)]
        return whole_numbers(columns)

    def describe(self) -> str:
        """For reports: "shares 3:1", "shares 3:1 of tokens, 2:1 of heads"."""
        tokens, heads = (":".join(map(str, weights)) for weights in (self.tokens, self.heads))
        return f"shares {tokens}" if tokens == heads else f"shares {tokens} of tokens, {heads} of heads"


def uneven(shares: Shares | None) -> Shares | None:
    """The shares, or None where they are equal: then sizes are those of ranks without shares."""
    if shares is None or len({*shares.tokens}) == len({*shares.heads}) == 1:
        return None
    return shares


def whole_numbers(numbers: Sequence[Fraction]) -> Weights:
    """The smallest whole numbers that are to each other as ``numbers`` are."""
    common = math.lcm(*(number.denominator for number in numbers))
    whole = [int(number * common) for number in numbers]
    return tuple(number // math.gcd(*whole) for number in whole)
