"""The reference engine, which forks a child that does nothing each time it gets SIGUSR1."""

import os
import signal
import sys
from pathlib import Path

from kvquota.agent.engines.reference.__main__ import main


def fork(*_: object) -> None:
    child = os.fork()
    if child:
        Path(os.environ["FORKED_PID_FILE"]).write_text(str(child))
        return
    os.close(sys.stdout.fileno())
    while True:
        signal.pause()


signal.signal(signal.SIGUSR1, fork)
sys.exit(main())
