"""What kvquota logs, in vLLM's log: vLLM gives no other loggers a handler."""

import logging


def log_with_vllm() -> None:
    """Have what the agent logs go where vLLM logs, at its level. A handler that the host gave it stays."""
    ours = logging.getLogger("kvquota")
    if not ours.hasHandlers():
        ours.parent = logging.getLogger("vllm")
