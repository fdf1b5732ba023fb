#!/usr/bin/env python3
"""Downloads a data set and writes it as token shards that the trainers read.

    prepare.py tinyshakespeare                     1 MB of plays, as bytes (--vocab 257)
    prepare.py tinystories --tokenizer gpt2        2 GB of children's stories, as GPT-2's tokens (--vocab 50257)
    prepare.py fineweb --shards 100                10 billion tokens of web text, 100 million a shard
    prepare.py fineweb --pretokenized --shards 10  the same text already in GPT-2's tokens: no package needed

A shard is llm.c's: 256 int32 (20240520, 1, number of tokens), then uint16 tokens, <|endoftext|> before each document.
Shards are written to OUT/SET_train_000001.bin ... and OUT/SET_val_000000.bin, so that
--train-data 'OUT/SET_train_*.bin' --val-data 'OUT/SET_val_*.bin' names them. With GPT-2's tokens OUT/tokenizer.json
comes too: give it to the trainer as --tokenizer, for prompts and samples.

Packages from PyPI: tokenizers for GPT-2's tokens, pyarrow for fineweb unless --pretokenized. Without them there are
bytes. What has been downloaded stays in OUT/download and is not fetched again.
"""
import argparse
import array
import os
import sys
import urllib.error
import urllib.request

SOURCES = {
    "tinyshakespeare": "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare",
    "tinystories": "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main",
    "fineweb": "https://huggingface.co/datasets/HuggingFaceFW/fineweb/resolve/main/sample/10BT",
    "pretokenized": "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main",
    "tokenizer": "https://huggingface.co/openai-community/gpt2/resolve/main",
}
END_OF_TEXT = "<|endoftext|>"


def fail(text):
    sys.exit(f"error: {text}")


def download(url, folder):
    """Fetches a file once; it takes its name when it is complete."""
    path = os.path.join(folder, url.rsplit("/", 1)[1])
    if os.path.exists(path):
        return path
    os.makedirs(folder, exist_ok=True)
    print(f"downloading {url}", flush=True)
    try:
        with urllib.request.urlopen(url, timeout=60) as source, open(path + ".part", "wb") as out:
            expected, got = source.headers.get("Content-Length"), 0
            while block := source.read(1 << 20):
                out.write(block)
                got += len(block)
        if expected is not None and got != int(expected):
            fail(f"{url} ended after {got} of {expected} bytes: try again")
    except urllib.error.HTTPError as problem:
        fail(f"{url} cannot be downloaded ({problem.code} {problem.reason}): --source names another place")
    except (urllib.error.URLError, OSError) as problem:
        reason = getattr(problem, "reason", None) or problem
        fail(f"{url} cannot be downloaded ({reason}): is there a network? `make train` needs none")
    os.rename(path + ".part", path)
    return path


class Bytes:
    end_of_text = 256

    def encode(self, texts):
        return [list(text.encode()) for text in texts]


class GPT2:
    def __init__(self, path):
        try:
            import tokenizers
        except ImportError:
            fail("GPT-2's tokens need a package: pip install tokenizers (or take --tokenizer bytes)")
        self.tokenizer = tokenizers.Tokenizer.from_file(path)
        self.end_of_text = self.tokenizer.token_to_id(END_OF_TEXT)
        if self.end_of_text is None or self.tokenizer.get_vocab_size() > 65536:
            fail(f"{path} has no {END_OF_TEXT}, or tokens that do not fit into 16 bits")

    def encode(self, texts):
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False)]


class Shards:
    """Writes tokens to one shard after the other; the first ones can be validation."""

    def __init__(self, out, name, kind, first, size):
        self.out, self.name, self.kind, self.number, self.size = out, name, kind, first, size
        self.tokens = array.array("H")

    def put(self, tokens):
        self.tokens.extend(tokens)
        while len(self.tokens) >= self.size:
            self.write(self.tokens[: self.size])
            self.tokens = self.tokens[self.size :]

    def write(self, tokens):
        path = os.path.join(self.out, f"{self.name}_{self.kind}_{self.number:06d}.bin")
        header = array.array("i", [20240520, 1, len(tokens)] + [0] * 253)
        if sys.byteorder != "little":
            header.byteswap()
            tokens.byteswap()
        with open(path + ".part", "wb") as file:
            header.tofile(file)
            tokens.tofile(file)
        os.rename(path + ".part", path)
        print(f"{path}: {len(tokens)} tokens", flush=True)
        self.number += 1

    def finish(self):
        if len(self.tokens):
            self.write(self.tokens)
        self.tokens = array.array("H")


