"""The words of Hydra's launcher and sweeper plugins, and which other keys of Hydra have an effect.

The plugins themselves are not used: `ipurun/sweep` runs points with the libraries below them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ipurun.errors import ConfigError, Problem, nearest

__all__ = [
    "BASIC",
    "Launching",
    "check_choice",
    "check_key",
    "is_open",
    "read_launching",
    "register",
    "resolved",
    "unknown_key",
]

BASIC = "basic"
_DOCS = "docs/how-to/sweeps.md"
_WITH_EFFECT = ("hydra.run.dir", "hydra.sweep.dir", "hydra.launcher", "hydra.sweeper", "hydra.mode")
# Keys without an effect: what to do instead.
_ADVICE = {
    "hydra.job.name": "name=NAME names the run and its folder",
    "hydra.job.chdir": "leave it out: paths in a config are relative to the folder in which the command is run",
    "hydra.job.env_set": "set the variables before the command: NAME=VALUE ipurun ...",
    "hydra.job.env_copy": "points get the variables of this shell",
    "hydra.verbose": "debug.log_level=DEBUG for PopTorch's log, or --debug for tracebacks",
    "hydra.sweeper.max_batch_size": "sweep.jobs=N limits how many points run at once",
    "hydra.sweep.subdir": "leave it out: the points of a sweep are numbered folders of hydra.sweep.dir",
    "hydra.output_subdir": "leave it out: each run folder has config.yaml and overrides",
    "hydra.searchpath": "--config-dir FOLDER adds a folder of configs",
    "hydra.callbacks": "callbacks: the config group for your own code in a run",
    "hydra.job_logging": "each run folder has log.txt; debug.log_level sets PopTorch's log level",
    "hydra.hydra_logging": "each run folder has log.txt; debug.log_level sets PopTorch's log level",
}
# Values of such keys that say what happens anyway.
_AS_IT_IS = {
    "hydra.job.chdir": (False, None),
    "hydra.output_subdir": (None,),
    "hydra.sweep.subdir": (".",),
    "hydra.sweeper.max_batch_size": (None,),
    "hydra.verbose": (False,),
}


@dataclass
class _Joblib:
    """Keys of hydra-joblib-launcher, as `joblib.Parallel` takes them."""

    _target_: str = "joblib"
    n_jobs: int = -1
    backend: Optional[str] = None
    prefer: Optional[str] = "processes"
    require: Optional[str] = None
    verbose: int = 0
    timeout: Optional[float] = None
    pre_dispatch: str = "2*n_jobs"
    batch_size: str = "auto"
    temp_folder: Optional[str] = None
    max_nbytes: Optional[str] = None
    mmap_mode: str = "r"


@dataclass
class _Submitit:
    """Keys of hydra-submitit-launcher that local and SLURM jobs have."""

    _target_: str = "submitit_local"
    submitit_folder: Optional[str] = None
    timeout_min: int = 60
    cpus_per_task: Optional[int] = None
    gpus_per_node: Optional[int] = None
    tasks_per_node: int = 1
    mem_gb: Optional[int] = None
    nodes: int = 1
    name: Optional[str] = None
    stderr_to_stdout: bool = False
    max_num_timeout: int = 0


@dataclass
class _Slurm(_Submitit):
    _target_: str = "submitit_slurm"
    partition: Optional[str] = None
    qos: Optional[str] = None
    comment: Optional[str] = None
    constraint: Optional[str] = None
    exclude: Optional[str] = None
    gres: Optional[str] = None
    cpus_per_gpu: Optional[int] = None
    gpus_per_task: Optional[int] = None
    mem_per_gpu: Optional[str] = None
    mem_per_cpu: Optional[str] = None
    account: Optional[str] = None
    signal_delay_s: int = 120
    additional_parameters: Dict[str, Any] = field(default_factory=dict)
    array_parallelism: int = 256
    setup: Optional[List[str]] = None


@dataclass
class _Optuna:
    """Keys of hydra-optuna-sweeper, with `pruner` besides."""

    defaults: List[Any] = field(default_factory=lambda: [{"sampler": "tpe"}, {"pruner": "median"}])
    _target_: str = "optuna"
    sampler: Any = MISSING
    pruner: Any = MISSING
    direction: Any = None
    storage: Optional[str] = None
    study_name: Optional[str] = None
    n_trials: int = 20
    n_jobs: Optional[int] = None
    max_failure_rate: Optional[float] = None
    params: Optional[Dict[str, str]] = None
    search_space: Optional[Dict[str, Any]] = None
    custom_search_space: Optional[str] = None


_HYDRAS = ("_target_", "defaults")  # fields for Hydra, which nobody sets
_LAUNCHERS = {"joblib": _Joblib, "submitit_local": _Submitit, "submitit_slurm": _Slurm}
_SAMPLERS = {
    "tpe": ("TPESampler", ("seed",)),
    "random": ("RandomSampler", ("seed",)),
    "grid": ("GridSampler", ("seed",)),
    "qmc": ("QMCSampler", ("seed",)),
    "gp": ("GPSampler", ("seed",)),
    "cmaes": ("CmaEsSampler", ("seed",)),
}
_PRUNERS = {
    "none": ("NopPruner", ()),
    "median": ("MedianPruner", ("n_startup_trials", "n_warmup_steps", "interval_steps", "n_min_trials")),
    "hyperband": ("HyperbandPruner", ("min_resource", "max_resource", "reduction_factor")),
    "successive_halving": ("SuccessiveHalvingPruner", ("min_resource", "reduction_factor")),
    "percentile": ("PercentilePruner", ("percentile", "n_startup_trials", "n_warmup_steps")),
    "threshold": ("ThresholdPruner", ("lower", "upper", "n_warmup_steps")),
}
_CHOICES: Dict[str, Sequence[str]] = {
    "hydra/launcher": (BASIC, *_LAUNCHERS),
    "hydra/sweeper": (BASIC, "optuna"),
    "hydra/sweeper/sampler": tuple(_SAMPLERS),
    "hydra/sweeper/pruner": tuple(_PRUNERS),
}


_GROUPS = ("hydra/launcher", "hydra/sweeper")


@dataclass(frozen=True)
class Launching:
    """How a command line runs its points.

    Args:
        launcher: basic, joblib, submitit_local or submitit_slurm.
        launcher_keys: Its keys.
        sweeper: basic or optuna.
        sweeper_keys: Its keys.
        sweep_dir: The folder of the sweep; None: one below `runs_dir`.
    """

    launcher: str = BASIC
    launcher_keys: Mapping[str, Any] = field(default_factory=dict)
    sweeper: str = BASIC
    sweeper_keys: Mapping[str, Any] = field(default_factory=dict)
    sweep_dir: Optional[str] = None


def register() -> None:
    """Let Hydra compose the launchers and sweepers."""
    store = ConfigStore.instance()
    for name, node in _LAUNCHERS.items():
        store.store(group="hydra/launcher", name=name, node=node, provider="ipurun")
    store.store(group="hydra/sweeper", name="optuna", node=_Optuna, provider="ipurun")
    for kind, module, classes in (("sampler", "samplers", _SAMPLERS), ("pruner", "pruners", _PRUNERS)):
        for name, (of_optuna, keys) in classes.items():
            made = {"_target_": f"optuna.{module}.{of_optuna}", **dict.fromkeys(keys)}
            store.store(group=f"hydra/sweeper/{kind}", name=name, node=made, provider="ipurun")


def check_choice(group: str, values: Tuple[str, ...], where: str) -> Optional[Problem]:
    """Return what is wrong with a choice of Hydra's own groups, such as another launcher."""
    known = _CHOICES.get(group)
    if known is None:
        fix = _ADVICE.get(group.replace("/", "."), f"remove it; these can be chosen: {', '.join(_CHOICES)}")
        return Problem(f"`{group}` has no effect in ipurun", where, fix=fix, key=group)
    unknown = [value for value in values if value not in known]
    if not unknown and len(values) == 1:
        return None
    close = nearest(values[0], known, most=1)
    return Problem(
        f"`{group}` cannot be `{','.join(values)}`",
        where,
        known=", ".join(known),
        fix=f"{group}={close[0]}" if close else f"{group}={known[1]}; see {_DOCS}",
        key=group,
    )


