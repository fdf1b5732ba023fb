#!/usr/bin/env python3
"""Downloads a data set and writes it as token shards that the trainers read, or as rows for their
--eval.

    prepare.py tinyshakespeare                     1 MB of plays, as bytes (--vocab 257)
    prepare.py tinystories --tokenizer gpt2        2 GB of children's stories, as GPT-2's tokens
                                                   (--vocab 50257)
    prepare.py fineweb --shards 100                10 billion tokens of web text, 100 million a
                                                   shard
    prepare.py fineweb --pretokenized --shards 10  the same text already in GPT-2's tokens: no
                                                   package needed

    prepare.py wikitext103 --stride 32             WikiText-103's test text in overlapping windows
                                                   (needs pyarrow, or --text wiki.test.tokens)
    prepare.py lambada                             LAMBADA's test passages: the last word counts
    prepare.py hellaswag                           HellaSwag's validation set, four endings each
    prepare.py text --text FILE                    shards of your own text, without a network
    prepare.py windows --text FILE --stride 32     your own text in overlapping windows
    prepare.py cloze --text FILE                   your own passages, one a line: the last word
                                                   counts
    prepare.py choices --text FILE                 your own JSON Lines: {"ctx": ..,
                                                   "endings": [..], "label": ..}

A shard is llm.c's: 256 int32 (20240520, 1, number of tokens), then uint16 tokens; with a vocabulary
above 65536 (20240801, 7, number of tokens), then uint32 tokens. One token stands before each
document: the one that the tokenizer itself puts before a text (Llama 3: <|begin_of_text|>), else
<|endoftext|>; --document-token names another. An empty line ends a document of your own text, or
the line that --separator names. Your text keeps its bytes: indentation, empty lines and line ends;
only a byte order mark at its start is left out. Shards are written to OUT/SET_train_000001.bin ...
and OUT/SET_val_000000.bin, so that --train-data 'OUT/SET_train_*.bin' --val-data
'OUT/SET_val_*.bin' names them. With GPT-2's tokens OUT/tokenizer.json comes too: give it to the
trainer as --tokenizer, for prompts and samples. What is for --eval goes to OUT/SET.bin, in rows of
at most --seq + 1 tokens; doc/lab/evaluation.md has the layout.

Packages from PyPI: tokenizers for GPT-2's tokens, pyarrow for fineweb unless --pretokenized.
Without them there are bytes. What has been downloaded stays in OUT/download and is not fetched
again.
"""

import argparse
import http.client
import json
import os
import sys
import urllib.error
import urllib.request

sys.dont_write_bytecode = True  # beside the sources
import eval_rows  # noqa: E402

SOURCES = {
    "tinyshakespeare": (
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"
    ),
    "tinystories": "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main",
    "fineweb": "https://huggingface.co/datasets/HuggingFaceFW/fineweb/resolve/main/sample/10BT",
    "pretokenized": "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main",
    "wikitext103": (
        "https://huggingface.co/datasets/Salesforce/wikitext/resolve/main/wikitext-103-v1"
    ),
    "lambada": "https://huggingface.co/datasets/EleutherAI/lambada_openai/resolve/main/data",
    "hellaswag": "https://raw.githubusercontent.com/rowanz/hellaswag/master/data",
    "text": "",
    "windows": "",
    "cloze": "",
    "choices": "",
    "tokenizer": "https://huggingface.co/openai-community/gpt2/resolve/main",
}
END_OF_TEXT = "<|endoftext|>"  # of GPT-2, Qwen2 and SmolLM2
END_OF_TEXTS = (END_OF_TEXT, "<|end_of_text|>", "</s>")


def fail(text):
    sys.exit(f"error: {text}")


