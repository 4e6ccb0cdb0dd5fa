#!/usr/bin/env bash
# NVIDIA's images prepare the environment in an entry point of their own; it runs first where there is one.
set -euo pipefail
base=/opt/nvidia/nvidia_entrypoint.sh
if [ -x "$base" ]; then
    exec "$base" "$@"
fi
exec "$@"
