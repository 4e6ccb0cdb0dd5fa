"""FlashREINFORCE for NeMo and Megatron: the map. `train.py` draws the loop.

What a run is told, and what is refused before it starts:

    cli.py           `flashrl COMMAND`
    commands/        one file per command: its arguments, and what it prints
    recipes.py       the same for NeMo-Run
    config/          the typed configuration, the only reader of YAML
    plugins.py       names in a configuration -> algorithms, environments, functions
    preflight/       everything that is refused before a model is built
    run/             the run's folder: what it holds, who may write there, how it is read back

The loop, in the order in which data meets it:

    train.py         prepare, build, fit, export
    build.py         configuration -> objects; what each callback may change
    records.py       what travels: generations, trajectories, batches
    environments/    what an episode is played against, one file each
    engines/         token ids -> tokens: vLLM and SGLang servers, transformers in process
    rollout/         prompts -> episodes -> a batch of trajectories
    batching/        lengths -> the microbatches of every rank
    data/            a batch -> this rank's microbatches, as tensors
    models/          NeMo model classes: log-probs and loss on the last pipeline stage
    ops/             the policy head: log-probs without logits
    algorithms/      advantages, techniques and losses, functions of tensors
    callbacks/       around the optimizer step: reference, KL, new weights to the sampler, metrics, checkpoints
    weights/         live shards <-> Hugging Face names, LoRA
    weight_sync/     what trainer and rollout servers share of the weights on their way
    rollout_server/  our side of a vLLM server, in vLLM's own environment

What a run shows, and what stands around it:

    metrics/         the numbers of a step: what each means, how they are formed, watched and shown
    doctor/          what is wrong with a run, before one, or with a node
    report/          one HTML page of one or several runs
    plan/            memory and time of a layout, by formula
    convert/         whole checkpoints: Hugging Face <-> NeMo
    rehearsal/       the whole path, small, on a CPU
    ablation/        one setting at a time, over seeds
    launch/          processes and jobs
    platform/        CPU and GPU differences, upstream patches

Importing the package imports nothing heavy.
"""
