"""FlashREINFORCE through NeMo's own Trainer, each part made by hand and no configuration file.

    python examples/train_with_nemo.py CHECKPOINT OUTPUT STEPS

CHECKPOINT is a Hugging Face folder that can play the key-value store, such as the warm start of `flashrl rehearse`.
`torchrun --nproc-per-node 2` in place of `python` trains on two data-parallel processes.
"""

import os
import sys

from nemo_flashrl import environments, platform

platform.install()  # before NeMo is imported: for a CPU, and for megatron-core 0.16

import nemo.lightning as nl
from megatron.core.optimizer import OptimizerConfig
from transformers import AutoTokenizer

from nemo_flashrl.callbacks import RLMetricsCallback, WeightRefitCallback
from nemo_flashrl.data import BatchingSettings, LengthBatcher, RolloutDataModule
from nemo_flashrl.engines import TransformersEngine
from nemo_flashrl.models import FlashReinforceModel, nemo_config
from nemo_flashrl.rollout import Collector, Limits, RolloutDriver, Sampling

checkpoint, output, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
context = 128  # tokens of an episode, prompt included
tokenizer = AutoTokenizer.from_pretrained(checkpoint)

driver = None
if os.environ.get("RANK", "0") == "0":  # where episodes are played
    KeyValueStore = environments.load("key_value_store")
    settings, limits = KeyValueStore.Settings(), Limits(max_context=context)
    sampling = Sampling(max_tokens=8, stop_token_ids=tuple(tokenizer.convert_tokens_to_ids([")", "<eos>"])))
    engine, tasks = TransformersEngine(checkpoint), KeyValueStore.tasks(settings)
    collector = Collector(
        engine, lambda: KeyValueStore(settings), tasks, tokenizer, limits=limits, sampling=sampling, batch_size=16
    )
    driver = RolloutDriver(engine, collector)

optimizer = nl.MegatronOptimizerModule(OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0))
model = FlashReinforceModel(nemo_config(checkpoint, context_length=context), hf_folder=checkpoint, optim=optimizer)
batcher = LengthBatcher(BatchingSettings(max_tokens_per_microbatch=512, context_length=context))
data = RolloutDataModule(driver.collect if driver else None, model.algorithm, batcher)
refit = WeightRefitCallback(driver)
trainer = nl.Trainer(
    accelerator=platform.accelerator(),
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    strategy=platform.make_strategy(),
    max_steps=steps,
    callbacks=[refit, RLMetricsCallback(output, data, refit, tokenizer)],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, datamodule=data)
model.save_hf_folder(f"{output}/checkpoint")
if driver:
    driver.close()
