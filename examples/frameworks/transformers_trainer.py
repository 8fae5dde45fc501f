"""Hugging Face's Trainer whose workers live through a change of the world: they load its last checkpoint.

elastic-run --nproc-per-node=2 --max-restarts=10 examples/frameworks/transformers_trainer.py --folder checkpoints
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from elastic_rs import elastic
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small language model with Hugging Face's Trainer, in place.")
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints; all nodes see it")
    parser.add_argument("--steps", type=int, default=20, help="total (default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=5, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument(
        "--pause", type=float, default=0.0, metavar="SECONDS", help="after each step, to have time to watch"
    )
    return parser.parse_args()


class Watched(TrainerCallback):
    """Prints, and slows training down so that there is something to watch."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        print(
            f"world {elastic.size()}  rank {elastic.rank()}  pid {os.getpid()}  from step {state.global_step}",
            flush=True,
        )

    def on_log(self, args: TrainingArguments, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if elastic.rank() == 0 and "loss" in logs:
            print(f"step {state.global_step}  loss {float(logs['loss']):.9f}", flush=True)

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        time.sleep(self.pause_s)


@elastic.run
def train(state: elastic.ObjectState, args: argparse.Namespace) -> None:
    class Commit(TrainerCallback):
        def on_save(self, args: Any, progress: Any, *_: Any, **__: Any) -> None:
            dist.barrier()  # all ranks have written their parts
            state.checkpoint = f"{args.output_dir}/checkpoint-{progress.global_step}"
            state.commit()

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    )
    tokens = (torch.arange(512).unsqueeze(1) + torch.arange(8)) % 32  # each row counts on from its first number
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.folder),
            max_steps=args.steps,
            save_steps=args.save_every,
            save_total_limit=3,
            logging_steps=1,
            per_device_train_batch_size=4,
            learning_rate=0.01,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[Commit(), Watched(args.pause)],
    )
    trainer.train(resume_from_checkpoint=state.checkpoint)
    print(f"done  rank {elastic.rank()}  pid {os.getpid()}", flush=True)


if __name__ == "__main__":
    args = parse_args()
    torch.set_num_threads(1)  # many workers share the cores of one machine
    checkpoint = get_last_checkpoint(args.folder) if args.folder.exists() else None  # of a job that was stopped
    train(elastic.ObjectState(checkpoint=checkpoint), args)
