"""The reference engine as a process: JSON lines in, JSON lines out.

In, any number at once:             {"id": 7, "prompt": [5, 9], "max_tokens": 8}
Out, first:                         {"ready": true}
Out, for each request as it ends:   {"id": 7, "tokens": [...], "hit_tokens": 0, "preemptions": 0}
or:                                 {"id": 7, "error": "..."}

It ends at the end of its input, or at SIGTERM or SIGINT. With KVQUOTA=1 its KV memory is elastic.
"""

import argparse
import json
import logging
import os
import signal
import sys
import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from kvquota.agent.engines.reference.engine import Completion, Engine
from kvquota.agent.engines.reference.model import DTYPES
from kvquota.agent.settings import Settings


class Stop(Exception):  # noqa: N818
    """A signal asked for the end."""


def main() -> int:
    """Serve until the input ends. Returns the exit status."""
    arguments = _arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # The model is far too small for threads to pay, and one thread adds in one order.
    torch.set_num_threads(1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        engine = Engine(
            arguments.model,
            blocks=arguments.blocks,
            block_tokens=arguments.block_tokens,
            dtype=arguments.dtype,
            null_block=arguments.null_block,
            batch_tokens=arguments.batch_tokens,
            max_running=arguments.max_running,
            settings=Settings.read(os.environ),
        )
    except (ValueError, OSError) as error:
        print(f"reference engine: {error}", file=sys.stderr)
        return 1
    try:
        _serve(engine)
    except Stop:
        pass
    finally:
        engine.close()
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvquota.agent.engines.reference",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="directory of a Qwen3 checkpoint")
    parser.add_argument("--blocks", type=int, required=True, help="KV blocks of the whole address range")
    parser.add_argument("--block-tokens", type=int, default=16, help="tokens of a block (default 16)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument(
        "--null-block", action="store_true", help="hold block 0 for ever: a floor of one page"
    )
    parser.add_argument("--batch-tokens", type=int, default=512, help="most tokens of a step (default 512)")
    parser.add_argument("--max-running", type=int, default=16, help="most requests at once (default 16)")
    return parser.parse_args()


def _stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise Stop


def _serve(engine: Engine) -> None:
    lock = threading.Lock()

    def write(message: dict[str, Any]) -> None:
        with lock:
            print(json.dumps(message), flush=True)

    def answer(number: object, future: Future[Completion]) -> None:
        error = future.exception()
        write({"id": number, "error": str(error)} if error else {"id": number, **vars(future.result())})

    write({"ready": True})
    for line in sys.stdin:
        number = None
        try:
            message = json.loads(line)
            number = message["id"]
            future = engine.submit(message["prompt"], message["max_tokens"])
        except (ValueError, KeyError, TypeError) as error:
            write({"id": number, "error": f"{type(error).__name__}: {error}"})
        else:
            future.add_done_callback(partial(answer, number))


if __name__ == "__main__":
    sys.exit(main())
