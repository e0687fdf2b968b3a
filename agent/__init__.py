"""kvquota's agent: a library inside each engine, of the standard library and kvquota.native alone."""

from kvquota.agent.agent import Agent
from kvquota.agent.geometry import Geometry
from kvquota.agent.settings import SettingError, Settings

__all__ = ["Agent", "Geometry", "SettingError", "Settings"]
