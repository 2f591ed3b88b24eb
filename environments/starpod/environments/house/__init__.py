"""house-v1: household tasks in text. Find things, clean, heat, cool or light them, and put them in their place."""

from .environment import House, HouseOptions

__all__ = ["House", "HouseOptions"]
