#!/usr/bin/env python3
"""Writes dev/test/tokenizer/kinds.jsonl: texts, and the tokens that the package tokenizers finds
for them with the small tokenizer.json of each kind that test_tokenizer makes.

    golden_tokenizers.py TEST [COUNT]    COUNT texts of each kind: 120
    golden_tokenizers.py TEST keys       dev/test/tokenizer/keys.jsonl instead

TEST is build/cpu-fp32/dev/test/test_tokenizer.

A line of keys.jsonl is a key of tokenizer.json that is turned on, by edits of the small file: a
path and its new value, or none. Then a text and its tokens with what the file puts before it, null
if the package tokenizers refuses the file or has none for the text. "reads" says that the trainers
must read the file; where they refuse it, they name the key.

The texts are drawn from pieces at which the kinds differ: digits, white space of all sorts,
apostrophes, line ends, letters of several scripts, and tokens that merging does not reach. Needs
the package tokenizers from PyPI.
"""

import sys

if {"-h", "--help"} & set(sys.argv[1:]):
    sys.exit(print(__doc__))

import json
import random
import subprocess
import tempfile

PIECES = [
    "hello",
    "world",
    " ",
    "  ",
    "\t",
    "\n",
    "\r\n",
    "\n\n",
    "'s",
    "'S",
    "'ll",
    "'LL",
    "'\u017f",
    "1",
    "12",
    "123",
    "1234",
    "\u0663\u0664",
    "\u00bd",
    "\u2167",
    "!",
    "...",
    "-",
    "_",
    "$",
    "\u00a0",
    "\u2028",
    "\u3000",
    "\u0085",
    "\u180e",
    "\u00e9",
    "\u65e5\u672c",
    "\u0416\u0436",
    "\u05d0",
    "\U0001f600",
    "world's",
    "llo",
    " x",
    "a",
    "aaa",
    "<|endoftext|>",
    "<|end",
    "he'd",
    "\u200b",
    "\u2019s",
    "I'M",
    ".\n",
    "; \n ",
    "/*",
    "\\",
]


BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
LATER = dict(BYTE_LEVEL, trim_offsets=False)


def template(*pieces, ids=(256,)):
    names = {"A": "Sequence", "B": "Sequence"}
    single = [{names.get(name, "SpecialToken"): {"id": name, "type_id": 0}} for name in pieces]
    special = {
        "<|endoftext|>": {
            "id": "<|endoftext|>",
            "ids": list(ids),
            "tokens": ["<|endoftext|>"] * len(ids),
        }
    }
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}


def added(number, content, **flags):
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": number, "content": content, **off, **flags}


SPACES = "hello \u3000<|end\u00a0\t hello<|end <|end"
NO_Z = [(["model", "vocab", "z"],), (["model", "vocab", "no z"], 122)]  # no byte has token 122
START = template("<|endoftext|>", "A")


