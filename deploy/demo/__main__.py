"""A limit is lowered while an engine sleeps: see what becomes of its memory.

Exits 0 only if every claim held: otherwise it says which one did not. It leaves nothing behind either way.
"""

import argparse
import random
import signal
import sys
import time
from collections.abc import Sequence

from deploy.demo.engines import ENGINES, DemoEngine
from deploy.demo.stage import DemoError, Stage

NAME = "demo"
MIB = 1 << 20
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 24, 1000, 16
KEPT_PAGES = 2


def main() -> int:
    """Run the demo; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="reference")
    engine_class = ENGINES[parser.parse_args().engine]
    signal.signal(signal.SIGTERM, _terminated)
    started = time.monotonic()
    stage = Stage()
    try:
        play(stage, engine_class)
    except (DemoError, RuntimeError, OSError, TimeoutError) as error:
        why = str(error) or type(error).__name__
        print(f"\nFAILED: {why}\n", *stage.last_words(), sep="\n    ", file=sys.stderr)
        return 1
    finally:
        stage.clear()
    print(f"\nAll of it held, in {time.monotonic() - started:.0f} s.")
    return 0


def play(stage: Stage, engine_class: type[DemoEngine]) -> None:
    """The demo itself."""
    prompts = _prompts()
    print(f"\nkvquota, with {engine_class.title}\n")
    stage.start_daemon("1G")
    say("daemon", "kvquotad serves 1 GiB of host memory")
    engine = engine_class(stage, stage.environment(NAME))
    say("engine", f"started as {NAME!r}")

    tokens, _ = engine.generate(prompts, NEW_TOKENS)
    full = engine.memfd_bytes()
    say("fill", f"{PROMPTS} prompts of {PROMPT_TOKENS} tokens, now in its prefix cache")
    show(stage, full)

    limit = KEPT_PAGES * stage.status(NAME)["page_bytes"]
    claim(full > limit, f"a filled cache above {size(limit)}", size(full))
    begun = time.monotonic()
    stage.kvctl("limit", NAME, str(limit), "--wait")
    took = time.monotonic() - begun
    small, status = engine.memfd_bytes(), stage.status(NAME)
    say("shrink", f"kvctl limit {NAME} {limit // MIB}M --wait, the engine idle: {took:.2f} s")
    show(stage, small)
    claim(status["status"] == "applied", "an applied limit", status["status"], status["reason"])
    claim(status["mapped_bytes"] <= limit, f"at most {size(limit)} mapped", size(status["mapped_bytes"]))
    claim(small <= limit, f"at most {size(limit)} behind its memfds", size(small))
    say("gone", f"{size(full - small)} went back to the machine")

    _, hits = engine.generate(prompts[-1:], NEW_TOKENS)
    claim(hits > 0, "the latest prompt still cached", f"{hits} tokens of it")
    say("kept", f"the latest prompt again: {hits} of its {PROMPT_TOKENS} tokens come from what stayed")

    stage.kvctl("limit", NAME, "none", "--wait")
    again, _ = engine.generate(prompts, NEW_TOKENS)
    grown = engine.memfd_bytes()
    claim(grown > limit, f"more than {size(limit)} in use after the restore", size(grown))
    say("restore", f"kvctl limit {NAME} none, and all prompts again: {size(grown)} in use")
    engine.stop()

    unmodified = engine_class(stage, {})
    expected, _ = unmodified.generate(prompts, NEW_TOKENS)
    unmodified.stop()
    claim(tokens == expected, "the unmodified engine's tokens at first", differing(tokens, expected))
    claim(again == expected, "the unmodified engine's tokens after the restore", differing(again, expected))
    say("tokens", f"all {2 * PROMPTS} answers equal the unmodified engine's, token for token")

    stage.stop_daemon()
    left = stage.leftovers()
    claim(not left, "nothing left behind", *left)
    say("clean", "no process, no socket, no memory of it is left")


def say(topic: str, text: str) -> None:
    """One line of the story."""
    print(f"  {topic:<9}{text}", flush=True)


def show(stage: Stage, memfd_bytes: int) -> None:
    """What the operator sees, and what the kernel counts."""
    print()
    for line in stage.kvctl("status").splitlines():
        print(f"           {line}")
    print(f"           memory behind its memfds, as the kernel counts: {size(memfd_bytes)}\n", flush=True)


def claim(held: bool, expected: str, *seen: object) -> None:
    """Raise DemoError unless it held."""
    if not held:
        raise DemoError(f"expected {expected}, saw: {', '.join(str(part) for part in seen)}")


def differing(tokens: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> str:
    """Which answers differ, in words."""
    numbers = [str(n) for n, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1]]
    return f"other answers to prompts {', '.join(numbers)}"


def size(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / MIB:,.0f} MiB"


def _prompts() -> list[list[int]]:
    source = random.Random(7)
    return [[source.randrange(3, 1024) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


def _terminated(*_: object) -> None:
    raise DemoError("terminated")


if __name__ == "__main__":
    sys.exit(main())
