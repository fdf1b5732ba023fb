"""Rows of tokens and which of them count, for --eval: what prepare.py makes of evaluation sets.

The file: 256 int32 (20261122, version, rows, kind, vocabulary, words), then for each row: its
tokens n, the first that counts, how many count, and the n tokens. They are uint16 in version 1, and
uint32 in version 2, which a vocabulary above 65536 needs. Kind 1 is text (words: of the original
text), 2 is cloze, 3 is choices: there a word behind the third is 1 for the right ending of an
example, which comes first, and 0 for the others.
"""

import array
import os
import re
import sys

TEXT, CLOZE, CHOICES = 1, 2, 3


def open_part(path):
    """PATH.part, made anew: what has that name is left over or somebody's link, and is not written
    through."""
    if os.path.lexists(path + ".part"):
        os.remove(path + ".part")
    return open(path + ".part", "xb")


def words_for(vocabulary):
    """An array of uint16 if they can hold the tokens, else of uint32."""
    return array.array("H" if vocabulary <= 65536 else "I")


def write(path, header, body):
    """Rows or a shard: the header, filled up to 256 int32, then words. The file takes its name when
    it is complete."""
    head = array.array("i", header + [0] * (256 - len(header)))
    if sys.byteorder != "little":
        head.byteswap()
        body.byteswap()
    with open_part(path) as file:
        head.tofile(file)
        body.tofile(file)
    os.rename(path + ".part", path)


def write_rows(path, kind, vocabulary, original_words, rows):
    """rows: (tokens, first, count), of choices (tokens, first, count, right)."""
    body = words_for(vocabulary)
    for tokens, *words in rows:
        body.extend([len(tokens), *words])
        body.extend(tokens)
    write(path, [20261122, body.itemsize // 2, len(rows), kind, vocabulary, original_words], body)
    print(f"{path}: {len(rows)} rows, {sum(row[2] for row in rows)} tokens count")


def write_choices(path, vocabulary, examples):
    """examples: (context, endings, label)."""
    rows = []
    for context, endings, label in examples:
        others = [ending for k, ending in enumerate(endings) if k != label]
        for k, ending in enumerate([endings[label]] + others):
            rows.append((context + ending, len(context), len(ending), int(k == 0)))
    write_rows(path, CHOICES, vocabulary, 0, rows)
    print(f"{path}: {len(examples)} examples")


def windows(tokens, seq, stride):
    """Overlapping windows of up to seq + 1 tokens, `stride` apart: each token but the first counts
    once, with at least seq - stride tokens before it where there are so many."""
    rows, done = [], 1
    while done < len(tokens):
        end = min(len(tokens), done + seq if done == 1 else done + stride)
        begin = max(0, end - seq - 1)
        rows.append((tokens[begin:end], done - begin, end - done))
        done = end
    return rows


def cloze(passages, tokenizer, seq):
    """The last word of each passage counts, all of its tokens."""
    rows = []
    for passage in passages:
        before, _, word = passage.strip().rpartition(" ")
        if not before:
            continue
        context, last = tokenizer.encode([before, " " + word])
        if len(last) > seq:
            sys.exit(
                f"error: the last word of '{passage[:40]}...' has {len(last)} tokens, "
                f"more than --seq {seq}"
            )
        tokens = (context + last)[-seq - 1 :]
        rows.append((tokens, len(tokens) - len(last), len(last)))
    return rows


def choices(examples, tokenizer, seq):
    """examples: (context, endings, label). A context that is too long loses its beginning."""
    out = []
    for number, (context, endings, label) in enumerate(examples, 1):
        encoded = tokenizer.encode([context] + [" " + ending.lstrip() for ending in endings])
        room = seq + 1 - max(len(ending) for ending in encoded[1:])
        if room < 1 or not encoded[0]:
            sys.exit(
                f"error: example {number} has no token of context"
                + (
                    f" with --seq {seq}, as its endings have up to {seq + 1 - room}"
                    if encoded[0]
                    else ""
                )
            )
        out.append((encoded[0][-room:], encoded[1:], label))
    return out


def detokenize_wikitext(text):
    """WikiText's words as people write them: its tokens are what a subword model has not seen in
    training."""
    text = re.sub(r" @([-,.])@ ", r"\1", text)
    text = re.sub(r" ([.,:;?!)\]}%])", r"\1", text)
    text = re.sub(r"([(\[{$£]) ", r"\1", text)
    text = re.sub(r" (n't|'(?:s|re|ve|ll|d|m)\b)", r"\1", text)
    text = re.sub(r'" ([^"\n]*?) "', r'"\1"', text)
    return re.sub(r"(?m)^ +| +$", "", text)
