"""Where tensors live on a device: recorded and checked, without meaning on a CPU."""

from __future__ import annotations

from typing import Any, Optional

from ipurun.emulator._options_impl import OptionsDict

__all__ = ["TensorLocationSettings", "_TensorLocationOptions"]


def _checked(value: Any, kind: type) -> Any:
    assert isinstance(value, kind), f"Expected {kind.__name__}, got {value!r}"
    return value


class TensorLocationSettings(OptionsDict):
    """Where one kind of tensor lives: on or off chip, sharded over replicas, behind IO tiles."""

    def minElementsForOffChip(self, min_elements: int) -> TensorLocationSettings:
        """Keep tensors with fewer elements on chip."""
        self.createOrSet(minElementsForOffChip=_checked(min_elements, int))
        return self

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> TensorLocationSettings:
        """Do not shard tensors with fewer elements."""
        self.createOrSet(minElementsForReplicatedTensorSharding=_checked(min_elements, int))
        return self

    def useOnChipStorage(self, use: Optional[bool] = True) -> TensorLocationSettings:
        """Keep the tensors on chip or off; None leaves it to the backend."""
        if use is None:
            self.deleteIfExists("onChip")
        else:
            self.createOrSet(onChip=int(_checked(use, bool)))
        return self

    def useReplicatedTensorSharding(self, use: bool = True) -> TensorLocationSettings:
        """Let every replica keep its part of the tensors."""
        self.createOrSet(useReplicatedTensorSharding=int(_checked(use, bool)))
        return self

    def useIOTilesToLoad(self, use: bool = True) -> TensorLocationSettings:
        """Load the tensors through the IO tiles."""
        self.createOrSet(useIOTilesToLoad=int(_checked(use, bool)))
        return self

    def useIOTilesToStore(self, use: bool = True) -> TensorLocationSettings:
        """Store the tensors through the IO tiles."""
        self.createOrSet(useIOTilesToStore=int(_checked(use, bool)))
        return self


class _TensorLocationOptions(OptionsDict):
    """The locations of activations, weights, optimizer state and accumulators."""

    def numIOTiles(self, num_tiles: int) -> _TensorLocationOptions:
        """Set aside tiles for transfers, as overlapped IO needs."""
        assert isinstance(num_tiles, int) and 32 <= num_tiles <= 192 and num_tiles % 2 == 0, (
            f"numIOTiles must be an even number between 32 and 192. Got {num_tiles!r}"
        )
        self.createOrSet(numIOTiles=num_tiles)
        return self

    def setActivationLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set where activations live."""
        self.createOrSet(location_activation=_checked(location, TensorLocationSettings).toDict())
        return self

    def setWeightLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set where weights live."""
        self.createOrSet(location_weight=_checked(location, TensorLocationSettings).toDict())
        return self

    def setOptimizerLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set where the optimizer's state lives."""
        self.createOrSet(location_optimizer=_checked(location, TensorLocationSettings).toDict())
        return self

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set where accumulated gradients live."""
        self.createOrSet(location_accumulator=_checked(location, TensorLocationSettings).toDict())
        return self
