#!/usr/bin/env python3
"""Loads a checkpoint folder in Hugging Face's transformers and computes its loss on a shard.

    check_transformers.py FOLDER SHARD --seq 128 --batch 8 [--loss 3.2941] [--tolerance 1e-4]
    check_transformers.py FOLDER ROWS --log LOG [--tolerance 1e-5]
    check_transformers.py FOLDER --logits TRAINER [--tolerance 1e-5]
    check_transformers.py FOLDER --from SOURCE
    check_transformers.py FOLDER --random LAYERS,HEADS,CHANNELS,VOCABULARY,POSITIONS [--shards N]
                          [--type llama]

The loss is the mean over the first --batch samples of --seq tokens of the shard, as the trainers
number them, in float64. With --loss (what a trainer printed for those samples) the exit code says
whether the two agree.

ROWS is a file for --eval; LOG is what a trainer's --eval ROWS --log LOG has written: the sum of the
losses, and how many rows or choices are right, must be those that transformers finds. With --logits
the TRAINER, in fp32, evaluates one row for each of 16 possible next tokens: its loss is the
logarithm of the sum of exponentials of the logits less the token's logit, and none may differ from
that of transformers' logits by more than the tolerance. --random makes a GPT-2 with large random
weights, in FOLDER, split into some N files if --shards says so; with --type a Llama, Qwen2, Qwen3,
Mistral or Nemotron with half as many heads of keys and values and 3 times as many hidden units as
channels. Qwen3's heads are twice as wide as others', and Mistral has a window of 12 keys.

With --from, FOLDER was trained from the folder SOURCE: what training does not change must have come
out again. Its config.json is SOURCE's but for the type and the class of the weights, transformers
reads the same from both, and the other small files are the same bytes.

Needs the packages torch and transformers from PyPI; a machine without a GPU will do.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True  # beside the sources
import eval_rows  # noqa: E402


def read_samples(path, seq, batch):
    """Sample n of a shard: inputs are tokens n*seq .. n*seq+seq, targets the same shifted by
    one."""
    import numpy

    header = numpy.fromfile(path, dtype="<i4", count=256)
    width = {(20240520, 1): "<u2", (20240801, 7): "<u4"}.get(tuple(header[:2]))
    if len(header) < 256 or not width:
        sys.exit(f"error: {path} is no token shard")
    tokens = numpy.fromfile(path, dtype=width, offset=1024).astype("int64")
    if len(tokens) != header[2]:
        sys.exit(f"error: {path} says {header[2]} tokens but holds {len(tokens)}")
    if len(tokens) < batch * seq + 1:
        sys.exit(
            f"error: {path} has {len(tokens)} tokens, fewer than {batch} samples of {seq} need"
        )
    inputs = tokens[: batch * seq].reshape(batch, seq)
    targets = tokens[1 : batch * seq + 1].reshape(batch, seq)
    return inputs, targets


def read_rows(path):
    """Rows (tokens, first, count, example) and the kind; llmc/host/eval_file.h has the layout."""
    import numpy

    header = numpy.fromfile(path, dtype="<i4", count=256)
    words = numpy.fromfile(path, dtype=f"<u{2 * header[1]}", offset=1024).astype("int64").tolist()
    rows, at, example, kind = [], 0, -1, int(header[3])
    for _ in range(header[2]):
        n, first, count, right = words[at : at + 4] if kind == 3 else words[at : at + 3] + [1]
        at += 4 if kind == 3 else 3
        example += right
        rows.append((words[at : at + n], first, count, example))
        at += n
    return rows, kind


def check_rows(model, path, log, tolerance):
    import torch

    rows, kind = read_rows(path)
    total, wrong, best = 0.0, 0, {}
    for number, (tokens, first, count, example) in enumerate(rows):
        with torch.no_grad():
            logits = model(torch.tensor([tokens[:-1]])).logits[0, first - 1 : first - 1 + count]
        targets = torch.tensor(tokens[first : first + count])
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
        total += loss
        wrong += not bool((logits.argmax(-1) == targets).all())
        best.setdefault(example, []).append(loss / count)
    right = None
    if kind == 2:
        right = len(rows) - wrong
    if kind == 3:
        right = sum(all(losses[0] < other for other in losses[1:]) for losses in best.values())
    with open(log, encoding="utf-8") as file:
        line = [json.loads(line) for line in file if "eval_loss_sum" in line][-1]
    difference = abs(line["eval_loss_sum"] - total) / total
    print(
        f"transformers: loss sum {total:.9f}, right {right}; expected {line['eval_loss_sum']:.9f}, "
        f"right {line.get('eval_right')}; relative difference {difference:.3g}, "
        f"tolerance {tolerance:g}"
    )
    if not difference <= tolerance or right != line.get("eval_right"):
        sys.exit("error: they differ")


def check_logits(model, folder, trainer, tolerance):
    import torch

    vocabulary, seq, worst = model.config.vocab_size, 16, 0.0
    context = [(7 * i * i + 3 * i) % vocabulary for i in range(seq)]
    with torch.no_grad():
        logits = model(torch.tensor([context])).logits[0, -1]
    expected = (logits.logsumexp(0) - logits).tolist()
    with tempfile.TemporaryDirectory() as temporary:
        rows, log = os.path.join(temporary, "rows"), os.path.join(temporary, "log")
        for token in range(0, vocabulary, max(1, vocabulary // 16)):
            eval_rows.write_rows(rows, eval_rows.TEXT, vocabulary, 0, [(context + [token], seq, 1)])
            run = subprocess.run(
                [
                    trainer,
                    "--init",
                    folder,
                    "--eval",
                    rows,
                    "--seq",
                    str(seq),
                    "--micro-batch",
                    "1",
                    "--log",
                    log,
                ],
                capture_output=True,
                text=True,
            )
            if run.returncode:
                sys.exit(f"error: {trainer} fails: {run.stderr.strip()}")
            with open(log, encoding="utf-8") as file:
                loss = json.loads(file.read().splitlines()[-1])["eval_loss_sum"]
            worst = max(worst, abs(loss - expected[token]))
    print(
        f"logits of {model.config.model_type}, from {logits.min():.2f} to {logits.max():.2f}: "
        f"largest difference {worst:.3g}, tolerance {tolerance:g}"
    )
    if not worst <= tolerance:
        sys.exit("error: they differ")


def check_source(folder, source):
    import transformers

    changed = {
        "architectures",
        "dtype",
        "torch_dtype",
        "_name_or_path",
    }  # the last is the folder's own name
    readings = []
    for place in (source, folder):
        with open(os.path.join(place, "config.json"), encoding="utf-8") as file:
            written = json.load(file)
        read = transformers.AutoConfig.from_pretrained(place).to_dict()
        readings.append([{k: v for k, v in d.items() if k not in changed} for d in (written, read)])
    for before, after in zip(*readings):
        keys = [k for k in {**before, **after} if before.get(k) != after.get(k)]
        if keys:
            changes = ", ".join(f"{k}: {before.get(k)} became {after.get(k)}" for k in keys)
            sys.exit(f"error: config.json: {changes}")
    names = [
        n
        for n in os.listdir(source)
        if n.endswith((".json", ".txt", ".jinja")) and "config.json" != n and "safetensors" not in n
    ]
    for name in names:
        with open(os.path.join(source, name), "rb") as a, open(
            os.path.join(folder, name), "rb"
        ) as b:
            if a.read() != b.read():
                sys.exit(f"error: {name} is another file")
    print(f"as in {source}: config.json, {', '.join(sorted(names))}")


def make_random(folder, sizes, shards, kind):
    import torch
    import transformers

    layers, heads, channels, vocabulary, positions = sizes
    torch.manual_seed(1)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=layers,
            n_head=heads,
            n_embd=channels,
            vocab_size=vocabulary,
            n_positions=positions,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=3,
        )
    else:
        own = {"qwen3": {"head_dim": 2 * channels // heads}, "mistral": {"sliding_window": 12}}
        config = transformers.AutoConfig.for_model(
            kind,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=(heads + 1) // 2,
            hidden_size=channels,
            intermediate_size=3 * channels,
            vocab_size=vocabulary,
            max_position_embeddings=positions,
            initializer_range=0.2,
            **own.get(kind, {}),
        )
    model = transformers.AutoModelForCausalLM.from_config(config)
    size = sum(p.numel() for p in model.parameters()) * 4
    model.save_pretrained(folder, max_shard_size=size // shards + 4096 if shards > 1 else "50GB")
    print(f"{folder}: {', '.join(sorted(os.listdir(folder)))}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="checkpoint folder with config.json and model.safetensors")
    parser.add_argument("shard", nargs="?", help="tokens in llm.c's format, or rows for --eval")
    parser.add_argument("--seq", type=int, help="tokens of a sample")
    parser.add_argument("--batch", type=int, default=8, help="samples (default 8)")
    parser.add_argument("--loss", type=float, help="the loss that is expected")
    parser.add_argument(
        "--tolerance",
        type=float,
        help="largest difference, relative but for --logits (default 1e-4; with "
        "--log or --logits 1e-5)",
    )
    parser.add_argument("--log", help="the log of a trainer's --eval of these rows")
    parser.add_argument(
        "--logits", metavar="TRAINER", help="compare with the logits of this program"
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="SOURCE",
        help="the folder of --init that it was trained from",
    )
    parser.add_argument("--random", help="make a random model of these sizes in FOLDER")
    kinds = ("gpt2", "llama", "qwen2", "qwen3", "mistral", "nemotron")
    parser.add_argument("--type", choices=kinds, default="gpt2",
                        help="kind of the random model (default gpt2)")
    parser.add_argument(
        "--shards", type=int, default=1, help="files of the random model (default 1)"
    )
    args = parser.parse_args()
    if (
        not args.random
        and not args.logits
        and not args.source
        and not (args.shard and (args.seq or args.log))
    ):
        parser.error("SHARD with --seq, ROWS with --log, --logits, --from, or --random")
    args.tolerance = args.tolerance or (1e-5 if args.log or args.logits else 1e-4)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the folder
    try:
        import torch
        import transformers
    except ImportError as missing:
        sys.exit(f"error: {missing}: pip install torch transformers")

    if args.random:
        make_random(
            args.folder, [int(size) for size in args.random.split(",")], args.shards, args.type
        )
        return
    if args.source:
        check_source(args.folder, args.source)
        return
    if not args.log and not args.logits:
        inputs, targets = read_samples(args.shard, args.seq, args.batch)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        args.folder, output_loading_info=True
    )
    stored = next(model.parameters()).dtype
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        # A tied head is the embedding, so that it is no key of its own.
        tied = model.config.tie_word_embeddings
        keys = [key for key in report.get(what) or [] if not (tied and key == "lm_head.weight")]
        if keys:
            sys.exit(f"error: {what.replace('_', ' ')}: {', '.join(map(str, keys))}")
    tied = (
        model.get_output_embeddings().weight.data_ptr()
        == model.get_input_embeddings().weight.data_ptr()
    )
    if model.config.model_type == "gpt2" and not tied:
        sys.exit("error: the head is not tied to the embedding")
    model = model.to(torch.float64).eval()
    if args.logits:
        check_logits(model, args.folder, args.logits, args.tolerance)
        return
    if args.log:
        check_rows(model, args.shard, args.log, args.tolerance)
        return
    with torch.no_grad():
        logits = model(torch.from_numpy(inputs)).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(targets).flatten()
        ).item()
    count = sum(p.numel() for p in model.parameters())
    print(
        f"transformers {transformers.__version__}: {count} parameters stored as {stored}, "
        f"loss {loss:.9f}"
    )
    if args.loss is not None:
        difference = abs(loss - args.loss) / abs(args.loss)
        print(
            f"expected {args.loss:.9f}, relative difference {difference:.3g}, "
            f"tolerance {args.tolerance:g}"
        )
        if not difference <= args.tolerance:
            sys.exit("error: the losses differ")


if __name__ == "__main__":
    main()
