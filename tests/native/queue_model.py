"""What PageQueue does, said plainly, and the blocks to do it with."""

from collections.abc import Sequence
from dataclasses import dataclass

# Straddlers at 4 and 13, a short last page, a page with no block at all.
PAGES = [(0, 4), (5, 9), (9, 13), (14, 18), (18, 18), (18, 22), (22, 24)]
BLOCKS = 25


@dataclass(eq=False, slots=True)
class Block:
    """As vLLM's block, for all that a queue knows of it."""

    block_id: int
    ref_cnt: int = 0


def ids(blocks: Sequence[Block]) -> list[int]:
    return [block.block_id for block in blocks]


class Model:
    """Lists, walked from end to end."""

    def __init__(self) -> None:
        self.uncached: list[int] = []
        self.cached: list[int] = []
        self.reserved: list[int] = []  # the free blocks of draining pages
        self.used: set[int] = set()
        self.known: set[int] = set()  # free blocks that were freed as cached, and still are
        self.inside: set[int] = set()
        self.taken: set[int] = set()
        self.draining: set[int] = set()
        self.allowed = 0
        self.grown: list[int] = []
        self.last_use: dict[int, int] = {}
        self.clock = 0

    def blocks(self, page: int) -> range:
        return range(*PAGES[page])

    def page(self, block: int) -> int:
        return next(page for page in range(len(PAGES)) if block in self.blocks(page))

    def used_in(self, page: int) -> int:
        return len(self.used.intersection(self.blocks(page)))

    def growable(self) -> list[int]:
        out = set(range(len(PAGES))) - self.inside - self.taken
        return sorted(page for page in out if self.blocks(page))[: self.allowed]

    def free(self, *, for_running: bool = False) -> int:
        growable = sum(len(self.blocks(page)) for page in self.growable())
        return len(self.uncached) + len(self.cached) + growable + (len(self.reserved) if for_running else 0)

    def order(self) -> list[int]:
        return self.uncached + self.cached

    def circulate(self, page: int) -> None:
        self.inside.add(page)
        self.uncached += self.blocks(page)

    def pop(self) -> int:
        if not self.uncached and self.growable():
            page = self.growable()[0]
            self.allowed -= 1
            self.grown.append(page)
            self.circulate(page)
        block = (self.uncached or self.cached or self.reserved)[0]
        self.remove(block)
        return block

    def remove(self, block: int) -> None:
        for places in (self.uncached, self.cached, self.reserved):
            if block in places:
                places.remove(block)
        self.known.discard(block)
        self.used.add(block)

    def release(self, blocks: list[int], *, cached: bool) -> None:
        self.clock += 1
        place = 0
        for block in blocks:
            page = self.page(block)
            self.used.remove(block)
            self.last_use[page] = self.clock
            if cached:
                self.known.add(block)
            if page in self.draining:
                self.reserved.append(block)
            elif cached:
                self.cached.append(block)
            else:
                self.uncached.insert(place, block)
                place += 1
            if page in self.draining and not self.used_in(page):
                self.undrain(page)

    def undrain(self, page: int) -> None:
        self.draining.remove(page)
        for block in self.blocks(page):
            if block in self.reserved:
                self.reserved.remove(block)
                (self.cached if block in self.known else self.uncached).append(block)

    def victims(self) -> list[int]:
        unused = [page for page in self.inside if not self.used_in(page)]
        empty = [page for page in unused if not self.known.intersection(self.blocks(page))]
        full = [page for page in unused if page not in empty]
        return sorted(empty, reverse=True) + sorted(full, key=lambda page: (self.last_use[page], -page))

    def take(self, page: int) -> list[int]:
        held = [block for block in self.blocks(page) if block in self.known]
        for block in self.blocks(page):
            self.remove(block)
            self.used.remove(block)
        self.inside.remove(page)
        self.taken.add(page)
        return held

    def drain(self, count: int, keep: set[int]) -> list[int]:
        pinned = [page for page in self.inside if self.used_in(page)]
        pinned.sort(key=lambda page: (page in keep, page not in self.draining, self.used_in(page), -page))
        chosen = pinned[:count]
        for page in sorted(self.draining.difference(chosen)):
            self.undrain(page)
        new = [page for page in chosen if page not in self.draining]
        for page in new:
            self.uncache(page)
            for block in self.blocks(page):
                if block in self.uncached or block in self.cached:
                    (self.uncached if block in self.uncached else self.cached).remove(block)
                    self.reserved.append(block)
            self.draining.add(page)
        return new

    def uncache(self, page: int) -> None:
        for block in self.blocks(page):
            if block in self.known:
                self.known.remove(block)
                if page in self.draining:
                    self.reserved.remove(block)
                    self.reserved.append(block)
                else:
                    self.cached.remove(block)
                    self.uncached.append(block)

    def usage(self) -> tuple[int, int, int, int]:
        pinned = sum(1 for page in self.inside if self.used_in(page))
        empty = sum(
            1
            for page in self.inside
            if not self.used_in(page) and not self.known.intersection(self.blocks(page))
        )
        return pinned, len(self.inside) - pinned - empty, empty, len(self.draining)
