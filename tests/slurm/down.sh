#!/usr/bin/env bash
# Undo up.sh FOLDER: every process in the nodes' namespaces, the namespaces, the bridge, the daemons that it started.
folder=$1
if [ -e "$folder/run/slurmctld.pid" ]; then
    kill "$(cat "$folder/run/slurmctld.pid")"
fi
for i in 1 2 3; do
    ip netns pids "flashrl-n$i" 2>/dev/null | xargs --no-run-if-empty kill -KILL
    ip netns del "flashrl-n$i" 2>/dev/null
done
ip link del flashrlbr 2>/dev/null
if [ -e /run/munge/flashrl.pid ]; then
    kill "$(cat /run/munge/flashrl.pid)"
fi
exit 0
