#!/usr/bin/env bash
# run_data.sh [BUILD]: the Python programs of dev/data. prepare.py makes shards of small texts that
# replace the data sets (file:// instead of a network). They are compared token by token and trained
# on. check_transformers.py must find a checkpoint's loss if Hugging Face's transformers is
# installed. PYTHON names another interpreter.
# needs: fp32/train_gpt
. "$(dirname "$0")/report.sh"
python=${PYTHON:-python3}

command -v "$python" >/dev/null || skip "no $python"
# Which a shim of pyenv looks for at every start
python=$("$python" -c 'import sys; print(sys.executable)')

prepare() { "$python" dev/data/prepare.py "$@" >"$dir/out" 2>&1; }

# shard FILE: its header and its tokens, one a line.
shard() {
    od -An -v -td4 -N12 "$1" | awk '{print $1, $2, $3}'
    od -An -v -tu2 -j1024 -w2 "$1" | tr -d ' '
}

# document FORMAT NUMBER: the tokens of a document as bytes, with <|endoftext|> before it.
document() {
    echo 256
    # shellcheck disable=SC2059
    printf "$1" "$2" | od -An -v -tu1 -w1 | tr -d ' '
}

# holds SHARD FIRST LAST TOKENS: the shard has lines FIRST .. LAST of TOKENS, and its header has
# their count.
holds() {
    sed -n "$2,$3p" "$4" >"$dir/want"
    [ -f "$1" ] && { echo "20240520 1 $(($3 - $2 + 1))"; cat "$dir/want"; } |
        cmp - <(shard "$1") >>"$dir/out" 2>&1
}

# ---- tinyshakespeare: speeches between empty lines, a 20th of them for validation ----------------

source=$dir/source out=$dir/shards
mkdir -p "$source"
speech='Speaker %d:\nNaïve words.\nAnd a last line.\n\n'
for ((i = 1; i <= 40; i++)); do
    # shellcheck disable=SC2059
    printf "$speech" $i >>"$source/input.txt"
    document "$speech" $i
done >"$dir/tokens"
total=$(wc -l <"$dir/tokens")
split=$(grep -n '^256$' "$dir/tokens" | sed -n '3s/:.*//p')  # where the third speech begins

prepare tinyshakespeare --source "file://$source" --out "$out"
report $? 'prepare.py tinyshakespeare'
holds "$out/tinyshakespeare_val_000000.bin" 1 $((split - 1)) "$dir/tokens"
report $? "its first 20th, $((split - 1)) tokens, is validation"
holds "$out/tinyshakespeare_train_000001.bin" "$split" "$total" "$dir/tokens"
report $? "the rest, $((total - split + 1)) tokens, is training: each speech after <|endoftext|>"

"$build/train_gpt" --train-data "$out/tinyshakespeare_train_*.bin" \
    --val-data "$out/tinyshakespeare_val_*.bin" --layers 1 --channels 16 --seq 8 --micro-batch 2 \
    --steps 2 --val-every 2 --out "$dir/checkpoint" >"$dir/out" 2>&1
report $? 'train_gpt trains and validates on them'

