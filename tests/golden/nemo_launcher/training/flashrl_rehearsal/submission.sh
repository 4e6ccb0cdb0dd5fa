#!/bin/bash

# Parameters
#SBATCH --dependency=singleton
#SBATCH --error=/results/flashrl_rehearsal/log-nemo-megatron-flashrl_rehearsal_%j.err
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --job-name=nemo-megatron-flashrl_rehearsal
#SBATCH --mem=0
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --output=/results/flashrl_rehearsal/log-nemo-megatron-flashrl_rehearsal_%j.out
#SBATCH --time=01:00:00

# setup
export TRANSFORMERS_OFFLINE=0
export TORCH_NCCL_AVOID_RECORD_STREAMS=1
export NCCL_NVLS_ENABLE=0

# command 1
srun --output /results/flashrl_rehearsal/log-nemo-megatron-flashrl_rehearsal_%j.out --error /results/flashrl_rehearsal/log-nemo-megatron-flashrl_rehearsal_%j.err --container-image nemo-flashrl --container-mounts /launcher:/launcher,/launcher/data:/launcher/data,/results:/results --no-container-mount-home bash -c "
  cd /opt/NeMo;
  git rev-parse HEAD;
  export PYTHONPATH=/opt/NeMo:\${PYTHONPATH};
  (echo PYT$"NVIDIA_PYTORCH_VERSION";                 git --git-dir=/opt/NeMo/.git log -n 5 --format='NeMo;%h;%aD;%s';                 git --git-dir=/opt/megatron-lm/.git log -n 5 --format='megatron-lm;%h;%aD;%s';                 git --git-dir=/opt/NeMo-Framework-Launcher/.git log -n 5 --format='NeMo-Framework-Launcher;%h;%aD;%s') > /results/flashrl_rehearsal/git_log.txt;
  CUDA_DEVICE_MAX_CONNECTIONS=1 CUDA_VISIBLE_DEVICES=0,1 python3 -u /opt/NeMo/examples/nlp/language_modeling/megatron_gpt_pretraining.py  \
  --config-path=/results/flashrl_rehearsal \
  --config-name=nemo-megatron-flashrl_rehearsal_hydra.yaml "
