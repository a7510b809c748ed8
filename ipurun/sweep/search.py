"""Points that Optuna chooses: trials of a study that is kept in the folder of the sweep."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from ipurun import engine as engines
from ipurun.config.compose import Points
from ipurun.config.overrides import Parsed
from ipurun.config.schema import RunConfig
from ipurun.errors import ConfigError, listing
from ipurun.inspect.metrics import make_metrics, monitored
from ipurun.sweep.batch import import_extra
from ipurun.sweep.check import Checked, check_point
from ipurun.sweep.ledger import ENDED, FAILED, FINISHED, PENDING, PRUNED, Ledger, Record
from ipurun.sweep.pool import Source
from ipurun.sweep.table import SPEED, is_smaller_better, value_of
from ipurun.training.callbacks import Callback
from ipurun.training.events import EvalEnd

__all__ = ["Search", "TrialReport", "TrialSource"]

_CHOICE = "hydra/sweeper=optuna"
_JOURNAL = "optuna.journal"
_DIRECTIONS = ("minimize", "maximize")


class Search:
    """Search space: the keys with their ranges, the metric and its direction.

    Args:
        points: The command line.

    Raises:
        ConfigError: Optuna is not installed, or does not take a key of ``hydra.sweeper``.
    """

    def __init__(self, points: Points) -> None:
        self._optuna = import_extra("optuna", _CHOICE)
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        keys = points.launching.sweeper_keys
        config = points.points[0].config
        _check_keys(keys, points)
        self.num_trials = int(keys["n_trials"])
        self.num_jobs: Optional[int] = keys["n_jobs"]
        self.max_failure_rate: Optional[float] = keys["max_failure_rate"]
        self.metric = config.sweep.rank_by or monitored(config.monitor, config.metrics)
        self.direction = keys["direction"] or ("maximize" if _higher_is_better(config, self.metric) else "minimize")
        self.distributions = {override.key: self._distribution(override) for override in points.searched}
        self._storage: Optional[str] = keys["storage"]
        self._study_name: Optional[str] = keys["study_name"]
        self._pruner = dict(keys["pruner"] or {})
        sampler = dict(keys["sampler"] or {})
        if str(sampler.get("_target_", "")).endswith("GridSampler"):
            sampler["search_space"] = self._grid(points.searched)
        self._sampler = _make(sampler, "hydra.sweeper.sampler")
        _make(self._pruner, "hydra.sweeper.pruner")

    def open_study(self, folder: Path) -> Any:
        """Return the study of a sweep, as it is stored."""
        try:
            return self._optuna.create_study(
                storage=_storage(self._where(folder)),
                study_name=self._name(folder),
                sampler=self._sampler,
                pruner=_make(self._pruner, "hydra.sweeper.pruner"),
                direction=self.direction,
                load_if_exists=True,
            )
        except Exception as error:  # of Optuna or of a database
            what, seen = "the Optuna study cannot be opened", f"{type(error).__name__}: {error}".splitlines()[0]
            raise ConfigError(what, seen=seen, fix="hydra.sweeper.storage=sqlite:///FILE, or leave it out") from error

    @property
    def is_shared(self) -> bool:
        """Whether other sweeps may use the same study: one that is not stored in a sweep's folder."""
        return bool(self._storage)

    def reporting(self, folder: Path, number: int) -> Dict[str, object]:
        """Return what `TrialReport` needs to report for a trial."""
        return {
            "storage": self._where(folder),
            "study": self._name(folder),
            "number": number,
            "metric": self.metric,
            "pruner": self._pruner,
        }

    def texts(self, params: Mapping[str, Any]) -> Dict[str, str]:
        """Return the values of a trial as they are typed."""
        return {key: str(value) for key, value in params.items()}

    def _where(self, folder: Path) -> str:
        return self._storage or str((folder / _JOURNAL).absolute())

    def _name(self, folder: Path) -> str:
        return self._study_name or folder.name

    def _distribution(self, override: Parsed) -> Any:
        made = self._optuna.distributions
        found = override.interval
        if found is None:
            return made.CategoricalDistribution(override.values)
        if isinstance(found.low, int) and isinstance(found.high, int):
            step = 1 if found.log else int(found.step or 1)
            return made.IntDistribution(found.low, found.high, log=found.log, step=step)
        step_of_floats = None if found.log else found.step
        return made.FloatDistribution(float(found.low), float(found.high), log=found.log, step=step_of_floats)

    def _grid(self, searched: Sequence[Parsed]) -> Dict[str, List[Any]]:
        endless = [override for override in searched if not override.values]
        if endless:
            key = endless[0].key
            what, fix = f"a grid needs a list of values, and `{key}` is an interval", f"{key}=range(...) or choice(...)"
            raise ConfigError(what, f"command line: {endless[0].typed}", fix=fix, key=key)
        return {override.key: [self.value(override.key, text) for text in override.values] for override in searched}

    def value(self, key: str, text: str) -> Any:
        """Return a value as Optuna has it."""
        kinds = self._optuna.distributions
        if isinstance(self.distributions[key], kinds.CategoricalDistribution):
            return text
        return int(text) if isinstance(self.distributions[key], kinds.IntDistribution) else float(text)


