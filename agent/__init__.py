"""kvquota's agent: a library inside each engine, of the standard library and kvquota.native alone."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvquota.agent.agent import Agent
    from kvquota.agent.geometry import Geometry
    from kvquota.agent.settings import SettingError, Settings

__all__ = ["Agent", "Geometry", "SettingError", "Settings"]

# Imported on first use: an engine's entry point loads this package in every process, also without KVQUOTA.
_HOMES = {"Agent": "agent", "Geometry": "geometry", "SettingError": "settings", "Settings": "settings"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
