#!/usr/bin/env bash
# What four techniques are worth on the rehearsal's task, one at a time, from GRPO with a KL to the first policy:
# clip of advantages, normalisation, temperature, annealing of the KL. About 40 seconds of one core for each of 8 runs a
# seed; what is finished is kept: rerun the same command to resume, with more seeds too.
#
#   examples/ablation.sh [FOLDER [SEEDS [OPTIONS of flashrl ablate]]]
set -euo pipefail

folder=${1:-runs/ablation}
seeds=${2:-3}

for ((seed = 0; seed < seeds; seed++)); do
    if [ ! -d "$folder/warm_start/$seed" ]; then
        rm -rf "$folder/warm_start/$seed.part"
        python -c 'import sys; from nemo_flashrl.rehearsal.warm_start import make_warm_start as make
make(sys.argv[1] + ".part", int(sys.argv[2]))' "$folder/warm_start/$seed" "$seed"
        mv "$folder/warm_start/$seed.part" "$folder/warm_start/$seed"
    fi
done

# Success is measured at temperature 1 on tasks outside the training set, whatever a run trains with. Sixty updates end
# before the task is solved in full, where runs still differ.
exec python -m nemo_flashrl.cli ablate rehearsal +budget=100h "model.path='$folder/warm_start/\${trainer.seed}'" \
    trainer.steps=60 evaluation.every_steps=10 evaluation.tasks=256 evaluation.settings.seed=1073741824 \
    --vary advantage.clip=null,3,1 \
    --vary algorithm.settings.normalisation=z_score,quantile,none \
    --vary rollout.temperature=1.0,0.85 \
    --vary 'rollout.temperature_schedule=[],[[0,1.0],[0.25,0.85]]' \
    --vary kl.schedule=fixed,annealed \
    --seeds "$seeds" --output "$folder" "${@:3}"