# Key, kind of the small file, edits, text; reads: the trainers must read it.
def keys():
    def on(key, *path, value=True, kind="gpt2", text="hello world 12 azza", reads=False, also=()):
        return {
            "key": key,
            "kind": kind,
            "edits": [*also, (list(path), value)],
            "text": text,
            "reads": reads,
        }

    first = ("pre_tokenizer", "pretokenizers", 0)
    yield on("tokenizer.version", "version", value="2.0")
    limit = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    yield on("tokenizer.truncation", "truncation", value=limit, reads=True)
    pad = {
        "strategy": {"Fixed": 12},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    yield on("tokenizer.padding", "padding", value=pad, reads=True)
    yield on("tokenizer.added_tokens", "added_tokens", 2, value=added(282, "lo w"), reads=True)
    yield on("tokenizer.normalizer", "normalizer", value={"type": "Lowercase"}, text="HELLO")
    yield on("tokenizer.pre_tokenizer", "pre_tokenizer", value={"type": "Whitespace"})
    roberta = {
        "type": "RobertaProcessing",
        "sep": ["a", 97],
        "cls": ["b", 98],
        "trim_offsets": True,
        "add_prefix_space": False,
    }
    yield on("tokenizer.post_processor", "post_processor", value=roberta)
    yield on(
        "tokenizer.decoder", "decoder", value={"type": "WordPiece", "prefix": "##", "cleanup": True}
    )
    yield on(
        "tokenizer.model",
        "model",
        value={"type": "WordLevel", "vocab": {"hello": 0, "?": 1}, "unk_token": "?"},
    )
    yield on("tokenizer.another", "another")
    yield on("model.type", "model", "type", value="WordPiece")
    yield on("model.dropout", "model", "dropout", value=1)
    yield on("model.unk_token", "model", "unk_token", value="<|endoftext|>", reads=True, also=NO_Z)
    yield on("model.unk_token", "model", "unk_token", value="no such token", also=NO_Z)
    yield on("model.unk_token", "model", "unk_token", value=None, reads=True, also=NO_Z)
    unknown = [*NO_Z, (["model", "unk_token"], "<|endoftext|>")]
    yield on("model.fuse_unk", "model", "fuse_unk", reads=True, also=unknown)
    yield on("model.continuing_subword_prefix", "model", "continuing_subword_prefix", value="x")
    yield on("model.end_of_word_suffix", "model", "end_of_word_suffix", value="x")
    yield on("model.byte_fallback", "model", "byte_fallback")
    more = [(["added_tokens", 1, "id"], 282)]
    yield on("model.ignore_merges", "model", "ignore_merges", text="llo llo hello", reads=True,
             also=[*more, (["model", "vocab", "llo"], 281)])
    yield on(
        "model.vocab",
        "model",
        "vocab",
        "\u65e5",
        value=281,
        text="\u65e5hello",
        reads=True,
        also=more,
    )
    yield on("model.vocab", "model", "vocab", "\u65e5", value=281, text="\u65e5", reads=True,
             also=[*more, (["model", "ignore_merges"], True)])
    yield on("model.merges", "model", "merges", value=["l l", "he l"], reads=False)
    yield on("model.merges", "model", "merges", value=["l l", "h e"], reads=True)
    yield on("model.merges", "model", "merges", value=["aa a", "a a"], text="aaaaa", reads=True)
    yield on("model.merges", "model", "merges", value=["a a", "l l", "a a"])
    yield on("model.another", "model", "another")
    yield on("added_tokens.id", "added_tokens", 1, "id", value=300, text="<|end")
    yield on("added_tokens.id", "added_tokens", 0, "id", value=255, text="<|endoftext|>")
    yield on("added_tokens.content", "added_tokens", 1, "content", value="lo", reads=True)
    yield on("added_tokens.content", "added_tokens", 2, value=added(282, "<|end"), text="<|end")
    yield on("added_tokens.single_word", "added_tokens", 1, "single_word", text="a<|enda <|end")
    yield on("added_tokens.lstrip", "added_tokens", 1, "lstrip", text=SPACES, reads=True)
    yield on("added_tokens.rstrip", "added_tokens", 1, "rstrip", text=SPACES, reads=True)
    both = [(["added_tokens", 1, "lstrip"], True)]
    yield on("added_tokens.rstrip", "added_tokens", 1, "rstrip", text=SPACES, reads=True, also=both)
    blank = [(["added_tokens", 2], added(282, " "))]
    yield on(
        "added_tokens.rstrip",
        "added_tokens",
        1,
        "rstrip",
        text="<|end   a  b",
        reads=True,
        also=blank,
    )
    late = [(["added_tokens", 2], added(282, "ab")), (["added_tokens", 3], added(283, "xa")),
            (["added_tokens", 4], added(284, "b<|"))]
    yield on(
        "added_tokens.normalized",
        "added_tokens",
        3,
        "normalized",
        text="xab xaxabb<|end",
        reads=True,
        also=late,
    )
    yield on(
        "added_tokens.special", "added_tokens", 1, "special", value=False, text="a<|end", reads=True
    )
    yield on("added_tokens.another", "added_tokens", 1, "another")
    yield on("normalizer.type", "normalizer", "type", value="NFKC", kind="qwen2", text="\ufb01")
    yield on("normalizer.another", "normalizer", "another", kind="qwen2")
    yield on("pre_tokenizer.type", *first, value={"type": "Whitespace"}, kind="smollm2")
    yield on("pre_tokenizer.add_prefix_space", "pre_tokenizer", "add_prefix_space")
    yield on("pre_tokenizer.add_prefix_space", *first[:2], 1, "add_prefix_space", kind="llama3")
    yield on("pre_tokenizer.trim_offsets", "pre_tokenizer", "trim_offsets", value=False, reads=True)
    yield on("pre_tokenizer.use_regex", "pre_tokenizer", "use_regex", value=False)
    yield on("pre_tokenizer.use_regex", *first[:2], 1, "use_regex", kind="llama3", text="hello's")
    yield on("pre_tokenizer.use_regex", *first[:2], 1, "use_regex", value=False, kind="smollm2")
    yield on("pre_tokenizer.pretokenizers", *first[:2], 2, value=BYTE_LEVEL, kind="llama3")
    yield on("pre_tokenizer.pattern", *first, "pattern", value={"String": "l"}, kind="llama3")
    for regex in READ:
        yield on(
            "pre_tokenizer.pattern",
            *first,
            "pattern",
            "Regex",
            value=regex,
            kind="llama3",
            text=WORDS,
            reads=True,
        )
    for regex in DIFFER:
        yield on(
            "pre_tokenizer.pattern",
            *first,
            "pattern",
            "Regex",
            value=regex,
            kind="llama3",
            text=WORDS,
        )
    yield on("pre_tokenizer.behavior", *first, "behavior", value="MergedWithNext", kind="llama3")
    yield on("pre_tokenizer.invert", *first, "invert", kind="llama3")
    yield on(
        "pre_tokenizer.individual_digits", *first, "individual_digits", value=False, kind="smollm2"
    )
    yield on("pre_tokenizer.another", "pre_tokenizer", "another")
    yield on("post_processor.type", "post_processor", value=dict(START, type="BertProcessing"))
    for key in ("add_prefix_space", "trim_offsets", "use_regex"):
        yield on(
            "post_processor." + key,
            "post_processor",
            value={**BYTE_LEVEL, key: not BYTE_LEVEL[key]},
            reads=True,
        )
        yield on(
            "decoder." + key, "decoder", value={**BYTE_LEVEL, key: not BYTE_LEVEL[key]}, reads=True
        )
    both = {"type": "Sequence", "processors": [LATER, START]}
    yield on("post_processor.processors", "post_processor", value=both, kind="llama3", reads=True)
    yield on(
        "post_processor.processors", "post_processor", value={**both, "processors": [START, START]}
    )
    yield on("post_processor.single", "post_processor", value=START, reads=True)
    yield on("post_processor.single", "post_processor", value=template("A", "<|endoftext|>"))
    yield on("post_processor.single", "post_processor", value=template("B"))
    yield on("post_processor.single", "post_processor", value=template("<|endoftext|>"))
    yield on(
        "post_processor.pair",
        "post_processor",
        value={**START, "pair": START["single"]},
        reads=True,
    )
    yield on(
        "post_processor.special_tokens",
        "post_processor",
        value=template("<|endoftext|>", "A", ids=(256, 97)),
        reads=True,
    )
    yield on(
        "post_processor.special_tokens", "post_processor", value={**START, "special_tokens": {}}
    )
    yield on("post_processor.another", "post_processor", value={**LATER, "another": 1})
    yield on("decoder.type", "decoder", value={"type": "Fuse"})
    yield on("decoder.another", "decoder", "another")


WORDS = "I'LL say 1234567's  \n hello\u2028 Wor\u0301ld_x && \u65e5\u672c\u8a9e/\r\n ..."
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The patterns of o200k, of cl100k as tiktoken once had it, and patterns that skip a part of the
# text.
READ = [
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDINGS}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}",
    rf"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}++|\p{{N}}{{2}}|{REST}",
    r"l+",
    r"(l)(?=l)|\p{N}{2,}",
    "[\u4e00-\u65e5]+|[a-w-]+?|\\d|[^\\S\\n]",
    r"\p{Lu}\p{Ll}*|(?:ll|[.]{3})+",
]
# Patterns that PCRE2 and Oniguruma may read in two ways, or that only one of
# them reads.
DIFFER = [
    r"\p{N}{1,3}+|\p{L}+",
    r"(?<=\s)\p{L}+",
    r"(?<!\s)\p{L}+",
    r"^\p{L}+",
    r"\s++$|\s",
    r"\h+",
    r"\bl",
    r"l\B",
    r"\AI",
    r"\Gl",
    r"\z",
    r"\Z",
    r"\w+",
    r"\W+",
    r"\R",
    r"\X",
    r"\Kl",
    r"[\p{L}&&[^\p{Han}]]+",
    r"[[:alpha:]]+",
    r"\p{Han}+",
    r"\p{^L}+",
    r"\pL",
    r"(?<name>l)l",
    r"(?'name'l)l",
    r"(?P<name>l)l",
    r"(l)\1",
    r"(l)\k<1>",
    r"(?>l+)",
    r"(?i:hello)",
    r"(?i)hello",
    r"(?x) l l",
    r"(?#a)l",
    r"(?~l)",
    r"(*UCP)l",
    r"l{,2}o",
    r"l{1,2}?",
    r".+",
    r"\x6c",
    r"\x{6c}",
    r"\u006c",
    r"\154",
    r"[]l]",
    r"[^]l]",
    r"[\p{L}-z]",
    r"[a--]",
    r"l*",
    r"l|",
    r"\Ql\E",
    r"(?=l)+l",
    r"l**",
]