def encode_documents(documents, tokenizer):
    """Yields <|endoftext|> and the tokens of each document; in batches, which a tokenizer can spread over cores."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size > 1 << 22:
            for tokens in tokenizer.encode(batch):
                yield [tokenizer.end_of_text] + tokens
            batch, size = [], 0
    for tokens in tokenizer.encode(batch) if batch else []:
        yield [tokenizer.end_of_text] + tokens


def text_documents(path, separator):
    """The pieces of a text file between separator lines, without reading the file whole."""
    lines = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.strip() != separator:
                lines.append(line)
            elif lines:
                yield "".join(lines).strip()
                lines = []
    if lines:
        yield "".join(lines).strip()


def parquet_documents(source, folder):
    try:
        import pyarrow.parquet
    except ImportError:
        fail("fineweb needs a package: pip install pyarrow (or take --pretokenized)")
    for number in range(15):
        path = download(f"{source}/{number:03d}_00000.parquet", folder)
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024, columns=["text"]):
            yield from batch.column("text").to_pylist()


def tinyshakespeare(args, tokenizer):
    path = download(f"{args.source}/input.txt", args.download)
    speeches = list(text_documents(path, ""))
    split = len(speeches) // 20  # a 20th, from the start, is validation
    for kind, part in (("val", speeches[:split]), ("train", speeches[split:])):
        shards = Shards(args.out, "tinyshakespeare", kind, kind == "train", args.shard_tokens)
        for tokens in encode_documents((speech + "\n\n" for speech in part), tokenizer):
            shards.put(tokens)
        shards.finish()


def tinystories(args, tokenizer):
    for kind, file in (("val", "valid"), ("train", "train")):
        path = download(f"{args.source}/TinyStoriesV2-GPT4-{file}.txt", args.download)
        shards = Shards(args.out, "tinystories", kind, kind == "train", args.shard_tokens)
        for tokens in encode_documents(text_documents(path, END_OF_TEXT), tokenizer):
            shards.put(tokens)
            if kind == "train" and args.shards and shards.number > args.shards:
                return
        shards.finish()


def fineweb(args, tokenizer):
    if args.pretokenized:
        for number in range(args.shards + 1):
            name = f"fineweb_{'train' if number else 'val'}_{number:06d}.bin"
            print(download(f"{args.source}/{name}", args.out))
        return
    shards = Shards(args.out, "fineweb", "val", 0, args.shard_tokens)  # the first shard is validation
    for tokens in encode_documents(parquet_documents(args.source, args.download), tokenizer):
        shards.put(tokens)
        shards.kind = "train" if shards.number else "val"
        if shards.number > args.shards:
            return
    shards.finish()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=["tinyshakespeare", "tinystories", "fineweb"])
    parser.add_argument("--out", default="build/data", help="folder of the shards (default build/data)")
    parser.add_argument("--tokenizer", help="bytes, gpt2, or the path of a tokenizer.json (default: bytes for "
                        "tinyshakespeare and tinystories, gpt2 for fineweb)")
    parser.add_argument("--shards", type=int, default=0, help="training shards (0: all; fineweb: 1)")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, help="tokens of a shard (default 100000000)")
    parser.add_argument("--pretokenized", action="store_true", help="fineweb: download shards of GPT-2's tokens")
    parser.add_argument("--source", help="take the files from this address, which can begin with file://")
    args = parser.parse_args()
    if args.pretokenized and args.set != "fineweb":
        fail("--pretokenized is for fineweb")
    if args.shards < 0 or not 0 < args.shard_tokens < 2**31:
        fail("--shards must not be negative, and --shard-tokens must lie between 1 and 2147483647")
    if args.set == "fineweb" and args.shards == 0:
        args.shards = 1
    args.source = (args.source or SOURCES["pretokenized" if args.pretokenized else args.set]).rstrip("/")
    args.tokenizer = args.tokenizer or ("gpt2" if args.set == "fineweb" else "bytes")
    args.download = os.path.join(args.out, "download")
    try:
        os.makedirs(args.out, exist_ok=True)
        if args.tokenizer == "gpt2":
            args.tokenizer = download(SOURCES["tokenizer"] + "/tokenizer.json", args.out)
        tokenizer = None
        if not args.pretokenized:
            tokenizer = Bytes() if args.tokenizer == "bytes" else GPT2(args.tokenizer)
        {"tinyshakespeare": tinyshakespeare, "tinystories": tinystories, "fineweb": fineweb}[args.set](args, tokenizer)
    except OSError as problem:
        fail(problem)


if __name__ == "__main__":
    main()