def check_key(key: str, value: Any, where: str) -> Optional[Problem]:
    """Return the problem of a key of Hydra that would have no effect."""
    group = key.replace(".", "/")
    if group in _GROUPS and not isinstance(value, Mapping):
        choice = value if value in _CHOICES[group] else _CHOICES[group][1]
        return Problem(f"`{key}` is a group of keys", where, seen=str(value), fix=f"{group}={choice}", key=key)
    has_effect = any(key == name or key.startswith(name + ".") for name in _WITH_EFFECT)
    if has_effect and key not in _ADVICE:
        return None
    if value in _AS_IT_IS.get(key, ()):
        return None
    above = [name for name in _ADVICE if key == name or key.startswith(name + ".")]
    fix = _ADVICE[above[0]] if above else "remove it"
    known = "hydra.run.dir, hydra.sweep.dir, hydra.launcher.*, hydra.sweeper.*"
    return Problem(f"`{key}` has no effect in ipurun", where, known=known, fix=fix, key=key)


def unknown_key(key: str, owner: str, where: str) -> Problem:
    """Return the problem of a key that the chosen launcher or sweeper does not have.

    Args:
        key: Such as ``hydra.launcher.n_jobs``.
        owner: Class of the keys of the chosen one; another name than those below is that of Hydra's basic one.
        where: Where it was set.
    """
    group, name = key.split(".")[1], key.split(".")[2]
    kinds: Mapping[str, type] = _LAUNCHERS if group == "launcher" else {"optuna": _Optuna}
    chosen = next((kind for kind, node in kinds.items() if node.__name__ == owner), BASIC)
    known = [] if chosen == BASIC else [field.name for field in fields(kinds[chosen]) if field.name not in _HYDRAS]
    others = [kind for kind, node in kinds.items() if name in {field.name for field in fields(node)}]
    close = nearest(name, known, most=1)
    if close:
        fix = f"hydra.{group}.{close[0]}"
    elif others:
        fix = f"choose what has it: {' or '.join(f'hydra/{group}={kind}' for kind in others)}"
    else:
        fix = f"remove it; see {_DOCS}"
    listed = ", ".join(f"hydra.{group}.{name}" for name in known)
    return Problem(f"hydra/{group}={chosen} has no key `{name}`", where, known=listed, fix=fix, key=key)


