# shellcheck shell=bash
# Sourced by the job scripts beside it: two steps of one job that live and die together.

# Where a step runs: in a container where FLASHRL_IMAGE / FLASHRL_ROLLOUT_IMAGE name one (pyxis), on the node otherwise.
container() { # container IMAGE
    if [ -n "$1" ]; then
        printf '%s\n' "--container-image=$1" --no-container-mount-home
        [ -z "${FLASHRL_MOUNTS:-}" ] || printf '%s\n' "--container-mounts=$FLASHRL_MOUNTS"
    fi
}

# Wait until one of the two steps ends, end the other, and return what the job shall end with.
# Slurm's warning before the time limit (`--signal=B:USR1@...`) is passed on to the trainer, which saves and ends with 75.
supervise() { # supervise SERVERS_PID TRAINER_PID
    local servers=$1 trainer=$2 code
    trap stop_trainer USR1 TERM
    while kill -0 "$servers" 2>/dev/null && kill -0 "$trainer" 2>/dev/null; do
        wait -n # also ended by the trap
    done
    if kill -0 "$trainer" 2>/dev/null; then
        wait "$servers"
        code=$?
        echo "the rollout servers ended with $code; ending the trainer" >&2
        stop_trainer
        wait_for "$trainer"
        return $((code == 0 ? 1 : code))
    fi
    wait "$trainer"
    code=$?
    echo "the trainer ended with $code; ending the rollout servers" >&2
    kill -TERM "$servers" 2>/dev/null
    wait_for "$servers"
    return "$code"
}

# SIGTERM to the trainer's tasks. Not to its srun, which would kill them.
stop_trainer() {
    local step
    for step in $(squeue --noheader --steps --job "${SLURM_JOB_ID_HET_GROUP_1:-$SLURM_JOB_ID}" --format "%i %j" | awk '$2 == "trainer" { print $1 }'); do
        scancel --signal=TERM "$step"
    done
}

# A signal ends `wait` before the process has ended: wait again.
wait_for() { while kill -0 "$1" 2>/dev/null; do wait "$1"; done; }

# The trainer's 75 means: saved, start me again. A requeued job keeps its id, finds its output and resumes there; where
# the run is complete, the trainer says so and ends with 0.
finish() { # finish CODE
    if [ "$1" = 75 ]; then
        echo "saved; requeueing job $SLURM_JOB_ID" >&2
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$1"
}
