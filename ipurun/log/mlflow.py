"""MLflow logger: runs in a local store, or on a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping, Optional, Sequence, Union

from ipurun.log.tracking import Record, Tracker, chosen_keys, missing_package
from ipurun.training.events import RunStart

__all__ = ["MlflowLogger"]

_SQLITE = "sqlite:///"
_MOST_AT_ONCE = 1000  # metrics of one request, and a hundred parameters: MLflow's limits
_MOST_PARAMETERS = 100
_LONGEST_PARAMETER = 500
_STATUS = {"done": "FINISHED", "interrupted": "KILLED"}


class MlflowLogger(Tracker):
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
        super().__init__(folder, "mlflow")
        self._mlflow: Any = mlflow
        self._tracking_uri = tracking_uri
        if tracking_uri is not None and tracking_uri.startswith(_SQLITE):
            # MLflow keeps the stores that it has opened by their address: a relative one would mean another file
            # after a change of the working folder.
            self._tracking_uri = _SQLITE + str(Path(tracking_uri[len(_SQLITE) :]).absolute())
        self._experiment = experiment
        self._tags = {str(name): str(value) for name, value in (tags or {}).items()}
        self._client: Any = None
        self._run_id = ""

    def open_run(self, event: RunStart, known: Optional[str]) -> str:
        if self._tracking_uri is not None and self._tracking_uri.startswith(_SQLITE):
            Path(self._tracking_uri[len(_SQLITE) :]).parent.mkdir(parents=True, exist_ok=True)
        # A separate client: the run that the user's own code may have active in MLflow stays as it is.
        self._client = self._mlflow.MlflowClient(tracking_uri=self._tracking_uri)
        if known is not None:
            self._run_id = known
            self._client.update_run(known, status="RUNNING")
            return known
        name = self._experiment or event.name
        found = self._client.get_experiment_by_name(name)
        experiment = (
            found.experiment_id if found is not None else self._client.create_experiment(name, self._artifacts())
        )
        made = self._client.create_run(experiment, tags=self._tags, run_name=f"{event.name}/{self.folder.name}")
        self._run_id = str(made.info.run_id)
        entities = self._mlflow.entities
        parameters = [
            entities.Param(key, str(value)[:_LONGEST_PARAMETER]) for key, value in chosen_keys(self.folder).items()
        ]
        for begin in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._run_id, params=parameters[begin : begin + _MOST_PARAMETERS])
        self._client.log_text(self._run_id, (self.folder / "config.yaml").read_text(encoding="utf-8"), "config.yaml")
        return self._run_id

    def send(self, records: Sequence[Record]) -> None:
        metrics = [
            self._mlflow.entities.Metric(f"{record.split}/{name}", float(value), int(record.when * 1000), record.step)
            for record in records
            for name, value in record.values.items()
        ]
        for begin in range(0, len(metrics), _MOST_AT_ONCE):
            self._client.log_batch(self._run_id, metrics=metrics[begin : begin + _MOST_AT_ONCE])
        for record in records:
            for name, matrix in record.matrices.items():
                document = {"step": record.step, "rows": [list(row) for row in matrix]}
                self._client.log_dict(self._run_id, document, f"{record.split}/{name}-{record.step:08d}.json")

    def close_run(self, status: str) -> None:
        if self._run_id:
            self._client.set_terminated(self._run_id, _STATUS.get(status, "FAILED"))

    def _artifacts(self) -> Optional[str]:
        """Return the folder of files for a local store: MLflow would put them into the working folder."""
        if self._tracking_uri is None or not self._tracking_uri.startswith(_SQLITE):
            return None
        return (Path(self._tracking_uri[len(_SQLITE) :]).parent / "mlflow_files").resolve().as_uri()