mv "$source" "$dir/moved"
rm "$out"/*.bin
prepare tinyshakespeare --source "file://$source" --out "$out" --shard-tokens 600
report $? 'what has been downloaded is not fetched again'
holds "$out/tinyshakespeare_train_000001.bin" "$split" $((split + 599)) "$dir/tokens" &&
    holds "$out/tinyshakespeare_train_000002.bin" $((split + 600)) "$total" "$dir/tokens" &&
    [ ! -e "$out/tinyshakespeare_train_000003.bin" ] && [ $((total - split + 1)) -lt 1800 ]
report $? \
    '--shard-tokens 600: a whole shard, and one that takes the rest as well, so that none is short'
mv "$dir/moved" "$source"

out=$dir/again
mkdir -p "$out/download"
head -c 100 "$source/input.txt" >"$out/download/input.txt.part"
prepare tinyshakespeare --source "file://$source" --out "$out"
holds "$out/tinyshakespeare_train_000001.bin" "$split" "$total" "$dir/tokens"
report $? 'a download that was interrupted begins again'

# ---- tinystories: stories between lines of <|endoftext|> -----------------------------------------

out=$dir/stories
for ((i = 1; i <= 30; i++)); do
    printf '<|endoftext|>\n\nOnce there was %d.\n\nIt went on.\n' $i \
        >>"$source/TinyStoriesV2-GPT4-train.txt"
    document 'Once there was %d.\n\nIt went on.' $i
done >"$dir/tokens"
printf 'One.\n<|endoftext|>\nTwo.\n<|endoftext|>\n' >"$source/TinyStoriesV2-GPT4-valid.txt"
prepare tinystories --source "file://$source" --out "$out" --shard-tokens 200 --shards 2
report $? 'prepare.py tinystories --shards 2'
holds "$out/tinystories_train_000001.bin" 1 200 "$dir/tokens" &&
    holds "$out/tinystories_train_000002.bin" 201 400 "$dir/tokens" &&
        [ ! -e "$out/tinystories_train_000003.bin" ]
report $? 'two training shards of 200 tokens, and no more'
{ document 'One.' 0; document 'Two.' 0; } >"$dir/tokens"
holds "$out/tinystories_val_000000.bin" 1 10 "$dir/tokens"
report $? 'validation is the other file; nothing stands behind the last separator'

# ---- a vocabulary above 65536: tokens of 32 bits -------------------------------------------------

# Stands in for the package: a token is 100000 and a byte, and <|endoftext|> is the last one. The
# file's words say whether it asks for truncation and padding, and whether <|first|> stands before
# each text; `damaged` is refused.
mkdir "$dir/package"
cat >"$dir/package/tokenizers.py" <<'PYTHON'
class Encoding:
    def __init__(self, ids): self.ids = ids
class Tokenizer:
    special = {"<|endoftext|>": 128255, "<|first|>": 128254}
    @classmethod
    def from_file(kind, path):
        self, words = kind(), open(path).read().split()
        if "damaged" in words: raise Exception("expected value at line 1 column 1")
        self.truncation, self.padding = "truncation" in words or None, "padding" in words or None
        self.first = "first" in words
        return self
    def no_truncation(self): self.truncation = None
    def no_padding(self): self.padding = None
    def token_to_id(self, token): return self.special.get(token)
    def id_to_token(self, token):
        return next((t for t, id in self.special.items() if id == token), "a byte")
    def get_vocab(self): return dict(self.special, a=100000)
    def encode(self, text, add_special_tokens):
        ids = [128255 if part is None else 100000 + part for part in self.split(text)]
        ids = ids[:4] if self.truncation else ids
        ids = ids + [100000] * (16 - len(ids)) if self.padding else ids
        return Encoding([128254] + ids if self.first and add_special_tokens else ids)
    def split(self, text):
        for number, piece in enumerate(text.split("<|endoftext|>")):
            yield from [None] * (number > 0)
            yield from piece.encode()
    def encode_batch(self, texts, add_special_tokens):
        return [self.encode(text, add_special_tokens) for text in texts]
PYTHON
echo >"$dir/tokenizer.json"
wide() { PYTHONPATH=$dir/package prepare "$@" --tokenizer "$dir/tokenizer.json" --out "$dir/wide"; }
paragraph='Paragraph %d.\n\n'
for ((i = 1; i <= 40; i++)); do
    # shellcheck disable=SC2059
    printf "$paragraph" $i >>"$dir/text"
    document "$paragraph" $i
done | awk '{ print $1 == 256 ? 128255 : 100000 + $1 }' >"$dir/tokens"
split=$(grep -n '^128255$' "$dir/tokens" | sed -n '3s/:.*//p')
wide text --text "$dir/text" && { echo "20240801 7 $((split - 1))"; head -n $((split - 1)) \
    "$dir/tokens"; } |
    cmp - <(od -An -v -td4 -N12 "$dir/wide/text_val_000000.bin" | awk '{print $1, $2, $3}'
            od -An -v -tu4 -j1024 -w4 "$dir/wide/text_val_000000.bin" | tr -d ' ') >>"$dir/out" 2>&1