def fetch(url, path):
    """Writes what the address gives; a sentence and the end if that is not all of it."""
    local = url[len("file://"):] if url.startswith("file://") else path
    if os.path.exists(local) and not os.path.isfile(local):
        fail(f"{local} is no regular file")
    try:
        with urllib.request.urlopen(url, timeout=60) as source, eval_rows.open_part(path) as out:
            expected, got = source.headers.get("Content-Length"), 0
            while block := source.read(1 << 20):
                out.write(block)
                got += len(block)
        if expected is not None and got != int(expected):
            fail(f"{url} ended after {got} of {expected} bytes: try again")
    except urllib.error.HTTPError as problem:
        fail(
            f"{url} cannot be downloaded ({problem.code} {problem.reason}): "
            "--source names another place"
        )
    except http.client.HTTPException as problem:
        fail(f"{url} ended too early ({type(problem).__name__}): try again")
    except (urllib.error.URLError, OSError) as problem:
        reason = getattr(problem, "reason", None) or problem
        fail(f"{url} cannot be downloaded ({reason}): is there a network? `make train` needs none")


def download(url, folder):
    """Fetches a file once; it takes its name when it is complete, and what is not complete is
    removed."""
    path = os.path.join(folder, url.rsplit("/", 1)[1])
    if os.path.exists(path):
        return path
    os.makedirs(folder, exist_ok=True)
    print(f"downloading {url}", flush=True)
    try:
        fetch(url, path)
        os.rename(path + ".part", path)
    finally:
        if os.path.exists(path + ".part"):
            os.remove(path + ".part")
    return path


class Bytes:
    end_of_text, vocabulary, special_tokens_in_text = 256, 257, 0

    def encode(self, texts):
        return [list(text.encode()) for text in texts]


class GPT2:
    """The tokens of a tokenizer.json, as the package tokenizers makes them.

    A file can hold the truncation and padding of its last user's batches. They are no part of the
    text, so both are switched off here, for everything that this program writes.
    """

    def __init__(self, path, document_token, vocabulary):
        path = tokenizer_file(path)
        try:
            import tokenizers
        except ImportError:
            fail(
                f"the tokens of {path} need a package: pip install tokenizers "
                "(a model of bytes takes --tokenizer bytes, without a package)"
            )
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as problem:  # the package raises nothing more special
            fail(f"{path} is no tokenizer.json: {problem}")
        for kind in ("truncation", "padding"):
            if getattr(self.tokenizer, kind):
                print(
                    f"note: {path} asks for {kind}, which is switched off: the whole text is taken"
                )
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        # Ids may have holes, so the largest one counts.
        self.vocabulary = vocabulary or max(self.tokenizer.get_vocab().values()) + 1
        self.end_of_text = self.first_token(path, document_token)
        self.special_tokens_in_text = 0

    def first_token(self, path, name):
        """Returns the token that stands before each document."""
        if name:
            token = self.tokenizer.token_to_id(name)
            if token is None:
                fail(f"{path} has no token {name}, which --document-token names")
            return token
        added = self.tokenizer.encode("", add_special_tokens=True).ids
        if len(added) == 1:
            return added[0]
        ends = [
            token for token in map(self.tokenizer.token_to_id, END_OF_TEXTS) if token is not None
        ]
        if not ends:
            fail(
                f"{path} has none of the tokens {', '.join(END_OF_TEXTS)} to stand before each "
                "document: "
                "--document-token names one"
            )
        return ends[0]

    def encode(self, texts):
        encoded = [
            encoding.ids
            for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False)
        ]
        for token in [self.end_of_text] + [max(ids, default=0) for ids in encoded]:
            if token >= self.vocabulary:
                fail(
                    f"the text has token {token} ({self.tokenizer.id_to_token(token)}), which a "
                    f"--vocab of {self.vocabulary} does not hold"
                )
        self.special_tokens_in_text += sum(ids.count(self.end_of_text) for ids in encoded)
        return encoded


def tokenizer_file(path):
    """Returns the path of a tokenizer.json: PATH, or the one in the folder PATH."""
    if os.path.isdir(path):
        path = os.path.join(path, "tokenizer.json")
    if not os.path.isfile(path):
        fail(
            f"--tokenizer {path}: there is no such file. It takes bytes, gpt2, the path of a "
            "tokenizer.json, or its folder"
        )
    with open(path, "rb") as file:
        if file.read(40).startswith(b"version https://git-lfs"):
            fail(f"{path} is a pointer of git-lfs: `git lfs pull` fetches the file itself")
    return path


