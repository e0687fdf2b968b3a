"""Where the demo plays: a temporary folder, a daemon in it, and nothing once it is over."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
TIMEOUT_S = 30.0


class DemoError(Exception):
    """A claim that did not hold. The message is the line that the demo fails with."""


class Stage:
    """The folder and the daemon. Every process of the demo has the folder in its arguments or environment."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvquota-demo-"))
        self.log = (self.folder / "log").open("w")
        self._daemon: subprocess.Popen[bytes] | None = None

    def start_daemon(self, capacity: str) -> None:
        """Start kvquotad, and return once it answers."""
        folders = ["--runtime-dir", str(self.folder / "run"), "--state-dir", str(self.folder / "state")]
        self._daemon = subprocess.Popen(
            [BIN / "kvquotad", "--name", "gpu0", "--device", "host", "--capacity", capacity, *folders],
            stdout=self.log,
            stderr=self.log,
        )
        end = time.monotonic() + TIMEOUT_S
        while self._kvctl("list").returncode:
            if self._daemon.poll() is not None or time.monotonic() > end:
                raise DemoError("kvquotad does not answer")
            time.sleep(0.05)

    def environment(self, name: str) -> dict[str, str]:
        """What makes an engine join as `name`. Fresh memory is filled with 0xff, not zeros."""
        return {
            "KVQUOTA": "1",
            "KVQUOTA_AGENT_SOCKET": str(self.folder / "run" / "agent.sock"),
            "KVQUOTA_INSTANCE": name,
            "KVQUOTA_HOST_FILL": "255",
        }

    def kvctl(self, *arguments: str) -> str:
        """What kvctl prints. Raises DemoError with its complaint."""
        done = self._kvctl(*arguments)
        if done.returncode:
            raise DemoError(f"kvctl {' '.join(arguments)}: exit {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def status(self, name: str) -> dict[str, Any]:
        """The status of an instance, as programs read it."""
        status: dict[str, Any] = json.loads(self.kvctl("-o", "json", "status", name))
        return status

    def stop_daemon(self) -> None:
        """SIGTERM it. Raises DemoError where it does not end well."""
        if self._daemon is not None:
            self._daemon.terminate()
            status = self._daemon.wait(TIMEOUT_S)
            if status:
                raise DemoError(f"kvquotad ended with status {status}")

    def leftovers(self) -> list[str]:
        """Processes and sockets of the demo that still are there."""
        sockets = [str(path) for path in (self.folder / "run").rglob("*") if path.is_socket()]
        return [f"process {pid}" for pid in self._processes()] + sockets

    def last_words(self) -> list[str]:
        """The end of what the daemon and the engines logged."""
        self.log.flush()
        return (self.folder / "log").read_text().splitlines()[-12:]

    def clear(self) -> None:
        """Whatever happened, leave nothing: no process, no file."""
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.log.close()
        shutil.rmtree(self.folder)

    def _kvctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        socket = self.folder / "run" / "control.sock"
        return subprocess.run(
            [BIN / "kvctl", "--daemon", f"unix:{socket}", *arguments],
            capture_output=True,
            text=True,
            timeout=2 * TIMEOUT_S,
            check=False,
        )

    def _processes(self) -> list[int]:
        marker = str(self.folder).encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            # Gone meanwhile, or another user's.
            with suppress(OSError):
                if any(marker in (process / part).read_bytes() for part in ("cmdline", "environ")):
                    found.append(int(process.name))
        return found
