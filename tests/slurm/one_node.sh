#!/bin/bash
# one_node.sh COMMAND...: run a command beside a SLURM of one node, this machine, and end both.
#
# Needs slurmctld, slurmd and munged (Debian: slurm-wlm) and root, neither systemd nor cgroups. Everything is in a temporary folder.
set -eu
folder=$(mktemp -d /tmp/ipurun-slurm.XXXXXX)
host=$(hostname -s)
cores=$(getconf _NPROCESSORS_ONLN)  # nproc would believe OMP_NUM_THREADS
export SLURM_CONF=$folder/slurm.conf

finish() {
    code=$?
    [ "$code" = 0 ] || tail -n 30 "$folder"/*.log >&2 || true
    scancel --user=root --signal=KILL 2>/dev/null || true
    for pid_file in slurmd.pid slurmctld.pid munged.pid; do
        [ ! -f "$folder/$pid_file" ] || kill "$(cat "$folder/$pid_file")" 2>/dev/null || true
    done
    sleep 1
    rm -rf "$folder"
    exit "$code"
}
trap finish EXIT

mkdir -p "$folder/state" "$folder/spool"
chmod 755 "$folder"
dd if=/dev/urandom of="$folder/munge.key" bs=1024 count=1 2>/dev/null
chmod 400 "$folder/munge.key"
munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munged.log" --seed-file="$folder/munged.seed"

cat > "$SLURM_CONF" <<END
ClusterName=ipurun
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=10
SlurmctldTimeout=60
SchedulerParameters=sched_interval=2,sched_min_interval=0
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cores State=UNKNOWN
PartitionName=debug Nodes=$host Default=YES MaxTime=INFINITE State=UP
END
slurmctld
slurmd
for _ in $(seq 60); do
    sinfo --noheader --format=%T 2>/dev/null | grep -q idle && break
    sleep 0.5
done
sinfo
"$@"