class Shards:
    """Writes tokens to one shard after the other; the first ones can be validation.

    The last shard takes the rest as well, so that none is shorter than a sample of the trainer: it
    has fewer than twice --shard-tokens.
    """

    def __init__(self, args, tokenizer, kind, first):
        self.name, self.kind, self.number = os.path.join(args.out, args.set), kind, first
        self.size, self.tokens = args.shard_tokens, eval_rows.words_for(tokenizer.vocabulary)

    def put(self, tokens):
        self.tokens.extend(tokens)
        while len(self.tokens) >= 2 * self.size:
            self.write(self.tokens[: self.size])
            self.tokens = self.tokens[self.size :]

    def write(self, tokens):
        path = f"{self.name}_{self.kind}_{self.number:06d}.bin"
        eval_rows.write(
            path, ([20240520, 1] if tokens.itemsize == 2 else [20240801, 7]) + [len(tokens)], tokens
        )
        print(f"{path}: {len(tokens)} tokens", flush=True)
        if len(tokens) <= 1024:
            print(f"note: a shard of {len(tokens)} tokens serves --seq up to {len(tokens) - 1}")
        self.number += 1

    def finish(self):
        if len(self.tokens):
            self.write(self.tokens)


def encode_documents(documents, tokenizer):
    """Yields <|endoftext|> and the tokens of each document; in batches, which a tokenizer can
    spread over cores."""
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
    """Yields the documents of a text file without reading it whole. A line that equals the
    separator ends one.

    The separator is left out, unless it is the empty line: then the documents are the text, byte
    for byte.
    """
    lines, content, ended = [], False, False
    with open(path, encoding="utf-8-sig", newline="") as file:
        for line in file:
            if line.rstrip("\r\n") == separator:
                ended = content
                if separator == "":
                    lines.append(line)
                continue
            if ended:
                yield "".join(lines)
                lines, ended = [], False
            lines.append(line)
            content = True
    if content:
        yield "".join(lines)


def parquet_documents(source, folder):
    try:
        import pyarrow.parquet
    except ImportError:
        fail("fineweb needs a package: pip install pyarrow (or take --pretokenized)")
    for number in range(15):
        path = download(f"{source}/{number:03d}_00000.parquet", folder)
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(
            batch_size=1024, columns=["text"]
        ):
            yield from (
                document for document in batch.column("text").to_pylist() if document
            )  # null: no text


def tinyshakespeare(args, tokenizer):
    small_text(args, tokenizer, download(f"{args.source}/input.txt", args.download))


def text(args, tokenizer):
    small_text(args, tokenizer, args.text)


def small_text(args, tokenizer, path):
    documents = list(text_documents(path, args.separator))
    split = len(documents) // 20  # a 20th, from the start, is validation
    if split == 0:
        what = f"lines {args.separator}" if args.separator else "empty lines"
        fail(f"{path} has fewer than 20 documents, which {what} end: none would be for validation")
    for kind, part in (("val", documents[:split]), ("train", documents[split:])):
        shards = Shards(args, tokenizer, kind, kind == "train")
        for tokens in encode_documents(part, tokenizer):
            shards.put(tokens)
        shards.finish()


def tinystories(args, tokenizer):
    for kind, file in (("val", "valid"), ("train", "train")):
        path = download(f"{args.source}/TinyStoriesV2-GPT4-{file}.txt", args.download)
        shards = Shards(args, tokenizer, kind, kind == "train")
        stories = (story.strip() for story in text_documents(path, END_OF_TEXT))
        for tokens in encode_documents(filter(None, stories), tokenizer):
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
    shards = Shards(args, tokenizer, "val", 0)  # the first shard is validation
    for tokens in encode_documents(parquet_documents(args.source, args.download), tokenizer):
        shards.put(tokens)
        shards.kind = "train" if shards.number else "val"
        if shards.number > args.shards:
            return
    shards.finish()


