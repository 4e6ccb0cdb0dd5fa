#!/usr/bin/env bash
# install.sh [EXTRA]: add the package to an image without replacing anything that the image was tested with.
set -euo pipefail
cd "$(dirname "$0")/.."
before=$(mktemp) after=$(mktemp)
trap 'rm -f "$before" "$after"' EXIT
# As name==version: `pip freeze` would name the wheels' folders of the image's own build, which are gone.
python3 -m pip list --format=freeze --disable-pip-version-check --exclude nemo_flashrl | sort >"$before"
python3 -m pip install --no-cache-dir --disable-pip-version-check --no-build-isolation --constraint "$before" ".${1:+[$1]}"
python3 -m pip list --format=freeze --disable-pip-version-check --exclude nemo_flashrl | sort >"$after"
changed=$(comm -23 "$before" "$after")
if [ -n "$changed" ]; then
    printf 'packages of the base image were replaced:\n%s\n' "$changed" >&2
    exit 1
fi
