#!/usr/bin/env python3
"""Loads a checkpoint folder in Hugging Face's transformers and computes its loss on a shard.

    check_transformers.py FOLDER SHARD --seq 128 --batch 8 [--loss 3.2941] [--tolerance 1e-4]

The loss is the mean over the first --batch samples of --seq tokens of the shard, as the trainers number them, in float64.
With --loss (what a trainer printed for those samples) the exit code says whether the two agree. Needs the
packages torch and transformers from PyPI; a machine without a GPU will do.
"""
import argparse
import os
import sys


def read_samples(path, seq, batch):
    """Sample n of a shard: inputs are tokens n*seq .. n*seq+seq, targets the same shifted by one."""
    import numpy

    header = numpy.fromfile(path, dtype="<i4", count=256)
    if len(header) < 256 or header[0] != 20240520 or header[1] != 1:
        sys.exit(f"error: {path} is no token shard of version 1")
    tokens = numpy.fromfile(path, dtype="<u2", offset=1024).astype("int64")
    if len(tokens) != header[2]:
        sys.exit(f"error: {path} says {header[2]} tokens but holds {len(tokens)}")
    if len(tokens) < batch * seq + 1:
        sys.exit(f"error: {path} has {len(tokens)} tokens, fewer than {batch} samples of {seq} need")
    inputs = tokens[: batch * seq].reshape(batch, seq)
    targets = tokens[1 : batch * seq + 1].reshape(batch, seq)
    return inputs, targets


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="checkpoint folder with config.json and model.safetensors")
    parser.add_argument("shard", help="tokens in llm.c's format")
    parser.add_argument("--seq", type=int, required=True, help="tokens of a sample")
    parser.add_argument("--batch", type=int, default=8, help="samples (default 8)")
    parser.add_argument("--loss", type=float, help="the loss that is expected")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest relative difference (default 1e-4)")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the folder
    try:
        import torch
        import transformers
    except ImportError as missing:
        sys.exit(f"error: {missing}: pip install torch transformers")

    inputs, targets = read_samples(args.shard, args.seq, args.batch)
    model, report = transformers.GPT2LMHeadModel.from_pretrained(args.folder, output_loading_info=True)
    stored = next(model.parameters()).dtype
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        # The head is the tied embedding, so that it is no key of its own.
        keys = [key for key in report.get(what) or [] if key != "lm_head.weight"]
        if keys:
            sys.exit(f"error: {what.replace('_', ' ')}: {', '.join(map(str, keys))}")
    if model.lm_head.weight.data_ptr() != model.transformer.wte.weight.data_ptr():
        sys.exit("error: the head is not tied to the embedding")
    model = model.to(torch.float64).eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(inputs)).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten()).item()
    count = sum(p.numel() for p in model.parameters())
    print(f"transformers {transformers.__version__}: {count} parameters stored as {stored}, loss {loss:.9f}")
    if args.loss is not None:
        difference = abs(loss - args.loss) / abs(args.loss)
        print(f"expected {args.loss:.9f}, relative difference {difference:.3g}, tolerance {args.tolerance:g}")
        if not difference <= args.tolerance:
            sys.exit("error: the losses differ")


if __name__ == "__main__":
    main()
