#!/bin/bash

# Parameters
#SBATCH --dependency=singleton
#SBATCH --error=/results/flashrl_llama3_70b/log-nemo-megatron-flashrl_llama3_70b_0_%j.err
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --job-name=nemo-megatron-flashrl_llama3_70b_0
#SBATCH --mem=0
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=8
#SBATCH --output=/results/flashrl_llama3_70b/log-nemo-megatron-flashrl_llama3_70b_0_%j.out
#SBATCH --time=1-00:00:00
#SBATCH hetjob
#SBATCH --dependency=singleton
#SBATCH --error=/results/flashrl_llama3_70b/log-nemo-megatron-flashrl_llama3_70b_1_%j.err
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --job-name=nemo-megatron-flashrl_llama3_70b_1
#SBATCH --mem=0
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --output=/results/flashrl_llama3_70b/log-nemo-megatron-flashrl_llama3_70b_1_%j.out
#SBATCH --time=1-00:00:00

# setup
export TRANSFORMERS_OFFLINE=0
export TORCH_NCCL_AVOID_RECORD_STREAMS=1
export NCCL_NVLS_ENABLE=0
export HETJOB0_HOST=$(scontrol show hostnames=$SLURM_JOB_NODELIST_HET_GROUP_0 | head -n1)
export HETJOB1_HOST=$(scontrol show hostnames=$SLURM_JOB_NODELIST_HET_GROUP_1 | head -n1)

# command 1
srun --output /results/flashrl_llama3_70b/log-nemo-megatron-flashrl_llama3_70b_0_%j.out --error /results/flashrl_llama3_70b/log-nemo-megatron-flashrl_llama3_70b_0_%j.err --container-image nemo-flashrl --container-mounts /launcher:/launcher,/launcher/data:/launcher/data,/results:/results --no-container-mount-home --het-group=0 bash -c "
  cd /opt/NeMo;
  git rev-parse HEAD;
  export PYTHONPATH=/opt/NeMo:\${PYTHONPATH};
  CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 python3 -u /opt/NeMo-Aligner/examples/nlp/gpt/serve_ppo_critic.py  \
  --config-path=/results/flashrl_llama3_70b \
  --config-name=gpt_ppo_critic.yaml " &

sleep 30

# command 2
srun --output /results/flashrl_llama3_70b/log-nemo-megatron-flashrl_llama3_70b_1_%j.out --error /results/flashrl_llama3_70b/log-nemo-megatron-flashrl_llama3_70b_1_%j.err --container-image nemo-flashrl --container-mounts /launcher:/launcher,/launcher/data:/launcher/data,/results:/results --no-container-mount-home --het-group=1 bash -c "
  cd /opt/NeMo;
  git rev-parse HEAD;
  export PYTHONPATH=/opt/NeMo:\${PYTHONPATH};
  CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 python3 -u /opt/NeMo-Aligner/examples/nlp/gpt/train_gpt_ppo_actor.py  \
  --config-path=/results/flashrl_llama3_70b \
  --config-name=gpt_ppo_actor.yaml \
  remote_critic_rm.critic.ip=${HETJOB0_HOST} " &

wait