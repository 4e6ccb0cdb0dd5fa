#!/usr/bin/env bash
# Build and try both images where no registry can be reached: on stand-ins for their bases, made of a Debian and of the
# environments that `make setup` and `make rollout-venv` have installed.
#
#   docker/try_without_registry.sh FOLDER [trainer|tests|rollout|refusal ...]     as root; 20 GB; apt: buildah debootstrap
#
# STORAGE_DRIVER=vfs where the kernel has no overlay file system; MIRROR=URL where Debian's packages come from another
# place than debootstrap's default.
#
# It proves that every step of the Dockerfiles runs, that nothing of the base is replaced and a base that would need it
# is refused, that entry point, launcher scripts and import check work, as any user, and that `make test` runs inside.
# What NVIDIA's and vLLM's own images hold (Python 3.12, CUDA, Transformer Engine, an entry point of their own), and
# whether their packages are new enough for this package, only those images can show.
set -euo pipefail
cd "$(dirname "$0")/.."
FOLDER=$(realpath -m "${1:?usage: try_without_registry.sh FOLDER [trainer|tests|rollout|refusal ...]}")
shift
[ $# -gt 0 ] || set -- trainer tests
VENV=$(realpath "${VENV:-.venv}") ROLLOUT_VENV=$(realpath -m "${ROLLOUT_VENV:-.venv-rollout}")
TESTS=${TESTS:-tests/algorithms/test_advantages.py tests/package/test_recipes.py tests/package/test_imports.py}
DEBIAN=ca-certificates,make,git,procps,libssl3,libffi8,libsqlite3-0,libbz2-1.0,liblzma5,libreadline8,libncursesw6,libuuid1,libgomp1,libnuma1
mkdir -p "$FOLDER"

storage() { buildah --root "$FOLDER/storage" --runroot "$FOLDER/run" --storage-driver "${STORAGE_DRIVER:-overlay}" "$@"; }

debian() {
    [ -e "$FOLDER/debian/etc/debian_version" ] ||
        debootstrap --variant=minbase --include="$DEBIAN" bookworm "$FOLDER/debian" ${MIRROR:+"$MIRROR"} >"$FOLDER/debootstrap.log"
}

# An image NAME whose /opt/venv has VENV's packages, without this one.
stand_in() { # stand_in NAME VENV
    local name=$1 venv=$2 container root python library
    storage inspect --type image "$name" >/dev/null 2>&1 && return
    debian
    container=$(storage from scratch)
    root=$(storage mount "$container")
    cp -a "$FOLDER/debian/." "$root/"
    python=$("$venv/bin/python" -c 'import sys; print(sys.base_prefix)')
    library=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("stdlib", "posix_prefix", {"installed_base": "", "base": ""}))')
    mkdir -p "$root/opt/python/lib"
    cp -a "$python/bin" "$root/opt/python/"
    cp -a "$python"/lib/libpython* "$root/opt/python/lib/"
    tar -C "$python" --exclude=site-packages --exclude=test --exclude=__pycache__ -cf - "${library#/}" | tar -C "$root/opt/python" -xf -
    echo /opt/python/lib >"$root/etc/ld.so.conf.d/python.conf"
    chroot "$root" ldconfig
    chroot "$root" /opt/python/bin/python3 -m venv --without-pip /opt/venv
    tar -C "$venv/${library#/}" --exclude=__pycache__ --exclude='site-packages/nemo_flashrl*' --exclude='site-packages/__editable__*' \
        -cf - site-packages | tar -C "$root/opt/venv/${library#/}" -xf -
    cp -an "$venv"/bin/. "$root/opt/venv/bin/"
    rm -f "$root/opt/venv/bin/flashrl"
    grep -rIl "^#!$venv/bin/" "$root/opt/venv/bin" | xargs -r sed -i "1s|^#!$venv/bin/|#!/opt/venv/bin/|"
    storage config --env PATH=/opt/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
    storage commit --quiet --rm "$container" "$name" >/dev/null
}

build() { # build DOCKERFILE BASE NAME
    storage bud --isolation chroot --format docker --pull-never --build-arg "BASE_IMAGE=$2" -f "docker/$1" -t "$3" .
}

say() { printf '\n== %s\n' "$*"; }

# try IMAGE USER COMMAND...: through the image's own entry point.
try() {
    local image=$1 user=$2 container code=0
    shift 2
    say "$image as $user: $*"
    container=$(storage from --pull-never "$image")
    mapfile -t entry < <(storage inspect --format '{{range .OCIv1.Config.Entrypoint}}{{println .}}{{end}}' "$container" | sed '/^$/d')
    storage run --isolation chroot --user "$user" --env HOME=/tmp "$container" -- "${entry[@]}" "$@" || code=$?
    storage rm "$container" >/dev/null
    return "$code"
}

trainer() {
    stand_in localhost/stand-in-nemo "$VENV"
    build Dockerfile localhost/stand-in-nemo localhost/nemo-flashrl
    storage inspect --type image --format '{{.OCIv1.Config.Labels}}' localhost/nemo-flashrl
    try localhost/nemo-flashrl 0:0 python3 /opt/nemo_flashrl/docker/check_image.py
    try localhost/nemo-flashrl 12345:12345 bash -c 'cd /tmp && id -u && flashrl plan llama3_8b_32k >/dev/null && flashrl --help | head -n 1'
    for script in serve_ppo_critic train_gpt_ppo_actor; do
        try localhost/nemo-flashrl 12345:12345 python3 "/opt/NeMo-Aligner/examples/nlp/gpt/$script.py" --help
    done
    try localhost/nemo-flashrl 12345:12345 bash -c 'cd /tmp && OMP_NUM_THREADS=1 flashrl rehearse --experiment math_qwen2_5_1_5b cluster.gpus_per_node=1'
}

# Of the image that `trainer` has built.
tests() { try localhost/nemo-flashrl 0:0 make test ARGS="$TESTS"; }

rollout() {
    stand_in localhost/stand-in-vllm "$ROLLOUT_VENV"
    build Dockerfile.rollout localhost/stand-in-vllm localhost/nemo-flashrl-rollout
    try localhost/nemo-flashrl-rollout 12345:12345 flashrl serve-rollout --help
    try localhost/nemo-flashrl-rollout 12345:12345 python3 -c 'import vllm, nemo_flashrl.rollout_server.worker; print("vllm", vllm.__version__)'
}

# A base whose omegaconf is older than this package needs: the build must stop instead of replacing it.
refusal() {
    local container root info
    stand_in localhost/stand-in-nemo "$VENV"
    container=$(storage from --pull-never localhost/stand-in-nemo)
    root=$(storage mount "$container")
    info=$(echo "$root"/opt/venv/lib/python3*/site-packages/omegaconf-*.dist-info)
    sed -i 's/^Version: .*/Version: 2.0.6/' "$info/METADATA"
    mv "$info" "${info%/*}/omegaconf-2.0.6.dist-info"
    storage commit --quiet --rm "$container" localhost/stand-in-old >/dev/null
    if build Dockerfile localhost/stand-in-old localhost/nemo-flashrl-old >"$FOLDER/refusal.log" 2>&1; then
        echo "a base with omegaconf 2.0.6 was built on" >&2
        return 1
    fi
    grep -F "(constraint) omegaconf==2.0.6" "$FOLDER/refusal.log" # not for want of a registry
    say "refused, as it has to be"
}

for part; do "$part"; done
say "all done: $*"
