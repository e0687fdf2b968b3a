"""`make chaos`: storm, and exit with 1 if anything was wrong."""

import argparse
import secrets
import sys
import tempfile
from pathlib import Path

from tests.chaos.run import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0, help="how long it storms (default 180)")
    parser.add_argument("--seed", type=int, help="of an earlier run, to have the same events again")
    parser.add_argument("--engine", choices=("reference", "vllm"), default="reference")
    parser.add_argument(
        "--async", dest="asynchronous", action="store_true", help="vLLM schedules asynchronously"
    )
    arguments = parser.parse_args()
    seed = secrets.randbelow(1 << 32) if arguments.seed is None else arguments.seed
    with tempfile.TemporaryDirectory(prefix="kvq") as directory:
        faults = run(
            Path(directory), seed, arguments.seconds, arguments.engine, asynchronous=arguments.asynchronous
        )
    for fault in faults:
        print(f"chaos: {fault}", file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