def print_keys(program):
    import tokenizers

    with tempfile.TemporaryDirectory() as folder:
        for line in keys():
            path = folder + "/" + line["kind"] + ".json"
            subprocess.run([program, "--fixture", path, line["kind"]], check=True)
            with open(path, encoding="utf-8") as file:
                root = json.load(file)
            for (*inside, last), *value in line["edits"]:
                at = root
                for step in inside:
                    at = at[step]
                if isinstance(last, int) and last == len(at):
                    at.append(*value)
                elif value:
                    at[last] = value[0]
                else:
                    del at[last]
            try:
                tokenizer = tokenizers.Tokenizer.from_str(json.dumps(root))
                tokenizer.no_truncation()
                tokenizer.no_padding()
                line["tokens"] = tokenizer.encode(line["text"]).ids
            except BaseException as reason:  # Rust's panics are no Exception
                if isinstance(reason, KeyboardInterrupt):
                    raise
                line["tokens"] = None
            if line["reads"] and line["tokens"] is None:
                sys.exit("error: the package tokenizers does not read " + json.dumps(line))
            print(json.dumps(line, ensure_ascii=False))


def main():
    import tokenizers

    if sys.argv[2:] == ["keys"]:
        return print_keys(sys.argv[1])
    program, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 120
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("llama3", "qwen2", "smollm2"):
            path = folder + "/" + kind + ".json"
            subprocess.run([program, "--fixture", path, kind], check=True)
            tokenizer = tokenizers.Tokenizer.from_file(path)
            draw = random.Random(kind)
            for _ in range(count):
                text = "".join(draw.choice(PIECES) for _ in range(draw.randrange(1, 13)))
                tokens = tokenizer.encode(text, add_special_tokens=False).ids
                print(
                    json.dumps({"kind": kind, "text": text, "tokens": tokens}, ensure_ascii=False)
                )


if __name__ == "__main__":
    main()
