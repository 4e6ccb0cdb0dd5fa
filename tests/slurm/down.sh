#!/usr/bin/env bash
# Undo up.sh: every process in the nodes' namespaces, the namespaces, the bridge, the daemons that it started.
for file in /run/flashrl-slurmctld.pid /run/munge/flashrl.pid; do
    if [ -e "$file" ]; then
        kill "$(cat "$file")" 2>/dev/null
        rm -f "$file"
    fi
done
for i in 1 2 3; do
    ip netns pids "flashrl-n$i" 2>/dev/null | xargs --no-run-if-empty kill -KILL
    ip netns del "flashrl-n$i" 2>/dev/null
done
ip link del flashrlbr 2>/dev/null
rmdir /nemo_run 2>/dev/null
exit 0
