"""A model of which a part is not trained."""

from __future__ import annotations

from run_toys import Net


class HalfFrozen(Net):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.first.parameters():
            parameter.requires_grad_(False)
