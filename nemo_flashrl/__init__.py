"""FlashREINFORCE for NeMo and Megatron. The stages, in the order in which data meets them:

    config/          the typed configuration, the only reader of YAML
    preflight.py     what can be refused before a model is built
    resume.py        what an output folder holds, and whether a run may be resumed there; run_lock.py: one at a time
    train.py         configuration -> objects -> trainer.fit
    rollout/         prompts -> episodes -> a batch of trajectories (records.py)
    environments/    what an episode is played against, one file each
    data/            a batch -> microbatches of every rank
    models/          NeMo model classes: log-probs and loss on the last pipeline stage
    ops/             the policy head: log-probs without logits
    algorithms/      advantages, techniques and losses, pure functions of tensors
    callbacks/       around the optimizer step: weights to the sampler, metrics
    weights/         shards <-> Hugging Face names
    diagnostics/     what a run shows
    ablation/        one setting at a time, over seeds
    arguments.py     types of the command line's arguments
    conflicts.py     settings that hide each other
    rehearsal/       the whole path, small, on a CPU
    launch/          processes and jobs
    platform.py      CPU and GPU differences, upstream patches

Importing the package imports nothing heavy.
"""
