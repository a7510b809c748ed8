"""MLflow logger: runs in a local store, or on a server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Union

from ipurun.log.tracking import chosen_keys, kept_id, missing_package, step_values, store_id
from ipurun.training.events import EvalEnd, Observer, RunStart, StepEnd, Summary

__all__ = ["MlflowLogger"]

_SQLITE = "sqlite:///"
_MOST_AT_ONCE = 1000  # metrics of one request, and a hundred parameters: MLflow's limits
_MOST_PARAMETERS = 100
_LONGEST_PARAMETER = 500
_LONGEST_WAIT_SECONDS = 2.0
_STATUS = {"done": "FINISHED", "interrupted": "KILLED"}


class MlflowLogger(Observer):
    """Writes parameters and metrics to MLflow. A resumed run continues the run that it has there.

    Args:
        folder: The run folder.
        tracking_uri: The store: ``sqlite:///FILE`` or the address of a server; None: as the variable
            MLFLOW_TRACKING_URI says, else MLflow's default.
        experiment: The experiment; None: the name of the run.
        tags: Tags of the run.

    Raises:
        ConfigError: If the package is not installed.
    """

    takes_steps_late = True

    def __init__(
        self,
        folder: Union[str, Path],
        tracking_uri: Optional[str] = None,
        experiment: Optional[str] = None,
        tags: Optional[Mapping[str, Any]] = None,
    ) -> None:
        try:
            import mlflow
            import mlflow.entities
        except ImportError as error:
            raise missing_package("mlflow", error) from error
        self._mlflow: Any = mlflow
        self._folder = Path(folder)
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._tags = {str(name): str(value) for name, value in (tags or {}).items()}
        self._client: Any = None
        self._run_id = ""
        self._waiting: List[Any] = []
        self._written = 0.0

    def on_start(self, event: RunStart) -> None:
        if self._tracking_uri is not None and self._tracking_uri.startswith(_SQLITE):
            Path(self._tracking_uri[len(_SQLITE) :]).parent.mkdir(parents=True, exist_ok=True)
        # A client of its own: the run that the user's own code may have active in MLflow stays as it is.
        self._client = self._mlflow.MlflowClient(tracking_uri=self._tracking_uri)
        known = kept_id(self._folder, "mlflow")
        if known is not None:
            self._run_id = known
            self._client.update_run(known, status="RUNNING")
            return
        name = self._experiment or event.name
        found = self._client.get_experiment_by_name(name)
        experiment = (
            found.experiment_id if found is not None else self._client.create_experiment(name, self._artifacts())
        )
        made = self._client.create_run(experiment, tags=self._tags, run_name=f"{event.name}/{self._folder.name}")
        self._run_id = made.info.run_id
        store_id(self._folder, "mlflow", self._run_id)
        entities = self._mlflow.entities
        parameters = [
            entities.Param(key, str(value)[:_LONGEST_PARAMETER]) for key, value in chosen_keys(self._folder).items()
        ]
        for begin in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._run_id, params=parameters[begin : begin + _MOST_PARAMETERS])
        self._client.log_text(self._run_id, (self._folder / "config.yaml").read_text(encoding="utf-8"), "config.yaml")

    def on_step(self, event: StepEnd) -> None:
        if event.logged:
            self._add("train", step_values(event), event.step)
            # Many short steps are sent together: a store is slower than they are.
            if time.monotonic() - self._written >= _LONGEST_WAIT_SECONDS:
                self.flush()

    def on_eval(self, event: EvalEnd) -> None:
        self._add(event.split, event.metrics, event.step)
        for name, matrix in event.matrices.items():
            document: Dict[str, Any] = {"step": event.step, "rows": [list(row) for row in matrix]}
            self._client.log_dict(self._run_id, document, f"{event.split}/{name}-{event.step:08d}.json")
        self.flush()

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for begin in range(0, len(waiting), _MOST_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=waiting[begin : begin + _MOST_AT_ONCE])
        self._written = time.monotonic()

    def on_end(self, event: Summary) -> None:
        self.flush()
        self._client.set_terminated(self._run_id, _STATUS.get(event.status, "FAILED"))

    def _artifacts(self) -> Optional[str]:
        """Return the folder of files for a local store: MLflow would put them into the working folder."""
        if self._tracking_uri is None or not self._tracking_uri.startswith(_SQLITE):
            return None
        return (Path(self._tracking_uri[len(_SQLITE) :]).parent / "mlflow_files").resolve().as_uri()

    def _add(self, split: str, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        for name, value in values.items():
            self._waiting.append(self._mlflow.entities.Metric(f"{split}/{name}", float(value), now, step))
