"""A rank in a process of its own: `python -m tests.agent.rank_process ADDRESS PAGES`.

Commands come as JSON lines `[seq, maps, unmaps]` on standard input, and each is answered by its seq once it
was applied. It ends with its standard input.
"""

import json
import sys

from kvquota.agent.geometry import Geometry
from kvquota.agent.rank_server import RankServer
from kvquota.native import Arena, HostDriver

from tests.agent.rig import PAGE


def main() -> None:
    address, pages = sys.argv[1], int(sys.argv[2])
    driver = HostDriver(fill=0xFF)
    arena = Arena(driver, [PAGE], pages)
    server = RankServer(arena, Geometry(PAGE, PAGE, pages), "\0" + address, driver)
    print("ready", flush=True)
    for line in sys.stdin:
        seq, maps, unmaps = json.loads(line)
        arena.apply(seq, maps, unmaps)
        print(seq, flush=True)
    server.close()
    arena.close()


if __name__ == "__main__":
    main()
