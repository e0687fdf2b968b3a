"""A storm from its first process to its last, and what is left of them."""

from pathlib import Path

from tests.chaos.reference import ReferenceSubject
from tests.chaos.storm import Storm
from tests.chaos.subject import Subject
from tests.chaos.vllm import VllmSubject
from tests.support.daemon import DaemonProcess
from tests.support.reference import write_model
from tests.support.vllm_pages import model as write_vllm_model

_SMALL_PAGES = 10


def run(
    directory: Path, seed: int, seconds: float, engine: str = "reference", *, asynchronous: bool = False
) -> list[str]:
    """Storm in a new `directory`; what was wrong. Prints its seed, every event, and a summary.

    `engine`: reference or vllm. `asynchronous`: how vLLM schedules.
    """
    again = f"make chaos ENGINE={engine} SEED={seed} SECONDS={seconds:g}{' ASYNC=1' if asynchronous else ''}"
    print(f"chaos: seed {seed}, {seconds:g} s; again: {again}", flush=True)
    elastic = ReferenceSubject if engine == "reference" else VllmSubject
    # Every other seed pair has a device that is too small for what the engine would like.
    small = str(_SMALL_PAGES * elastic.page_bytes)
    daemon = DaemonProcess(directory, capacity="1G" if seed // 2 % 2 else small)
    subject: Subject
    if engine == "reference":
        subject = ReferenceSubject(daemon, write_model(directory / "model"), floor=seed % 2)
    else:
        model = write_vllm_model(directory / "model")
        subject = VllmSubject(daemon, model, seed, asynchronous=asynchronous)
    daemon.start()
    try:
        storm = Storm(daemon, subject, seed)
        faults = storm.faults
        try:
            storm.run(seconds)
            faults += subject.stop()
            if (status := daemon.stop()) != 0:
                faults.append(f"the daemon ends with {status}")
        except AssertionError as error:
            faults.append(f"it ends early: {error!r}")
    finally:
        subject.close()
        if not daemon.process_ended():
            daemon.kill()
    if "Traceback" in daemon.log:
        faults.append(f"the daemon did not expect this: {daemon.log[daemon.log.index('Traceback') :]}")
    left = sorted(path.name for path in daemon.runtime_dir.iterdir())
    if left:
        faults.append(f"left behind: {left}")
    print("chaos:", dict(sorted(storm.counts.items())), flush=True)
    return faults
