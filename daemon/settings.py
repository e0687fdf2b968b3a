"""What the operator has chosen."""

from dataclasses import dataclass, field
from pathlib import Path

from kvquota.daemon.peer import Admission


@dataclass(frozen=True)
class Settings:
    """`capacity_bytes` of the device; `control_gid`: the group of control.sock, None for the daemon's own."""

    name: str
    device: str
    capacity_bytes: int
    runtime_dir: Path
    state_dir: Path
    control_gid: int | None = None
    admission: Admission = field(default_factory=Admission)
