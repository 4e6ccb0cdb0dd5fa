"""Training with a reference policy; every claim about it is checked on each rank around the real steps."""

from __future__ import annotations

import os
from pathlib import Path

import lightning.pytorch as pl
import torch
from megatron.core import dist_checkpointing

from nemo_flashrl.callbacks import EMAReferenceCallback
from nemo_flashrl.weights.shards import stream_hf_tensors, unwrap
from workers.parity import Driver, make_run

SKIPPED = 2  # the optimizer refuses this step, counted from 1


class Before(pl.Callback):
    """Runs before the reference's hook: remembers every bit."""

    def on_megatron_microbatches_start(self, step) -> None:
        self.bits = everything(step)


class After(pl.Callback):
    """Runs after it: compares, and writes down what the reference said and of which weights."""

    def __init__(self, before: Before, reference: EMAReferenceCallback, out: Path, vocab_size: int) -> None:
        self.before, self.reference, self.out, self.vocab_size = before, reference, out, vocab_size
        self.steps, self.identical, self.raised, self.count = [], [], [], 0

    def hf(self, module) -> dict[str, torch.Tensor]:
        return {n: t.double().clone() for n, t in stream_hf_tensors(unwrap(module), self.vocab_size)}

    def on_megatron_microbatches_start(self, step) -> None:
        self.count += 1
        same = all(torch.equal(a, b) for a, b in zip(self.before.bits, everything(step), strict=True))
        self.identical.append(same)
        if self.count == SKIPPED:
            for optimizer in step.trainer.strategy.optimizers:
                optimizer.mcore_optimizer.prepare_grads = lambda: True
        elif self.count == SKIPPED + 1:
            for optimizer in step.trainer.strategy.optimizers:
                del optimizer.mcore_optimizer.prepare_grads
        values = [v.clone() for v in self.reference.shadow.values.values()]
        with self.reference.swapped_in():
            reference = self.hf(step.pipeline.module)
        try:
            with self.reference.swapped_in():
                raise KeyError("inside")
        except KeyError:
            kept = all(torch.equal(a, b) for a, b in zip(values, self.reference.shadow.values.values(), strict=True))
            self.raised.append(
                kept and all(torch.equal(a, b) for a, b in zip(self.before.bits, everything(step), strict=True))
            )
        microbatches = list(step.data)
        step.data = iter(microbatches)
        rows = []
        for m in microbatches:
            for row, length in enumerate(m["lengths"].tolist() if "reference_logprobs" in m else ()):
                own = (m["row_index"] == row).flatten().nonzero().flatten()[:length]
                rows.append((m["targets"].flatten()[own][:-1], m["reference_logprobs"].flatten()[own]))
        metrics = step.trainer.datamodule.current_step.metrics
        self.steps.append({"reference": reference, "policy": self.hf(step.pipeline.module), "rows": rows})
        self.steps[-1] |= {name: metrics[name] for name in metrics if name.startswith("reference_")}

    def on_train_end(self, trainer, module) -> None:
        model = unwrap(module)
        embeddings = [
            value
            for name, value in self.reference.shadow.values.items()
            if name.endswith(("word_embeddings.weight", "output_layer.weight"))
        ]
        everyone = [None] * torch.distributed.get_world_size()
        mine = {
            "identical": self.identical,
            "raised": self.raised,
            "updates": self.reference.updates,
            "embeddings": embeddings,
            "rows": [s["rows"] for s in self.steps],
            "restored": self.restored(model),
        }
        torch.distributed.all_gather_object(everyone, mine)
        with self.reference.swapped_in():
            final = self.hf(module)
        state = self.reference.state_dict()
        try:
            self.reference.load_state_dict({**state, "beta": 0.123})
        except ValueError as error:
            refused = str(error)
        if torch.distributed.get_rank() == 0:
            torch.save({"steps": self.steps, "ranks": everyone, "final": final, "refused": refused}, self.out)

    def restored(self, model) -> bool:
        """Through a distributed checkpoint of Megatron's and back."""
        folder = self.out.with_suffix(".checkpoint")
        if torch.distributed.get_rank() == 0:
            folder.mkdir()
        torch.distributed.barrier()
        kept = {name: value.clone() for name, value in self.reference.shadow.values.items()}
        dist_checkpointing.save({"shadow": self.reference.sharded_state_dict(model)}, str(folder))
        for value in self.reference.shadow.values.values():
            value.fill_(7)
        self.load(model, folder)
        return all(torch.equal(kept[name], value) for name, value in self.reference.shadow.values.items())

    def load(self, model, folder: Path) -> None:
        loaded = dist_checkpointing.load({"shadow": self.reference.sharded_state_dict(model)}, str(folder))
        self.reference.load_shadow(loaded["shadow"])


class Resharded(After):
    """Takes the reference from a checkpoint of other parallel sizes at the end."""

    folder: Path

    def restored(self, model) -> bool:
        self.load(model, self.folder)
        return True


def everything(step) -> list[torch.Tensor]:
    """Copies of parameters, buffers, gradients and the optimizer's tensors."""
    model = unwrap(step.pipeline.module)
    found = [*model.parameters(), *model.buffers(), *(p.main_grad for p in model.parameters())]
    for optimizer in step.trainer.strategy.optimizers:
        for state in optimizer.mcore_optimizer.optimizer.state.values():
            found += [v for v in state.values() if torch.is_tensor(v)]
    return [t.detach().clone() for t in found]


def main(
    model_folder: Path,
    trajectories: Path,
    out: Path,
    vocab_size: int,
    settings: dict,
    *overrides: str,
    distributed_optimizer: bool = False,
    checkpoint: Path | None = None,
) -> None:
    driver = Driver(trajectories) if os.environ["RANK"] == "0" else None
    before, reference = Before(), EMAReferenceCallback(**settings)
    after = (After if checkpoint is None else Resharded)(before, reference, out, vocab_size)
    after.folder = checkpoint
    callbacks = [before, reference, after]
    trainer, model, data = make_run(model_folder, out, vocab_size, driver, callbacks, overrides, gate=False)
    if distributed_optimizer:  # its parameters are gathered under the next forward pass
        fields = ("use_distributed_optimizer", "overlap_param_gather", "overlap_grad_reduce")
        for name in fields:
            setattr(trainer.strategy.ddp_config, name, True)
        model.optim.config.use_distributed_optimizer = model.optim.config.overlap_param_gather = True
    trainer.fit(model, datamodule=data)
