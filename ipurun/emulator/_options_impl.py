"""Typed options in a dict that can be frozen, and the base of stage managers."""

from __future__ import annotations

import abc
import copy
import datetime
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional

from ipurun.emulator._logging import logger

if TYPE_CHECKING:
    from ipurun.emulator._options.strategies import Stage

__all__ = ["IStageManager", "OptionsDict", "Placement", "ProgressBar", "merge"]


class ProgressBar:
    """Shows the progress of compilation with tqdm, if installed."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._last = 0
        self._start_time: Optional[datetime.datetime] = None
        self.compilation_time: Optional[datetime.timedelta] = None

    def __call__(self, progress: int, total: int) -> None:
        """Report ``progress`` of ``total`` steps."""
        now = datetime.datetime.now()
        if self._start_time is None or progress < self._last:
            self._start_time = now
            self._last = 0
            self._bar = self._open_bar(total)
        if self._bar is not None:
            self._bar.update(progress - self._last)
        self._last = progress
        if progress >= total:
            self.compilation_time = now - self._start_time
            self._start_time = None
            if self._bar is not None:
                self._bar.close()
                self._bar = None

    @staticmethod
    def _open_bar(total: int) -> Any:
        try:
            import tqdm
        except ImportError:
            return None
        return tqdm.tqdm(total=total, desc="Graph compilation", leave=True)


def merge(into: Dict[str, Any], added: Dict[str, Any]) -> Dict[str, Any]:
    """Add one dict to another and return it; raise AssertionError if they share a key."""
    shared = sorted(set(into).intersection(added))
    assert not shared, f"Can't merge dictionaries, they have keys in common: {', '.join(shared)}"
    into.update(added)
    return into


class OptionsDict:
    """A group of named options; each keeps the type of its first value.

    A subclass must set its private attributes before it calls ``super().__init__``: afterwards, assignment cannot
    create private names, and public names are options.

    Args:
        default_values: The options of the group with their initial values.
    """

    _is_frozen: bool
    _values: Dict[str, Any]

    def __init__(self, **default_values: Any) -> None:
        self._is_frozen = False
        self._values = default_values

    def set(self, **kwargs: Any) -> None:
        """Set existing options to values of the same type.

        Raises:
            AttributeError: The options are frozen.
            AssertionError: An option does not exist, or its value has another type.
        """
        for option, value in kwargs.items():
            self.checkIsFrozen(option)
            assert option in self._values, (
                f"Invalid option {option}, valid options are: {', '.join(self._values) or 'none'}"
            )
            expected = type(self._values[option])
            assert isinstance(value, expected), (
                f"Unexpected type {type(value)} for option {option}: expected {expected}, got {value!r}"
            )
            self._values[option] = value

    def createOrSet(self, **kwargs: Any) -> None:
        """Set options, creating those that do not exist."""
        for option, value in kwargs.items():
            if option in self._values:
                self.set(**{option: value})
            else:
                self.checkIsFrozen(option)
                self._values[option] = value

    def exists(self, option: str) -> bool:
        """Whether the group has the option."""
        return option in self._values

    def deleteIfExists(self, option: str) -> None:
        """Delete an option, even if frozen."""
        self._values.pop(option, None)

    def _freeze(self) -> None:
        object.__setattr__(self, "_is_frozen", True)

    def _unfreeze(self) -> None:
        object.__setattr__(self, "_is_frozen", False)

    def checkIsFrozen(self, option: Optional[str] = None) -> None:
        """Raise AttributeError if the options were frozen by their first use."""
        if self.__dict__.get("_is_frozen", False):
            raise AttributeError(
                "Can't modify frozen Options"
                + (f": tried to set {option}" if option else "")
                + ". They were passed to a model or a DataLoader; change a clone() of them instead."
            )

    def __deepcopy__(self, memory: Dict[int, Any]) -> OptionsDict:
        copied = type(self).__new__(type(self))
        memory[id(self)] = copied
        for name, value in self.__dict__.items():
            object.__setattr__(copied, name, copy.deepcopy(value, memory))
        copied._unfreeze()
        return copied

    def __getstate__(self) -> Dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: Dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __setattr__(self, option: str, value: Any) -> None:
        if option.startswith("__"):
            object.__setattr__(self, option, value)
        elif option.startswith("_"):
            if "_values" in self.__dict__ and option not in self.__dict__:
                raise AttributeError(f"{type(self).__name__} has no attribute {option!r}")
            self.checkIsFrozen(option)
            object.__setattr__(self, option, value)
        else:
            self.set(**{option: value})

    def __getattr__(self, option: str) -> Any:
        values = self.__dict__.get("_values", {})
        if option not in values:
            raise AttributeError(f"Invalid option {option}, valid options are: {', '.join(values)}")
        return values[option]

    def update(self, other: Dict[str, Any]) -> Dict[str, Any]:
        """Add the options to another dict and return it.

        Raises:
            AssertionError: A key is in both.
        """
        return merge(other, self._values)

    def toDict(self) -> Dict[str, Any]:
        """Return the options as a plain dict."""
        return self.update({})

    def __call__(self, option: str) -> Any:
        return getattr(self, option)

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in self._values.items())
        return f"{type(self).__name__}({inside})"


class Placement(NamedTuple):
    """Where a block runs, as recorded by a capture."""

    stage_id: int
    phase_id: int
    ipu_id: int
    user_id: str


class IStageManager(abc.ABC):
    """Assigns stages to the blocks of a capture."""

    def __init__(self) -> None:
        self._next_auto_id = 0
        self._current_ipu: Optional[int] = None
        self._debug_messages: List[str] = []

    def clearDebug(self) -> None:
        """Clear the messages of the previous capture."""
        self._debug_messages = []

    def printDebug(self) -> None:
        """Log the placement of the last capture."""
        for message in self._debug_messages:
            logger.debug(message)

    def nextAutoId(self) -> str:
        """Return the next automatic block id: "0", "1", ..."""
        block_id = str(self._next_auto_id)
        self._next_auto_id += 1
        return block_id

    def resetAutoId(self) -> None:
        """Restart the automatic block ids from "0"."""
        self._next_auto_id = 0

    @abc.abstractmethod
    def getStage(self, block_id: str) -> Stage:
        """Return the stage that a block belongs to."""

    def beginStage(self, user_id: Optional[str], ipu_id_from_block: Optional[int]) -> Placement:
        """Start a block and return its placement.

        Args:
            user_id: The block's id, None for an automatic one.
            ipu_id_from_block: The IPU that the block requests, if any.

        Returns:
            Stage, phase and IPU of the block: the IPU of the stage, else of the block, else the stage number.

        Raises:
            AssertionError: The strategy cannot place the block.
        """
        block_id = self.nextAutoId() if user_id is None else user_id
        self._current_ipu = ipu_id_from_block
        stage = self.getStage(block_id)
        ipu = stage._ipu if stage._ipu is not None else ipu_id_from_block
        if ipu is None:
            ipu = max(stage._stage_id, 0)
        self._current_ipu = ipu
        self._debug_messages.append(
            f"Starting block id={block_id} stage={stage._stage_id} phase={stage._phase_id} ipu={ipu}"
        )
        return Placement(stage._stage_id, stage._phase_id, ipu, block_id)
