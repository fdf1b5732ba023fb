#!/usr/bin/env python3
"""Writes dev/test/tokenizer/kinds.jsonl: texts, and the tokens that the package tokenizers finds for them with the small
tokenizer.json of each kind that test_tokenizer makes.

    golden_tokenizers.py build/cpu-fp32/dev/test/test_tokenizer [COUNT]      COUNT texts of each kind: 120

The texts are drawn from pieces at which the kinds differ: digits, white space of all sorts, apostrophes, line ends,
letters of several scripts, and tokens that merging does not reach. Needs the package tokenizers from PyPI.
"""
import sys

if {"-h", "--help"} & set(sys.argv[1:]):
    sys.exit(print(__doc__))

import json
import random
import subprocess
import tempfile

PIECES = ["hello", "world", " ", "  ", "\t", "\n", "\r\n", "\n\n", "'s", "'S", "'ll", "'LL", "'\u017f", "1", "12", "123",
          "1234", "\u0663\u0664", "\u00bd", "\u2167", "!", "...", "-", "_", "$", "\u00a0", "\u2028", "\u3000", "\u0085",
          "\u180e", "\u00e9", "\u65e5\u672c", "\u0416\u0436", "\u05d0", "\U0001f600", "world's", "llo", " x", "a", "aaa",
          "<|endoftext|>", "<|end", "he'd", "\u200b", "\u2019s", "I'M", ".\n", "; \n ", "/*", "\\"]


def main():
    import tokenizers

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
                print(json.dumps({"kind": kind, "text": text, "tokens": tokens}, ensure_ascii=False))


if __name__ == "__main__":
    main()