report $? 'a vocabulary of 128256 gives a shard of uint32'
wide windows --text LICENSE --seq 8 && head -n 1 LICENSE | head -c 16 >"$dir/line" &&
    wide cloze --text "$dir/line" --seq 8
report $? 'and rows for --eval'
"$build/train_gpt" --vocab 128256 --train-data "$dir/wide/text_train_*.bin" \
    --val-data "$dir/wide/text_val_*.bin" --layers 1 --channels 16 --seq 8 --micro-batch 2 \
    --steps 2 --val-every 2 --val-batches 1 --out "$dir/wide/model" >"$dir/out" 2>&1
report $? 'train_gpt trains on it'
"$build/train_gpt" --init "$dir/wide/model/step-00000002" --eval "$dir/wide/windows.bin" --seq 8 \
    --micro-batch 2 >"$dir/out" 2>&1
report $? "and evaluates: $(tail -n 1 "$dir/out")"
echo '{"ctx": "a", "endings": ["b", "c"], "label": 1}' >"$dir/line"
wide choices --text "$dir/line" --seq 8 &&
    "$build/train_gpt" --init "$dir/wide/model/step-00000002" --eval "$dir/wide/choices.bin" \
        --seq 8 --micro-batch 2 >"$dir/out" 2>&1
report $? "choices too: $(tail -n 1 "$dir/out")"
wide windows --text LICENSE --seq 8 --vocab 128255
[ $? = 1 ] && grep -q \
    '^error: the text has token 128255 (<|endoftext|>), which a --vocab of 128255' "$dir/out"
report $? 'refused: a --vocab that a token of the text reaches'
PYTHONPATH=$dir/package prepare windows --text LICENSE --seq 8 --document-token '<|first|>' \
    --vocab 128255 --tokenizer "$dir/tokenizer.json" --out "$dir/smaller" &&
    [ "$(od -An -td4 -j16 -N4 "$dir/smaller/windows.bin")" -eq 128255 ]
report $? 'a model with fewer tokens than its tokenizer is served, while the text has none of them'
wide windows --text LICENSE --seq 8 --vocab 128512 &&
    [ "$(od -An -td4 -j16 -N4 "$dir/wide/windows.bin")" -eq 128512 ]
report $? '--vocab stands in the rows: a model may have more tokens than its tokenizer'

# ---- the text is taken as it is ------------------------------------------------------------------

# whole TEXT TOKENIZER: the tokens of all shards that prepare.py text makes of the file TEXT, one a
# line.
whole() {
    rm -rf "$dir/whole"
    echo "$2" >"$dir/kind.json"
    PYTHONPATH=$dir/package prepare text --text "$1" --tokenizer "$dir/kind.json" \
        --out "$dir/whole" "${@:3}" &&
        for file in "$dir"/whole/text_val_*.bin "$dir"/whole/text_train_*.bin; do od -An -v -tu4 \
            -j1024 -w4 "$file"; done |
        tr -d ' '
}
whole "$dir/text" '' >"$dir/plain"
whole "$dir/text" 'truncation padding' >"$dir/cut"
[ -s "$dir/plain" ] && cmp "$dir/plain" "$dir/cut" >>"$dir/out" 2>&1 &&
    grep -q 'asks for truncation, which' "$dir/out" &&
    grep -q 'asks for padding, which' "$dir/out"
report $? 'truncation and padding in tokenizer.json are for batches: all text stays, a note says so'
whole "$dir/text" 'first' | cmp - <(sed 's/128255/128254/' "$dir/plain") >>"$dir/out" 2>&1
report $? 'the token that the tokenizer puts before a text stands before each document'
whole "$dir/text" 'first' --document-token '<|endoftext|>' | cmp - "$dir/plain" >>"$dir/out" 2>&1
report $? '--document-token names another'

# Indentation, lines that are not quite empty, line ends of Windows, ideographic blanks; the mark at
# the start goes.
printf '\xef\xbb\xbf\n  first\r\n\r\n' >"$dir/odd"
for ((i = 1; i <= 40; i++)); do printf '    y = %d\n  \n\xe3\x80\x80return\xe2\x80\xa8y\r\n\n\n' \
    $i; done >>"$dir/odd"