def read_text(path):
    with open(path, encoding="utf-8-sig", newline="") as file:
        return file.read()


def eval_windows(args, tokenizer, text, original_words):
    """Perplexity per word counts the words of the text as its authors cut it, whatever the tokens
    are."""
    tokens = [tokenizer.end_of_text] + tokenizer.encode([text])[0]
    rows = eval_rows.windows(tokens, args.seq, args.stride)
    if not rows:
        fail("the text is empty")
    eval_rows.write_rows(
        eval_path(args), eval_rows.TEXT, tokenizer.vocabulary, original_words, rows
    )


def eval_path(args):
    return os.path.join(args.out, args.set + ".bin")


def wikitext103(args, tokenizer):
    if args.text:
        text = read_text(args.text)
    else:
        try:
            import pyarrow.parquet
        except ImportError:
            fail(
                "wikitext103 needs a package: pip install pyarrow "
                "(or give the file wiki.test.tokens as --text)"
            )
        path = download(f"{args.source}/test-00000-of-00001.parquet", args.download)
        text = "".join(pyarrow.parquet.read_table(path).column("text").to_pylist())
    eval_windows(args, tokenizer, eval_rows.detokenize_wikitext(text), len(text.split()))


def windows(args, tokenizer):
    text = read_text(args.text)
    eval_windows(args, tokenizer, text, len(text.split()))


def json_lines(path, row):
    """What row makes of each line; the line that is not as it must be is named."""
    rows = []
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            try:
                if line.strip():
                    rows.append(row(json.loads(line)))
            except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as problem:
                fail(
                    f"line {number} of {path} is not as it must be "
                    f"({type(problem).__name__}: {problem})"
                )
    return rows


def lambada(args, tokenizer):
    path = download(f"{args.source}/lambada_test_en.jsonl", args.download)
    eval_cloze(args, tokenizer, json_lines(path, lambda line: line["text"] + ""))


def cloze(args, tokenizer):
    eval_cloze(args, tokenizer, read_text(args.text).split("\n"))


def eval_cloze(args, tokenizer, passages):
    rows = eval_rows.cloze(passages, tokenizer, args.seq)
    if not rows:
        fail("there is no passage of two words or more")
    eval_rows.write_rows(eval_path(args), eval_rows.CLOZE, tokenizer.vocabulary, 0, rows)


def hellaswag(args, tokenizer):
    eval_choices(args, tokenizer, download(f"{args.source}/hellaswag_val.jsonl", args.download))


def choices(args, tokenizer):
    eval_choices(args, tokenizer, args.text)


def choice(line):
    context, endings, label = (
        line["ctx"] + "",
        [ending + "" for ending in line["endings"]],
        int(line["label"]),
    )
    if not 0 <= label < len(endings):
        raise ValueError(f"label {label} of {len(endings)} endings")
    return context, endings, label


def eval_choices(args, tokenizer, path):
    examples = json_lines(path, choice)
    if not examples:
        fail(f"{path} has no example")
    eval_rows.write_choices(
        eval_path(args), tokenizer.vocabulary, eval_rows.choices(examples, tokenizer, args.seq)
    )