def is_open(key: str) -> bool:
    """Return whether a mapping of Hydra's own config takes any key."""
    inside = ("hydra.sweeper.sampler.", "hydra.sweeper.pruner.", "hydra.sweeper.params.")
    return key.startswith((*inside, "hydra.launcher.additional_parameters."))


def read_launching(node: DictConfig) -> Launching:
    """Return how points are run, from the composed `hydra` node.

    Raises:
        ConfigError: A launcher or sweeper that a config file chooses is not supported, or a value cannot be resolved.
    """
    chosen = {group: str(OmegaConf.select(node, "runtime.choices").get(group, BASIC)) for group in _CHOICES}
    problems = [check_choice(group, (chosen[group],), f"{group}: {chosen[group]}") for group in _GROUPS]
    for group in (group for group in _GROUPS if chosen[group] == BASIC):
        # What `is_open` lets Hydra add to any of them.
        key = group.replace("/", ".")
        unknown = set(OmegaConf.select(node, key[6:])) - {"_target_", "max_batch_size", "params"}
        problems += [unknown_key(f"{key}.{name}", "", f"{key}.{name}") for name in sorted(unknown)]
    if any(problems):
        raise ConfigError([problem for problem in problems if problem])
    launcher, sweeper = chosen["hydra/launcher"], chosen["hydra/sweeper"]
    sweep_dir = resolved(node, "sweep.dir")
    return Launching(
        launcher,
        {} if launcher == BASIC else resolved(node, "launcher"),
        sweeper,
        {} if sweeper == BASIC else resolved(node, "sweeper"),
        None if sweep_dir == "." else sweep_dir,
    )


def resolved(node: DictConfig, key: str) -> Any:
    """Return a value of the `hydra` node as plain data.

    Raises:
        ConfigError: It refers to something that does not exist.
    """
    try:
        value = OmegaConf.select(node, key)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        what, fix = f"`hydra.{key}` cannot be resolved", f"hydra.{key}=VALUE without it"
        raise ConfigError(what, seen=str(error).splitlines()[0], fix=fix, key=f"hydra.{key}") from error