class TrialSource(Source):
    """The trials of a search, each asked for when there is room to run it.

    Args:
        points: The command line.
        search: What is searched.
        ledger: The sweep; trials become records there.
    """

    def __init__(self, points: Points, search: Search, ledger: Ledger) -> None:
        self.total = search.num_trials
        self._points = points
        self._search = search
        self._ledger = ledger
        self._study = search.open_study(ledger.folder)
        if not search.is_shared:
            self._record_forgotten()
        self._again = [record for record in ledger.records if record.status not in ENDED]
        self._too_many_failures = False

    def take(self, compiling: Set[str]) -> Optional[Tuple[Record, Checked]]:
        if self._too_many_failures:
            return None
        if self._again:
            record = self._again.pop(0)
            if record.status == FAILED or not self._is_open(record):
                self._study.enqueue_trial({key: self._search.value(key, text) for key, text in record.swept.items()})
                record.trial = self._study.ask(self._search.distributions).number
        elif len(self._ledger.records) < self.total:
            trial = self._study.ask(self._search.distributions)
            swept = self._search.texts(trial.params)
            record = Record("", len(self._ledger.records), "", swept, [], PENDING, trial=trial.number)
            self._ledger.records.append(record)
        else:
            return None
        return record, self._checked(record)

    def trial(self, record: Record) -> Optional[Dict[str, object]]:
        assert record.trial is not None
        return self._search.reporting(self._ledger.folder, record.trial)

    def ended(self, record: Record) -> None:
        assert record.trial is not None
        states = importlib.import_module("optuna").trial.TrialState
        value = value_of(record, self._search.metric) if record.results else None
        # ValueError: reported before the sweep ended. RuntimeError: a grid is complete and wants to end a loop.
        with contextlib.suppress(ValueError, RuntimeError):
            if record.status == FINISHED and value is not None and math.isfinite(value):
                self._study.tell(record.trial, value)
            elif record.status == PRUNED:
                self._study.tell(record.trial, state=states.PRUNED)
            elif record.status in (FINISHED, FAILED):
                self._study.tell(record.trial, state=states.FAIL)
        failed = sum(other.status == FAILED for other in self._ledger.records)
        limit = self._search.max_failure_rate
        self._too_many_failures = limit is not None and failed / self.total > limit

    @property
    def is_exhausted(self) -> bool:
        return not self._again and len(self._ledger.records) >= self.total

    def _record_forgotten(self) -> None:
        """Record trials that were asked for when the sweep was killed, before the ledger had them."""
        known = {record.trial for record in self._ledger.records}
        for trial in self._study.get_trials(deepcopy=False):
            if trial.number not in known and not trial.state.is_finished() and trial.params:
                swept, number = self._search.texts(trial.params), len(self._ledger.records)
                self._ledger.records.append(Record("", number, "", swept, [], PENDING, trial=trial.number))

    def _checked(self, record: Record) -> Checked:
        assert self._points.composer is not None
        point = self._points.composer(record.swept)
        record.name = point.config.name or "run"
        record.overrides = [word for word in point.overrides if not word.lstrip("+").startswith("resume=")]
        try:
            checked = check_point(point)
        except ConfigError as error:  # values that do not go together: the search continues with others
            checked = Checked(point, "", None, error)
        record.id = checked.id
        return checked

    def _is_open(self, record: Record) -> bool:
        known = [trial for trial in self._study.get_trials(deepcopy=False) if trial.number == record.trial]
        return bool(known) and not known[0].state.is_finished()