MAKERS = {
    make.__name__: make
    for make in (
        tinyshakespeare,
        tinystories,
        fineweb,
        wikitext103,
        lambada,
        hellaswag,
        text,
        windows,
        cloze,
        choices,
    )
}
OWN_TEXT = ("text", "windows", "cloze", "choices")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("set", choices=list(MAKERS))
    parser.add_argument(
        "--out", default="build/data", help="folder of the shards (default build/data)"
    )
    parser.add_argument(
        "--tokenizer",
        help="bytes, gpt2, or the path of a tokenizer.json or its folder (default: gpt2 for "
        "fineweb, wikitext103, lambada and hellaswag, else bytes)",
    )
    parser.add_argument(
        "--document-token", metavar="TOKEN", help="the token before each document, as <|endoftext|>"
    )
    parser.add_argument(
        "--separator",
        default="",
        metavar="LINE",
        help="text: the line that ends a document (default: " "an empty line)",
    )
    parser.add_argument(
        "--vocab",
        type=int,
        help="the model's vocabulary, if it is not its tokenizer's: no token of "
        "the text may reach it",
    )
    parser.add_argument(
        "--shards", type=int, default=0, help="training shards (0: all; fineweb: 1)"
    )
    parser.add_argument(
        "--shard-tokens",
        type=int,
        default=100_000_000,
        help="tokens of a shard (default 100000000)",
    )
    parser.add_argument(
        "--pretokenized", action="store_true", help="fineweb: download shards of GPT-2's tokens"
    )
    parser.add_argument(
        "--source", help="take the files from this address, which can begin with file://"
    )
    parser.add_argument(
        "--text",
        help="text, windows, cloze and choices: the file with one's own text; wikitext103: its "
        "wiki.test.tokens, instead of a download",
    )
    parser.add_argument(
        "--seq",
        type=int,
        default=1024,
        help="for --eval: tokens that the model takes (default 1024)",
    )
    parser.add_argument(
        "--stride",
        type=int,
        default=0,
        help="windows and wikitext103: tokens that a window adds to "
        "the one before it (default --seq: no overlap)",
    )
    args = parser.parse_args()
    if args.pretokenized and args.set != "fineweb":
        fail("--pretokenized is for fineweb")
    if args.shards < 0 or not 0 < args.shard_tokens < 2**31:
        fail("--shards must not be negative, and --shard-tokens must lie between 1 and 2147483647")
    if (args.set in OWN_TEXT) != bool(args.text) and not (args.text and args.set == "wikitext103"):
        fail(
            "--text FILE is for wikitext103, and for text, windows, cloze and choices, "
            "which need it"
        )
    if args.text and os.path.exists(args.text) and not os.path.isfile(args.text):
        fail(f"--text {args.text} is no regular file")
    args.stride = args.stride or args.seq
    if not 1 <= args.stride <= args.seq or args.seq > 65534:
        fail("--seq must lie between 1 and 65534, and --stride between 1 and --seq")
    if args.set == "fineweb" and args.shards == 0:
        args.shards = 1
    args.source = (
        args.source or SOURCES["pretokenized" if args.pretokenized else args.set]
    ).rstrip("/")
    large = ("fineweb", "wikitext103", "lambada", "hellaswag")
    args.tokenizer = args.tokenizer or ("gpt2" if args.set in large else "bytes")
    if (
        args.vocab is not None
        and not (257 if args.tokenizer == "bytes" else 1) <= args.vocab < 2**31
    ):
        fail("--vocab must lie between 1 (257 with bytes) and 2147483647")
    if args.document_token and args.tokenizer == "bytes":
        fail("--document-token needs --tokenizer: bytes have <|endoftext|> alone")
    if args.separator and args.set != "text":
        fail("--separator is for text")
    args.download = os.path.join(args.out, "download")
    try:
        os.makedirs(args.out, exist_ok=True)
        if args.tokenizer == "gpt2":
            args.tokenizer = download(SOURCES["tokenizer"] + "/tokenizer.json", args.out)
        tokenizer = None
        if not args.pretokenized:
            if args.tokenizer == "bytes":
                tokenizer = Bytes()
                tokenizer.vocabulary = args.vocab or tokenizer.vocabulary
            else:
                tokenizer = GPT2(args.tokenizer, args.document_token, args.vocab)
        MAKERS[args.set](args, tokenizer)
        if tokenizer and tokenizer.special_tokens_in_text:
            print(
                "note: the text names the token before documents "
                f"{tokenizer.special_tokens_in_text} times, and each is that one token: "
                "a document seems to begin there"
            )
    except OSError as problem:
        fail(f"{problem.filename}: {problem.strerror}" if problem.filename else problem)
    except (KeyError, ValueError) as problem:  # text that is no UTF-8, a damaged parquet file
        fail(
            f"the text in {args.text or args.download} is not as it must be "
            f"({type(problem).__name__}: {problem})"
        )


if __name__ == "__main__":
    main()
