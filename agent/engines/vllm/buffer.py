"""The buffer of a rank's KV cache: one tensor over an arena, given to vLLM for the zeros that it asks for."""

from typing import Any

import torch
from kvquota.agent.contract import PageCommand
from kvquota.agent.engines.vllm.layout import GRANULE, Layout
from kvquota.agent.settings import SettingError
from kvquota.native import Arena, HostDriver
from torch.overrides import TorchFunctionMode
from torch.utils.dlpack import from_dlpack

_DLPACK_INT = 0
_FLOOR_TIMEOUT_S = 10.0


class KvBuffer:
    """Memory comes and goes with the pages; page 0, with the null block in it, is there from the start."""

    def __init__(self, layout: Layout, fill: int | None) -> None:
        """`fill`: see HostDriver. Raises SettingError where pages do not fit, or the device is full."""
        self.geometry = layout.geometry()
        self.driver = HostDriver(granularity=GRANULE, fill=fill)
        self.arena = Arena(self.driver, self.geometry.strides(layout.block_bytes), self.geometry.pages)
        self.tensor = from_dlpack(self.arena.dlpack(0, [self.arena.size], _DLPACK_INT, 8))
        self.arena.ask(1, 0)
        if not self.arena.wait_credits(1, _FLOOR_TIMEOUT_S):
            raise SettingError(f"the device has no memory for a first page of {self.arena.page_bytes} bytes")
        self.apply(PageCommand(0, maps=(0,)))

    def apply(self, command: PageCommand) -> None:
        """Map now, and unmap behind the work that was submitted before.

        Raises DriverError where a page could not be mapped: the step that brought the command must not run.
        """
        self.arena.apply(command.seq, command.maps, command.unmaps)
        # vLLM's buffer is of zeros, and kernels count on what they read beyond a sequence's end being finite.
        for page in command.maps:
            for offset, stride in zip(self.arena.offsets, self.arena.strides, strict=True):
                self.tensor[offset + page * stride : offset + (page + 1) * stride].zero_()


class Allocation(TorchFunctionMode):
    """Inside it, the one `torch.zeros` of the buffer's size gives the buffer."""

    def __init__(self, buffer: KvBuffer) -> None:
        super().__init__()
        self._buffer = buffer
        self._given = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.zeros or args != (self._buffer.arena.size,) or kwargs.get("dtype") != torch.int8:
            return func(*args, **kwargs)
        self._given = True
        return self._buffer.tensor

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        if not self._given and details[0] is None:
            raise SettingError(
                f"vLLM allocated its KV cache without a torch.zeros of {self._buffer.arena.size} int8: "
                "this kvquota does not fit it"
            )
