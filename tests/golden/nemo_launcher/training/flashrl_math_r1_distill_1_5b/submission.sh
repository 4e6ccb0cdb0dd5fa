#!/bin/bash

# Parameters
#SBATCH --dependency=singleton
#SBATCH --error=/results/flashrl_math_r1_distill_1_5b/log-nemo-megatron-flashrl_math_r1_distill_1_5b_%j.err
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --job-name=nemo-megatron-flashrl_math_r1_distill_1_5b
#SBATCH --mem=0
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --output=/results/flashrl_math_r1_distill_1_5b/log-nemo-megatron-flashrl_math_r1_distill_1_5b_%j.out
#SBATCH --time=1-00:00:00

# setup
export TRANSFORMERS_OFFLINE=0
export TORCH_NCCL_AVOID_RECORD_STREAMS=1
export NCCL_NVLS_ENABLE=0

# command 1
srun --output /results/flashrl_math_r1_distill_1_5b/log-nemo-megatron-flashrl_math_r1_distill_1_5b_%j.out --error /results/flashrl_math_r1_distill_1_5b/log-nemo-megatron-flashrl_math_r1_distill_1_5b_%j.err --container-image nemo-flashrl --container-mounts /launcher:/launcher,/launcher/data:/launcher/data,/results:/results --no-container-mount-home bash -c "
  cd /opt/NeMo;
  git rev-parse HEAD;
  export PYTHONPATH=/opt/NeMo:\${PYTHONPATH};
  (echo PYT$"NVIDIA_PYTORCH_VERSION";                 git --git-dir=/opt/NeMo/.git log -n 5 --format='NeMo;%h;%aD;%s';                 git --git-dir=/opt/megatron-lm/.git log -n 5 --format='megatron-lm;%h;%aD;%s';                 git --git-dir=/opt/NeMo-Framework-Launcher/.git log -n 5 --format='NeMo-Framework-Launcher;%h;%aD;%s') > /results/flashrl_math_r1_distill_1_5b/git_log.txt;
  CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 python3 -u /opt/NeMo/examples/nlp/language_modeling/megatron_gpt_pretraining.py  \
  --config-path=/results/flashrl_math_r1_distill_1_5b \
  --config-name=nemo-megatron-flashrl_math_r1_distill_1_5b_hydra.yaml "