printf 'the end' >>"$dir/odd"
tail -c +4 "$dir/odd" | od -An -v -tu1 -w1 | awk '{ print 100000 + $1 }' >"$dir/bytes"
whole "$dir/odd" '' | grep -v 128255 | cmp - "$dir/bytes" >>"$dir/out" 2>&1 &&
    [ "$(whole "$dir/odd" '' | grep -c 128255)" = 42 ]
report $? 'the documents of a text are the text, byte for byte: 42 of them'
sed 's/^$/===/' "$dir/text" >"$dir/marked"
[ "$(whole "$dir/marked" '' --separator === | grep -c 128255)" = 40 ]
report $? '--separator names the line that ends a document'
{ cat "$dir/text"; printf 'It says <|endoftext|> here.\n'; } >"$dir/named"
whole "$dir/named" '' >"$dir/tokens" && grep -q \
    '^note: the text names the token before documents 1 times' "$dir/out"
report $? 'a text that names <|endoftext|> gets that token, and a note'
printf 'one two\xe2\x80\xa8three\x0cfour\r\nfive six\r\n' >"$dir/line"
wide cloze --text "$dir/line" --seq 64 && grep -q '2 rows' "$dir/out"
report $? 'cloze: lines end at a line feed, and nowhere else'
rm -rf "$dir/short"
prepare text --text "$dir/text" --out "$dir/short" &&
    grep -q '^note: a shard of [0-9]* tokens serves --seq up to' "$dir/out"
report $? 'a shard that is shorter than usual samples says which --seq it serves'

# unusable PATTERN TOKENIZER: a file that is no tokenizer.json gets one error message.
unusable() {
    PYTHONPATH=$dir/package prepare text --text "$dir/text" --tokenizer "$2" --out "$dir/none"
    [ $? = 1 ] && grep -q "^error: .*$1" "$dir/out" && ! grep -q Traceback "$dir/out"
    report $? "refused: $(grep -m1 '^error: ' "$dir/out" | sed "s|$dir||g")"
}
mkdir -p "$dir/folder" "$dir/empty"
echo >"$dir/folder/tokenizer.json"
PYTHONPATH=$dir/package prepare text --text "$dir/text" --tokenizer "$dir/folder" --out "$dir/whole"
report $? '--tokenizer takes a folder, too'
unusable 'there is no such file' "$dir/empty"
unusable 'there is no such file' openai-community/gpt2
echo damaged >"$dir/vocab.json"
unusable 'is no tokenizer.json: expected value' "$dir/vocab.json"
echo 'version https://git-lfs.github.com/spec/v1' >"$dir/pointer.json"
unusable 'git lfs pull' "$dir/pointer.json"

# ---- fineweb, already in tokens ------------------------------------------------------------------

out=$dir/fineweb
mkdir -p "$out"
echo '{}' >"$out/tokenizer.json"  # which comes from elsewhere and is not fetched again
cp "$dir/stories/tinystories_val_000000.bin" "$source/fineweb_val_000000.bin"
cp "$dir/stories/tinystories_train_000001.bin" "$source/fineweb_train_000001.bin"
prepare fineweb --pretokenized --source "file://$source" --out "$out" &&
    cmp "$source/fineweb_val_000000.bin" "$out/fineweb_val_000000.bin" &&
    cmp "$source/fineweb_train_000001.bin" "$out/fineweb_train_000001.bin"
report $? 'prepare.py fineweb --pretokenized takes the shards as they are'

# ---- the public evaluation sets, in their own formats, from a server -----------------------------

