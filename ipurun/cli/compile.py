"""`ipurun compile`: compile a config without a device."""

from __future__ import annotations

from typing import List

from ipurun.cli.common import only_json, print_json, split
from ipurun.errors import ConfigError

__all__ = ["run"]

_VERSIONS = ("1", "2", "21")
_USAGE = """\
usage: ipurun compile +recipe=NAME [key=value ...] [flags]

Compiles a config for training and for inference, without a device, into the executable cache: `ipurun train` with the
same words then starts at once. It takes as long as the first start of a run would, on a machine without IPUs too.

flags
  --ipu-version N  the kind of IPU: 2 for Mk2 (GC200 and Bow, the default), 21 for Mk2 with FP8, 1 for Mk1
  --export FILE    write a PopTorch export of the model for training instead, and of that for inference beside it,
                   for `ipurun train precompiled=FILE` and `poptorch.load`; such a file holds pickled Python objects,
                   and loading it runs code: use only files from those you trust
  --quiet          only errors and the last line
  --json           one JSON document on standard output
  --debug          show tracebacks

examples
  ipurun compile +recipe=gpt model=gpt2_small devices=4
  ipurun compile +recipe=mnist --export mnist.poptorch
"""


def run(argv: List[str]) -> int:
    """Compile what the command line describes."""
    flags, rest = split(argv, with_value=("--ipu-version", "--export"))
    if flags.help:
        print(_USAGE, end="")
        return 0
    version = str(flags.values.get("ipu-version", "2"))
    if version not in _VERSIONS:
        known = ", ".join(_VERSIONS)
        raise ConfigError(f"`--ipu-version` cannot be `{version}`", "command line", known=known, fix="--ipu-version 2")
    file = flags.values.get("export")
    with only_json(flags.json):
        from ipurun.interface import compile_words

        job = compile_words(rest, int(version), None if file is None else str(file), flags.quiet or flags.json)
    if flags.json:
        compiled = {mode: vars(done) for mode, done in job.compiled.items()}
        files = {mode: str(path) for mode, path in job.files.items()}
        print_json({"name": job.plan.name, "cache_dir": job.plan.cache_dir, "compiled": compiled, "files": files})
    elif job.files:
        print(f"{job.plan.name}: exported {' and '.join(str(path) for path in job.files.values())}")
        print("these files hold pickled Python objects, and loading them runs code: use only those that you trust")
    else:
        states = ", ".join(f"{mode} {done.cache}" for mode, done in job.compiled.items())
        print(f"{job.plan.name}: {states}; cache: {job.plan.cache_dir}")
    return 0
