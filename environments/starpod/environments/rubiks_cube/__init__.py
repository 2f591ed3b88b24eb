"""rubiks_cube-v1: turn the faces of a 2x2x2 cube until each face has one colour."""

from .cube import ACTIONS
from .environment import RubiksCube, RubiksCubeOptions

__all__ = ["ACTIONS", "RubiksCube", "RubiksCubeOptions"]
