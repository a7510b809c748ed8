#!/usr/bin/env python3
"""Starts processes with the variables of poprun and its mpirun, on this machine; ends all when one fails."""

import os
import subprocess
import sys
import time

given = {}
words = sys.argv[1:]
while words and words[0].startswith("--"):
    name, _, value = words.pop(0).partition("=")
    given[name] = value
count, replicas = int(given["--num-instances"]), int(given["--num-replicas"])
passed = given.get("--mpi-local-args", "").split()[1::2]
with open("poprun.txt", "a") as stream:
    print(given, file=stream)
processes = []
for rank in range(count):
    # mpirun passes only variables that are named: what else is missing here shows an instance that needs it.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("IPURUN_", "MASTER_"))}
    environment.update({name: os.environ[name] for name in passed if name in os.environ})
    environment.update(
        POPDIST_NUM_TOTAL_REPLICAS=str(replicas),
        POPDIST_NUM_LOCAL_REPLICAS=str(replicas // count),
        POPDIST_NUM_IPUS_PER_REPLICA=given["--ipus-per-replica"],
        POPDIST_REPLICA_INDEX_OFFSET=str(rank * replicas // count),
        POPDIST_LOCAL_INSTANCE_INDEX=str(rank),
        OMPI_COMM_WORLD_RANK=str(rank),
        OMPI_COMM_WORLD_SIZE=str(count),
        OMPI_COMM_WORLD_LOCAL_RANK=str(rank),
        OMPI_COMM_WORLD_LOCAL_SIZE=str(count),
        PMIX_NAMESPACE=f"fake-{os.getpid()}",
    )
    processes.append(subprocess.Popen(words, env=environment))
while any(process.poll() is None for process in processes):
    if any(process.poll() for process in processes):
        for process in processes:
            process.terminate()
    time.sleep(0.05)
sys.exit(max(abs(process.returncode) for process in processes))
