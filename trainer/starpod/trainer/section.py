"""What every part of the configuration is."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen, validated part of the configuration tree. Unknown keys are refused.

    Each component declares its own section next to its code; `starpod.trainer.config` joins them. The `description` of
    a field is its help text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as YAML and JSON hold them."""
        return self.model_dump(mode="json")