class TrialReport(Callback):
    """Reports the metric to Optuna at each evaluation, and stops the run if Optuna's pruner says so.

    Args:
        trial: What `Search.reporting` returned.
    """

    def __init__(self, trial: Mapping[str, Any]) -> None:
        optuna = import_extra("optuna", _CHOICE)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.load_study(
            study_name=trial["study"],
            storage=_storage(trial["storage"]),
            sampler=optuna.samplers.RandomSampler(),
            pruner=_make(dict(trial["pruner"]), "hydra.sweeper.pruner"),
        )
        stored = next(known for known in study.get_trials(deepcopy=False) if known.number == trial["number"])
        self._trial = optuna.trial.Trial(study, stored._trial_id)
        self._metric = trial["metric"]
        self._pruner = type(study.pruner).__name__
        self.pruned = ""  # when and by which pruner

    def on_eval(self, event: EvalEnd) -> None:
        value = event.metrics.get(self._metric)
        if value is None or not math.isfinite(value):
            return
        self._trial.report(float(value), event.step)
        if self._trial.should_prune():
            self.pruned = f"{self._pruner} stopped it at step {event.step}"
            self.run.stop(self.pruned)


def _storage(where: str) -> Any:
    """Return the storage of a study: a database by its URL, or a journal file, which also works on network folders."""
    if "://" in where:
        return where
    storages = importlib.import_module("optuna.storages")
    journal = importlib.import_module("optuna.storages.journal")
    return storages.JournalStorage(journal.JournalFileBackend(where))


def _check_keys(keys: Mapping[str, Any], points: Points) -> None:
    where = points.points[0].where
    for key in ("search_space", "custom_search_space"):
        if keys.get(key):
            fix = "write ranges as overrides: 'optimizer.lr=tag(log, interval(1e-4, 1e-1))', or in hydra.sweeper.params"
            raise ConfigError(f"`hydra.sweeper.{key}` is not supported", where(f"hydra.sweeper.{key}"), fix=fix)
    direction = keys.get("direction")
    if direction is not None and direction not in _DIRECTIONS:
        what = "`hydra.sweeper.direction` takes minimize or maximize"
        if isinstance(direction, list):
            what += "; several objectives are not supported"
        fix = "hydra.sweeper.direction=maximize, with the metric in sweep.rank_by"
        raise ConfigError(what, where("hydra.sweeper.direction"), seen=str(direction), fix=fix)
    for key in ("n_trials", "n_jobs"):
        if keys[key] is not None and int(keys[key]) < 1:
            fix = f"hydra.sweeper.{key}=20"
            raise ConfigError(f"`hydra.sweeper.{key}` must be at least 1", where(key), seen=str(keys[key]), fix=fix)
    if not points.searched:
        fix = "'optimizer.lr=tag(log, interval(1e-4, 1e-1))' or micro_batch_size=choice(8,16)"
        raise ConfigError("there is nothing to search", f"command line: {_CHOICE}", fix=fix)


def _make(node: Dict[str, Any], key: str) -> Any:
    """Make a sampler or a pruner of Optuna; arguments that are null get Optuna's defaults."""
    target = str(node.pop("_target_", "") if "_target_" in node else "")
    module, _, name = target.rpartition(".")
    if module not in ("optuna.samplers", "optuna.pruners"):
        raise ConfigError(f"`{key}` cannot be `{target}`", fix=f"{key.replace('.', '/')}=NAME, one of Optuna's own")
    node["_target_"] = target
    made = getattr(importlib.import_module(module), name)
    arguments = {name: value for name, value in node.items() if name != "_target_" and value is not None}
    known = [name for name in inspect.signature(made.__init__).parameters if name not in ("self", "args", "kwargs")]
    unknown = [name for name in arguments if name not in known]
    if unknown:
        where = f"command line: {key}.{unknown[0]}"
        raise ConfigError(f"{name} of Optuna does not take `{unknown[0]}`", where, known=listing(known, most=40))
    try:
        return made(**arguments)
    except (TypeError, ValueError, ImportError) as error:
        seen = str(error).splitlines()[0]
        raise ConfigError(f"`{key}`: {name} of Optuna cannot be made", f"command line: {key}", seen=seen) from error


def _higher_is_better(config: RunConfig, metric: str) -> bool:
    if metric != SPEED and (metric == "loss" or metric in config.metrics):
        engine = engines.load(config.engine)
        return make_metrics(config.metrics, "eval", engine.module).higher_is_better(metric)
    return not is_smaller_better(metric)
