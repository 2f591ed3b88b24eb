"""desk-v1: office work with tools: a calendar, files and mail."""

from .environment import Desk, DeskOptions

__all__ = ["Desk", "DeskOptions"]
