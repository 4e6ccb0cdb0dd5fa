#!/usr/bin/env bash
# build_transformer_engine.sh VENV VERSION: compile transformer-engine-torch from its source archive for the torch of that
# environment, and install it. No GPU is needed; MAX_JOBS files at a time. A rerun compiles what is left, and installs a
# wheel that is there.
set -euo pipefail
venv=$(realpath "$1") version=$2
python=$venv/bin/python
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
torch=$("$python" -c 'import torch; assert torch.version.cuda, "the CPU build of torch"; print(torch.__version__)')
build=$venv/transformer-engine-$version-torch-$torch
wheels=("$build"/*.whl)
if [ ! -f "${wheels[0]}" ]; then
    export CUDA_HOME=$site/nvidia/cu13 MAX_JOBS=${MAX_JOBS:-1} NVTE_FRAMEWORK=pytorch NVTE_NO_LOCAL_VERSION=1
    export PATH=$venv/bin:$PATH
    for library in cudnn nccl; do
        CPLUS_INCLUDE_PATH=$site/nvidia/$library/include${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}
    done
    export CPLUS_INCLUDE_PATH=$CUDA_HOME/include/cccl:$CPLUS_INCLUDE_PATH
    mkdir -p "$build"
    source=$build/transformer_engine_torch-$version
    if [ ! -d "$source" ]; then
        "$python" -m pip download --quiet --no-deps --no-binary transformer-engine-torch --no-build-isolation \
            --dest "$build" "transformer-engine-torch==$version"
        mkdir -p "$build/unpacked"
        tar -xzf "$source.tar.gz" -C "$build/unpacked"
        # Nothing of it runs for long without a GPU.
        sed -i 's/"-O3"/"-O0"/' "$build/unpacked/transformer_engine_torch-$version/build_tools/pytorch.py"
        mv "$build/unpacked/transformer_engine_torch-$version" "$source"
    fi
    "$python" -m pip wheel --no-deps --no-build-isolation --wheel-dir "$build" "$source"
    wheels=("$build"/*.whl)
fi
"$python" -m pip install --quiet --no-deps "${wheels[0]}"
