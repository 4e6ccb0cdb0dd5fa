#!/usr/bin/env bash
# Slurm's own daemons as a cluster of three nodes on this machine: up.sh FOLDER, undone by down.sh.
#
# A node is a slurmd in namespaces of its own: network, host name and mounts. Nothing outside FOLDER is changed but a
# bridge, network namespaces, the empty folder /nemo_run and, where none runs, munged; GPUs are counted, not there.
# Needs root.
set -euo pipefail
"$(dirname "$0")/down.sh" # of a session that was killed
folder=$1
head=$(hostname -s)
mkdir -p "$folder"/{state,log,run}
touch "$folder"/gpu{0..7} # what Slurm counts as GPUs
cat >"$folder/slurm.conf" <<CONF
ClusterName=flashrl
SlurmctldHost=$head(10.79.0.254)
SlurmctldPort=16917
SlurmdPort=16918
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
SlurmdParameters=config_overrides
SlurmctldPidFile=/run/flashrl-slurmctld.pid
SlurmdPidFile=$folder/run/slurmd.%n.pid
SlurmdSpoolDir=$folder/%n
TmpFS=$folder/%n
StateSaveLocation=$folder/state
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=2
ReturnToService=2
KillWait=5
GresTypes=gpu
PlugStackConfig=$folder/plugstack.conf
NodeName=n[1-3] NodeAddr=10.79.0.[1-3] NodeHostname=n[1-3] CPUs=8 RealMemory=8000 Gres=gpu:8 State=UNKNOWN
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
# pyxis' options, with the mount point that NeMo-Run asks for.
: >"$folder/plugstack.conf"
if command -v gcc >/dev/null && [ -e /usr/include/slurm/spank.h ]; then
    gcc -shared -fPIC -o "$folder/containers.so" "$(dirname "$0")/containers.c"
    echo "required $folder/containers.so" >"$folder/plugstack.conf"
    mkdir -p /nemo_run
fi
echo "CgroupPlugin=cgroup/v1" >"$folder/cgroup.conf"
echo "NodeName=n[1-3] Name=gpu File=$folder/gpu[0-7]" >"$folder/gres.conf"
{
    cat /etc/hosts
    printf '10.79.0.%s n%s\n' 1 1 2 2 3 3
} >"$folder/hosts"

if ! munge -n >/dev/null 2>&1; then
    mkdir -p /run/munge
    chown munge:munge /run/munge
    chmod 755 /run/munge
    su -s /bin/sh munge -c "munged --pid-file=/run/munge/flashrl.pid"
fi
ip link add flashrlbr type bridge
ip addr add 10.79.0.254/24 dev flashrlbr
ip link set flashrlbr up
export SLURM_CONF="$folder/slurm.conf"
slurmctld -f "$SLURM_CONF" -c
for i in 1 2 3; do
    mkdir -p "$folder/n$i"
    ip netns add "flashrl-n$i"
    ip link add "flashrlv$i" type veth peer name eth0 netns "flashrl-n$i"
    ip link set "flashrlv$i" master flashrlbr up
    ip -n "flashrl-n$i" addr add "10.79.0.$i/24" dev eth0
    ip -n "flashrl-n$i" link set eth0 up
    ip -n "flashrl-n$i" link set lo up
    ip netns exec "flashrl-n$i" unshare --mount --uts sh -c \
        "mount --make-rprivate / && mount --bind $folder/hosts /etc/hosts && hostname n$i && exec slurmd -f $SLURM_CONF -N n$i"
done
for _ in $(seq 60); do
    [ "$(sinfo --noheader --Node --states=idle | wc -l)" = 3 ] && exit
    sleep 0.5
done
echo "the nodes did not come up: $(tail -n 1 "$folder/log/slurmctld.log")" >&2
exit 1
