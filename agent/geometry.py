"""How many granules make a page, and which blocks it backs: one rule over all tensors and ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvquota.agent.settings import SettingError

_MOST_GRANULES = 8
_MOST_WASTE = Fraction(1, 16)


@dataclass(frozen=True)
class Geometry:
    """A page is `span` bytes of an imagined tensor with `unit` bytes a block; real ones are multiples of it.

    `unit` is the greatest common divisor of the block sizes of every tensor on every rank, and `span` a
    multiple of the granule. Ranks of one instance share a geometry, so that page p means the same blocks
    everywhere.
    """

    unit: int
    span: int
    blocks: int

    @staticmethod
    def choose(block_bytes: Sequence[int], blocks: int, granule: int, setting: str) -> "Geometry":
        """The smallest page that wastes little.

        `block_bytes`: bytes of one block in each KV tensor of every rank. `setting`: the engine's option that
        decides the block size, for the error. Raises SettingError where no page size fits.
        """
        if not block_bytes or min(block_bytes) <= 0 or blocks <= 0:
            raise SettingError(
                f"{setting}: no KV cache to make elastic: "
                f"{blocks} blocks of {list(block_bytes)} bytes per tensor"
            )
        unit = math.gcd(*block_bytes)
        spans = [k * granule for k in range(1, _MOST_GRANULES + 1)]
        span = next((s for s in spans if _waste(unit, s) <= _MOST_WASTE), math.lcm(unit, granule))
        geometry = Geometry(unit, span, blocks)
        if geometry.pages < 2:
            raise SettingError(
                f"{setting}: blocks of {unit} bytes per tensor need pages of {span} bytes, and all {blocks} "
                f"blocks fit in one; choose a size that fits {granule} bytes better, or a larger KV cache"
            )
        return geometry

    @property
    def pages(self) -> int:
        """Pages of the whole address range; the last one may be padded."""
        return -(-self.blocks * self.unit // self.span)

    def ranges(self) -> list[tuple[int, int]]:
        """(first, end) of the blocks wholly inside each page. The others straddle two and are no capacity."""
        return [
            (-(-page * self.span // self.unit), min((page + 1) * self.span // self.unit, self.blocks))
            for page in range(self.pages)
        ]

    @property
    def capacity_blocks(self) -> int:
        """Blocks that can ever be handed out."""
        return sum(max(0, end - first) for first, end in self.ranges())

    def strides(self, block_bytes: Sequence[int]) -> list[int]:
        """Bytes of a page in each of a rank's tensors. Raises SettingError where they do not fit."""
        odd = [size for size in block_bytes if size <= 0 or size % self.unit]
        if odd:
            raise SettingError(
                f"a KV tensor with {odd[0]} bytes a block: expected a multiple of {self.unit} as on all ranks"
            )
        return [self.span * (size // self.unit) for size in block_bytes]


def _waste(unit: int, span: int) -> Fraction:
    """The part of the blocks that straddle two pages."""
    period = unit // math.gcd(unit, span)
    return Fraction((period - 1) * unit, period * span)
