"""A storm from its first process to its last, and what is left of them."""

from pathlib import Path

from tests.chaos.storm import Storm
from tests.support.daemon import DaemonProcess
from tests.support.reference import PAGE_BYTES, write_model
from tests.support.scene import Scene

_SMALL = 10 * PAGE_BYTES


def run(directory: Path, seed: int, seconds: float) -> list[str]:
    """Storm in a new `directory`; what was wrong. Prints its seed, every event, and a summary."""
    print(f"chaos: seed {seed}, {seconds:g} s; again: make chaos SEED={seed} SECONDS={seconds:g}", flush=True)
    model = write_model(directory / "model")
    # Every other seed pair has a device that is too small for what the engine would like.
    daemon = DaemonProcess(directory, capacity="1G" if seed // 2 % 2 else str(_SMALL))
    daemon.start()
    scene = Scene(daemon, model)
    storm = Storm(scene, model, seed)
    try:
        storm.run(seconds)
        engine = storm.engine
        if (status := engine.stop()) != 0:
            storm.faults.append(f"the engine ends with {status}")
        if (status := daemon.stop()) != 0:
            storm.faults.append(f"the daemon ends with {status}")
    except AssertionError as error:
        storm.faults.append(f"it ends early: {error!r}")
    finally:
        scene.close()
        if not daemon.process_ended():
            daemon.kill()
    if "Traceback" in daemon.log:
        storm.faults.append(f"the daemon did not expect this: {daemon.log[daemon.log.index('Traceback') :]}")
    left = sorted(path.name for path in daemon.runtime_dir.iterdir())
    if left:
        storm.faults.append(f"left behind: {left}")
    print("chaos:", dict(sorted(storm.counts.items())), flush=True)
    return storm.faults