# /whole/FILE is the file, /half/FILE breaks off in its middle, /chunks/FILE too, without a length
# before it; nothing else is there.
web=$dir/web
mkdir "$web"
"$python" - "$web" >"$dir/port" 2>"$dir/server" <<'PYTHON' &
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        how, _, name = self.path[1:].partition("/")
        path = os.path.join(sys.argv[1], name)
        if how not in ("whole", "half", "chunks") or not os.path.isfile(path):
            return self.send_error(404)
        body = open(path, "rb").read()
        self.send_response(200)
        if how == "chunks":
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if how == "chunks":
            self.wfile.write(b"%x\r\n" % len(body))
        self.wfile.write(body if how == "whole" else body[: len(body) // 2])
        self.close_connection = True
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
PYTHON
server=$!
trap 'kill $server 2>/dev/null; rm -rf "$dir"' EXIT
await [ -s "$dir/port" ]
export no_proxy=127.0.0.1
address=http://127.0.0.1:$(cat "$dir/port")

# Lines of JSON: each object, which ends in a line of its own, without its breaks.
objects() { sed ':more; /}$/!{N; b more}; s/\n */ /g'; }
objects >"$web/hellaswag_val.jsonl" <<'LINES'
{"ind": 24, "activity_label": "Making tea",
 "ctx_a": "A man stands in a kitchen.", "ctx_b": "he", "ctx": "A man stands in a kitchen. he",
 "split": "val", "split_type": "indomain", "label": 3,
 "endings": ["flies away.", "is a kettle.", "sells the house and the street.",
             "pours water into a cup."],
 "source_id": "activitynet~v_0"}
{"ind": 31, "activity_label": "Gardening",
 "ctx": "[header] How to water plants [title] Take a can.",
 "split": "val", "split_type": "zeroshot", "label": 0,
 "endings": ["Fill it.", "Eat it \u2013 all.", "Fly.", "Read."],
 "source_id": "wikihow~1"}
LINES
objects >"$web/lambada_test_en.jsonl" <<'LINES'
{"text":
 "\"Where is the key?\" she asked.\n\nHe looked under the mat, where there was only the key"}
{"text": "Na\u00efve words, and then the last word"}
LINES

# rows FILE: each row as text, with | before what counts and behind it, of choices after 1 (the
# right one) or 0.
rows() {
    "$python" - "$1" <<'PYTHON'
import array, sys
data = open(sys.argv[1], "rb").read()
head, words = array.array("i", data[:1024]), array.array("H", data[1024:]).tolist()
def text(tokens):
    data = b"".join(b"<>" if t == 256 else bytes([t]) for t in tokens)
    return data.decode().replace("\n", "/")
at = 0
for _ in range(head[2]):
    n, first, count = words[at : at + 3]
    at += 3 + (head[3] == 3)
    row, mark = words[at : at + n], f"{words[at - 1]} " if head[3] == 3 else ""
    parts = row[:first], row[first : first + count], row[first + count :]
    print(mark + "|".join(text(part) for part in parts))
    at += n
print("end" if at == len(words) else "more")
PYTHON
}
public() { prepare "$1" --tokenizer bytes --out "$dir/public" "${@:2}"; }
public hellaswag --source "$address/whole" && rows "$dir/public/hellaswag.bin" >>"$dir/out" 2>&1 &&
    rows "$dir/public/hellaswag.bin" | cmp - <(printf '%s\n' \
        '1 A man stands in a kitchen. he| pours water into a cup.|' \
        '0 A man stands in a kitchen. he| flies away.|' \
        '0 A man stands in a kitchen. he| is a kettle.|' \
        '0 A man stands in a kitchen. he| sells the house and the street.|' \
        '1 [header] How to water plants [title] Take a can.| Fill it.|' \
        '0 [header] How to water plants [title] Take a can.| Eat it – all.|' \
        '0 [header] How to water plants [title] Take a can.| Fly.|' \
        '0 [header] How to water plants [title] Take a can.| Read.|' end) >>"$dir/out" 2>&1
report $? 'HellaSwag as published, from a server: context, endings after a blank, the right one 1st'
public lambada --source "$address/whole" && rows "$dir/public/lambada.bin" >>"$dir/out" 2>&1 &&
    rows "$dir/public/lambada.bin" | cmp - <(printf '%s\n' \
        '"Where is the key?" she asked.//He looked under the mat, where there was only the| key|' \
        'Naïve words, and then the last| word|' end) >>"$dir/out" 2>&1
report $? 'LAMBADA in its published format: the last word and the blank before it count'
cat >"$web/wiki.test.tokens" <<'TEXT'

 = A Title = 

 The <unk> of 1 @,@ 000 words ( some say " more " ) is n't well @-@ known , it 's said ; 3 @.@ 5 . 

TEXT
wikitext() {
    local words='The <unk> of 1,000 words (some say "more")'
    rows "$dir/public/wikitext103.bin" >>"$dir/out" 2>&1 && grep -q '1 rows, ' "$dir/out" &&
        rows "$dir/public/wikitext103.bin" | cmp - <(printf '%s\n' \
            "<>|/= A Title =//$words isn't well-known, it's said; 3.5.//|" end) \
            >>"$dir/out" 2>&1 &&
        [ "$(od -An -td4 -j20 -N4 "$dir/public/wikitext103.bin")" -eq \
            "$(wc -w <"$web/wiki.test.tokens")" ]
}
public wikitext103 --text "$web/wiki.test.tokens" && wikitext
report $? \
    'WikiText in its published format: words as people write them, counted as the file has them'
if "$python" -c 'import pyarrow' 2>/dev/null; then
    "$python" -c 'import sys, pyarrow, pyarrow.parquet as p
sentences = open(sys.argv[1]).read().splitlines(keepends=True)
p.write_table(pyarrow.table({"text": sentences}), sys.argv[2])' \
        "$web/wiki.test.tokens" "$web/test-00000-of-00001.parquet" &&
            rm -f "$dir/public/wikitext103.bin"
    public wikitext103 --source "$address/whole" && wikitext
    report $? 'the same from the parquet file of a server'
fi

# broken WHERE PATTERN: one sentence, and neither the file nor a part of it.
broken() {
    rm -rf "$dir/public"
    public hellaswag --source "$address/$1"
    [ $? = 1 ] && [ "$(grep -c '^error: ' "$dir/out")" = 1 ] && grep -q "^error: .*$2" "$dir/out" &&
        ! grep -q Traceback "$dir/out" && [ -z "$(find "$dir/public" -type f)" ]
    report $? "refused, and nothing is left: $(grep -m1 '^error: ' "$dir/out" | sed "s|$address||")"
}
bytes=$(stat -c %s "$web/hellaswag_val.jsonl")
broken half "ended after $((bytes / 2)) of $bytes bytes: try again"
broken chunks 'ended too early'
broken gone '404 Not Found'
head -c $((bytes - 40)) "$web/hellaswag_val.jsonl" >"$web/short" &&
    mv "$web/short" "$web/hellaswag_val.jsonl"
public hellaswag --source "$address/whole"
[ $? = 1 ] && grep -q \
    '^error: line 2 of .*/download/hellaswag_val.jsonl is not as it must be (JSONDecodeError' \
    "$dir/out" &&
    [ ! -e "$dir/public/hellaswag.bin" ]
half=$(grep -m1 '^error: ' "$dir/out" | sed "s|$dir||")
report $? "a file that is half a file for its server too: $half"

# ---- what is refused -----------------------------------------------------------------------------

# refused CODE PATTERN ARGUMENTS...: one line on stderr, and no traceback.
refused() {
    local code=$1 pattern=$2
    shift 2
    prepare "$@"
    [ $? = "$code" ] && grep -q "^error: .*$pattern" "$dir/out" && ! grep -q Traceback "$dir/out"
    report $? "refused: $(grep -m1 '^error: ' "$dir/out" | sed "s|$dir||g")"
}

refused 1 'cannot be downloaded' tinyshakespeare --source "file://$dir/nowhere" --out "$dir/none"
[ ! -e "$dir/none/download/input.txt" ] && [ -z "$(ls "$dir"/none/*.bin 2>/dev/null)" ]
report $? 'and nothing is left that looks like data'
echo '{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 4}' >"$dir/label"
refused 1 "label 4 of 4 endings" choices --text "$dir/label" --tokenizer bytes --out "$dir/none"
echo '{"ctx": "a", "endings": ["b", "c"], "label": 1e999}' >"$dir/label"
refused 1 'line 1 of .* (OverflowError' choices --text "$dir/label" --tokenizer bytes \
    --out "$dir/none"
"$python" -c 'print("[" * 100000)' >"$dir/label"
refused 1 'line 1 of .* is not as it must be' choices --text "$dir/label" --tokenizer bytes \
    --out "$dir/none"
echo '{"ctx": "", "endings": ["b", "c"], "label": 1}' >"$dir/label"
refused 1 'example 1 has no token of context' choices --text "$dir/label" --tokenizer bytes \
    --out "$dir/none"
echo '{"ctx": "a", "endings": ["b", "a very long ending"], "label": 1}' >"$dir/label"
refused 1 'example 1 has no token of context with --seq 8' choices --text "$dir/label" --seq 8 \
    --out "$dir/none"
echo 'one interminable' >"$dir/passage"
refused 1 'has 13 tokens, more than --seq 8' cloze --text "$dir/passage" --seq 8 --out "$dir/none"
mkfifo "$dir/fifo"
refused 1 'is no regular file' cloze --text "$dir/fifo" --out "$dir/none"
printf 'one\n\ntwo\n' >"$dir/few"
refused 1 'fewer than 20 documents' text --text "$dir/few" --out "$dir/none"
echo mine >"$dir/thesis"
mkdir -p "$dir/linked" && ln -s "$dir/thesis" "$dir/linked/cloze.bin.part"
echo 'one two' >"$dir/passage"
prepare cloze --text "$dir/passage" --out "$dir/linked" && [ "$(cat "$dir/thesis")" = mine ] &&
    [ -f "$dir/linked/cloze.bin" ]
report $? "a link OUT.part leads nowhere"
refused 1 'pretokenized is for fineweb' tinystories --pretokenized
refused 1 '--shards must not be negative' tinystories --shards -1
refused 1 'shard-tokens must lie between' tinystories --shard-tokens 0
refused 1 "$dir/tokens" tinyshakespeare --source "file://$source" --out "$dir/tokens"
if ! "$python" -c 'import tokenizers' 2>/dev/null; then
    refused 1 'pip install tokenizers' tinystories --tokenizer "$dir/tokenizer.json" \
        --source "file://$source" --out "$dir/none"
fi
if ! "$python" -c 'import pyarrow' 2>/dev/null; then
    refused 1 'pip install pyarrow' fineweb --tokenizer bytes --source "file://$source" \
        --out "$dir/none"
fi

# ---- check_transformers.py -----------------------------------------------------------------------

checkpoint=$dir/checkpoint/step-00000002 golden=dev/test/golden
check() { "$python" dev/data/check_transformers.py "$@" >"$dir/out" 2>&1; }
if ! "$python" -c 'import torch, transformers' 2>/dev/null; then
    check $golden $golden/train.bin --seq 24
    [ $? = 1 ] && grep -q '^error: .*pip install torch transformers' "$dir/out"
    report $? 'check_transformers.py says what to install'
    echo 'skip check_transformers.py: torch and transformers are not installed'
else
    "$build/train_gpt" --init $golden --train-data $golden/train.bin --seq 24 --global-batch 8 \
        --steps 3 --val-every 3 --val-data $golden/train.bin --val-batches 2 --out "$dir/trained" \
        --log "$dir/log" >"$dir/out" 2>&1
    report $? 'train_gpt makes a checkpoint'
    loss=$(sed -n 's/.*"step":3,"val_loss":\([^},]*\).*/\1/p' "$dir/log")
    check "$dir/trained/step-00000003" $golden/train.bin --seq 24 --batch 16 --loss "$loss" \
        --tolerance 1e-6
    report $? "transformers loads it and finds its validation loss $loss: $(tail -n 1 "$dir/out")"
    check "$dir/trained/step-00000003" $golden/train.bin --seq 24 --batch 16 --loss "1$loss"
    [ $? = 1 ] && grep -q '^error: the losses differ' "$dir/out"
    report $? 'and says so when it is another'
    check "$checkpoint" "$golden/model.safetensors" --seq 8
    [ $? = 1 ] && grep -q '^error: .*is no token shard' "$dir/out"
    report $? 'a file that is no shard is refused'
fi

finish
