#!/usr/bin/env python3
"""Trains a GPT-2 in PyTorch from the same weights on the same batches as a trainer did, and
compares the losses.

    compare_torch.py FOLDER SHARD LOG --seq 64 --batch 8 --lr 1e-3 [--steps 300] [--tolerance 1e-4]

FOLDER holds the weights that the trainer began with (--steps 0 --out saves them), LOG its losses at
a constant learning rate without shuffling. PyTorch trains in float64 with AdamW, clipping and decay
as the trainers do by default. Needs the packages torch and transformers from PyPI; the exit code
says whether every loss is within the tolerance.
"""

import argparse
import json
import os
import sys
import time


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("folder", "shard", "log"):
        parser.add_argument(name)
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, help="largest difference of a loss (default 1e-4)"
    )
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import numpy
        import torch
        import transformers
    except ImportError as missing:
        sys.exit(f"error: {missing}: pip install torch transformers")

    with open(args.log, encoding="utf-8") as file:
        ours = [line["loss"] for line in map(json.loads, file) if "loss" in line]
    tokens = numpy.fromfile(args.shard, dtype="<u2", offset=1024).astype("int64")
    samples = (len(tokens) - 1) // args.seq
    if len(ours) < args.steps:
        sys.exit(f"error: {args.log} has {len(ours)} steps, not {args.steps}")

    model = (
        transformers.GPT2LMHeadModel.from_pretrained(args.folder).to(torch.float64).eval()
    )  # eval: no dropout
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    worst, worst_step, begun = 0.0, 0, time.monotonic()
    for step in range(args.steps):
        numbers = [(step * args.batch + i) % samples * args.seq for i in range(args.batch)]
        inputs = torch.tensor(numpy.stack([tokens[n : n + args.seq] for n in numbers]))
        targets = torch.tensor(numpy.stack([tokens[n + 1 : n + 1 + args.seq] for n in numbers]))
        loss = torch.nn.functional.cross_entropy(
            model(inputs).logits.flatten(0, 1), targets.flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters())).item()
        if norm > 1.0:
            for p in model.parameters():
                p.grad /= norm
        optimizer.step()
        difference = abs(loss.item() - ours[step])
        if not difference <= worst and worst == worst:  # once it is no number it stays that
            worst, worst_step = difference, step + 1
        if (step + 1) * 10 // args.steps > step * 10 // args.steps and step + 1 < args.steps:
            left = (time.monotonic() - begun) * (args.steps / (step + 1) - 1)
            print(
                f"             PyTorch: step {step + 1}/{args.steps} | loss {loss.item():.6f} "
                f"| {left:.0f}s left",
                flush=True,
            )
    print(
        f"PyTorch {torch.__version__} in float64, {args.steps} steps: "
        f"the losses differ by at most {worst:.2e} "
        f"(step {worst_step}); the last is {loss.item():.6f}, ours {ours[args.steps - 1]:.6f}"
    )
    if not worst <= args.tolerance:
        sys.exit("error: the losses differ")


if __name__ == "__main__":
    main()
