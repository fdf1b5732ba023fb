#!/usr/bin/env bash
# run_bounds.sh [BUILD]: bounds the memory, time and files that odd inputs cost. These are hostile
# headers, many layers, sizes beyond 2^64, a log on a full disk, the outputs of byte_corpus, and the
# flags of tools. Ends with `N passed, N failed`.
# needs: fp32/train_gpt fp32/train_gpt_3d
# needs: tools/byte_corpus tools/schedule tools/loss tools/profile tools/timeline
# shellcheck disable=SC2086  # flags are words
. "$(dirname "$0")/report.sh"
build=$(realpath -m "$build")
root=$PWD
trainer=$build/train_gpt
tools=$root/build/tools
corpus=$tools/byte_corpus
data=$root/dev/test/golden/train.bin
readme=$root/README.md
export OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=SSE41
cd "$dir" || exit 1
# CUDA takes more address space and memory than is bounded here, and has no virtual clock.
stand_ins=1
[[ ${build##*/} == cuda* ]] && stand_ins=
model="--layers 1 --heads 2 --channels 4 --vocab 61 --seq 3"
tiny="--train-data $data $model --max-seq 3 --micro-batch 1"

# refused CODE PATTERN COMMAND...: one line on stderr that has the pattern.
refused() {
    local want=$1 pattern=$2
    shift 2
    timeout 60 "$@" >out 2>err </dev/null
    code=$?
    [ $code = "$want" ] && [ "$(wc -l <err)" = 1 ] && grep -q "$pattern" err
}

# ---- hostile headers: no more than 10 times the file, and 100 MiB for the program itself ---------

hostile() {  # hostile MEGABYTES: a safetensors header of many short values
    python3 - "$1" <<'P'
import json, struct, sys
size = int(sys.argv[1]) * 1000000
body = b'{"a":[' + b'0,' * ((size - 9) // 2) + b'0]}'
body += b' ' * (size - len(body))
open('bad/model.safetensors', 'wb').write(struct.pack('<Q', size) + body)
json.dump({'model_type': 'gpt2', 'n_embd': 4, 'n_layer': 1, 'n_head': 2, 'vocab_size': 61,
           'n_positions': 3}, open('bad/config.json', 'w'))
open('bad/tokenizer.json', 'wb').write(b'{"x":[' + b'[],' * (size // 3) + b'[]]}')
P
}
if [ -n "$stand_ins" ] && command -v python3 >/dev/null; then
    mkdir bad
    hostile 20
    # 20 MB of header: at most 200 MB and 100 MB for the program.
    for flag in "--init bad" "--tokenizer bad/tokenizer.json"; do
        refused 2 'more values than a file of its size' \
            bash -c 'ulimit -v 1500000; exec "$@"' x "$trainer" $tiny $flag
        status=$?
        most=$(python3 - "$trainer" $tiny $flag <<'P'
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
P
)
        [ $status = 0 ] && [ "$most" -le 300 ]
        report $? "20 MB of hostile JSON by ${flag%% *} are refused with $most MiB"
    done
fi

# ---- many layers: the start takes time in proportion ---------------------------------------------

# cpu_ms COMMAND...: the milliseconds of a core that it takes, whatever else the machine does; sets
# code.
cpu_ms() {
    local TIMEFORMAT='%U %S'
    { time timeout 60 "$@" >out 2>err; } 2>times
    code=$?
    ms=$(awk 'END { print int(1000 * ($1 + $2)) }' times)
}
cpu_ms "$trainer" $tiny --layers 1000 --steps 1
few=$ms
cpu_ms "$trainer" $tiny --layers 5000 --steps 1
[ $code = 0 ] && [ "$ms" -lt $((9 * few)) ]
report $? "5000 layers take $ms ms of a core for a step, less than 9 times the $few ms of 1000"
refused 2 'must be a whole number from 1 to 5000' "$trainer" $tiny --layers 5001
report $? "more are refused: $(cat err)"

# ---- many tensors in the files of an index -------------------------------------------------------

if command -v python3 >/dev/null; then
    mkdir many
    python3 - <<'P'
import json, struct
names = ['t%06d' % i for i in range(100000)]
tensors = {n: {'dtype': 'U8', 'shape': [1], 'data_offsets': [i, i + 1]}
           for i, n in enumerate(names)}
head = json.dumps(tensors, separators=(',', ':')).encode()
open('many/part.safetensors', 'wb').write(struct.pack('<Q', len(head)) + head + bytes(len(names)))
names.reverse()  # a search from the front would be long
json.dump({'weight_map': {n: 'part.safetensors' for n in names}},
          open('many/model.safetensors.index.json', 'w'))
json.dump({'model_type': 'gpt2', 'n_embd': 4, 'n_layer': 1, 'n_head': 2, 'vocab_size': 61,
           'n_positions': 3}, open('many/config.json', 'w'))
P
    refused 2 'has no tensor' bash -c 'ulimit -t 10; exec "$@"' x "$trainer" $tiny --init many
    report $? "an index of 100000 tensors is read in 10 s of a core: $(cut -c 1-100 err)"
fi

# ---- clusters on which a step never ends ---------------------------------------------------------

slow() {  # slow NAME KEY VALUE: a cluster with another constant
    local cluster=$root/dev/clusters/selene-2021.json
    sed -E "s/(\"$2\": *\{ *\"value\": *)[^,]+/\1$3/" "$cluster" >"$1.json"
    ! cmp -s "$1.json" "$cluster"
}
simulate="$trainer $model --ranks 1"
for case in 'launch_host 1e308' 'nic_latency 1e16' 'hbm_bandwidth 1e-300' \
    'gemm_efficiency 1e-300' 'peak_bf16 1e19' 'hbm_bandwidth 1e999' 'sms NaN'; do
    [ -n "$stand_ins" ] || continue
    slow hostile $case && refused 2 hostile.json $simulate --simulate hostile.json
    report $? "a cluster with $case: $(cut -c 1-100 err)"
done
if [ -n "$stand_ins" ]; then
    slow late launch_host 1e15
    timeout 60 $simulate --simulate late.json --steps 3 >out 2>err &&
        grep -q '^step [0-9.]* s' out && ! grep -qwiE 'nan|-?inf' out
    report $? "a launch that takes a million years: $(grep -a '^step .* s |' out)"
fi

# ---- sizes whose product passes 2^64 -------------------------------------------------------------

refused 2 'more than 2^60 bytes' "$trainer" --dry-run --layers 1 --heads 1 --channels 64 \
    --micro-batch 1000000 --seq 10000000 --vocab 10000000
report $? "--dry-run of sizes beyond 2^64 is refused"
refused 2 'more than 2^60 bytes' "$trainer" --dry-run --layers 5000 --heads 4096 --channels 131072 \
    --vocab 10000000 --seq 8 --global-batch 1000000000
report $? "and of more parameters than anybody has"

# ---- a log on a full disk ------------------------------------------------------------------------

large=$((1 << 24))  # a file of 16 MiB takes no more
{ printf '{"step":1,"of":"'; head -c $large /dev/zero | tr '\0' x; printf '"}\n'; } >full.jsonl
"$trainer" $tiny --steps 1 --out full >/dev/null
refused 1 '.' bash -c 'ulimit -f $(($0 / 1024)); exec "$@"' $large \
    "$trainer" $tiny --steps 3 --out full --resume auto --log full.jsonl
[ $code = 1 ] && [ "$(grep -c 'File too large' err)" = 2 ] &&
    grep -q '^note: the log cannot be written' err && [ -f full/step-00000003/trainer.json ]
report $? "--log on a full disk: said at once, the reason named, all steps saved, code $code"

# ---- damaged checkpoints are named and not taken -------------------------------------------------

$trainer $tiny --steps 3 --save-every 1 --out three >out 2>&1
flip() {  # flip FILE OFFSET-FROM-END: one bit
    local at=$(($(stat -c %s "$1") - $2)) byte
    byte=$(od -An -tu1 -j$at -N1 "$1")
    # shellcheck disable=SC2059
    printf "\\$(printf %03o $((byte ^ 4)))" | dd of="$1" bs=1 seek=$at conv=notrunc 2>/dev/null
}
flip three/step-00000003/optimizer.safetensors 30
refused 2 'optimizer.safetensors is damaged: .* has the checksum' \
    "$trainer" $tiny --resume three/step-00000003
report $? "--resume of a checkpoint with a flipped bit: $(cut -c 1-120 err)"
$trainer $tiny --steps 4 --resume auto --out three --dry-run >out 2>err &&
    grep -q '^note: the checkpoint step-00000003 is passed over: .* is damaged' out &&
    grep -q '^resuming .*step-00000002 ' out
report $? '--resume auto says so, and takes the one before'
$trainer $tiny --resume three/step-00000003 --verify 0 --dry-run >out 2>err
report $? '--verify 0 takes it as it is'
flip three/step-00000003/optimizer.safetensors 30
sed -i 's/"n_head": 2/"n_head": 1/' three/step-00000003/config.json
refused 2 'trainer.json or config.json is damaged' \
    "$trainer" ${tiny/--heads 2/} --resume three/step-00000003
report $? "--resume with another number of heads in config.json: $(cut -c 1-120 err)"

# ---- outputs that are inputs ---------------------------------------------------------------------

# Weights in two files, as Hugging Face saves large models.
mkdir split
cp three/step-00000002/config.json split/
cp three/step-00000002/model.safetensors split/model-00001-of-00001.safetensors
python3 - <<'P'
import json, struct
data = open('split/model-00001-of-00001.safetensors', 'rb').read()
names = json.loads(data[8:8 + struct.unpack('<Q', data[:8])[0]])
part = 'model-00001-of-00001.safetensors'
json.dump({'weight_map': {n: part for n in names if n != '__metadata__'}},
          open('split/model.safetensors.index.json', 'w'))
P
cp "$root/dev/clusters/laptop.json" cluster.json
echo 'F0 B0' >schedule.txt
cp "$data" shard.tokens
echo '{"step":1,"loss":1}' >before.jsonl
inputs='cluster.json schedule.txt shard.tokens before.jsonl split/*'
sums=$(cat $inputs | cksum)
train3d=${trainer}_3d
for case in "is no former output|--init split --log split/model-00001-of-00001.safetensors" \
    "would overwrite|--init split --trace split/model.safetensors.index.json" \
    "would overwrite|--init split --dump-gradients split/config.json" \
    "is no former output|--virtual-time cluster.json --log cluster.json" \
    "would overwrite|--schedule-file schedule.txt --trace schedule.txt" \
    "would overwrite|--train-data 1:shard.tokens,2:$data --trace shard.tokens" \
    "would overwrite before.jsonl|--log before.jsonl --dump-gradients before.jsonl" \
    "would overwrite output-link|--dump-gradients output-link"; do
    [ -z "$stand_ins" ] && [[ $case == *--virtual-time* ]] && continue
    ln -sf before.jsonl output-link
    refused 2 "${case%%|*}" "$train3d" $tiny --steps 1 ${case#*|} &&
        [ "$(cat $inputs | cksum)" = "$sums" ]
    report $? "${case#*|}: $(cut -c 1-100 err)"
done

# ---- the log is not touched by a run that is refused, however late -------------------------------

if command -v cc >/dev/null; then
    cat >eio.c <<'C'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
// Reads behind the header of a model fail, as on a disk that dies.
ssize_t pread(int fd, void *to, size_t n, off_t at) {
    static ssize_t (*real)(int, void *, size_t, off_t);
    char link[64] = "/proc/self/fd/", path[4096] = "";
    if (!real) real = (ssize_t (*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread");
    int k = fd >= 100 ? 100 : fd >= 10 ? 10 : 1;
    for (int i = 14; k; k /= 10) link[i++] = (char)('0' + fd / k % 10);
    if (at > 2000 && readlink(link, path, sizeof path - 1) > 0 && strstr(path, "model.safetensors"))
        return errno = EIO, -1;
    return real(fd, to, n, at);
}
ssize_t pread64(int fd, void *to, size_t n, off_t at) { return pread(fd, to, n, at); }
C
    cc -shared -fPIC -o eio.so eio.c -ldl
    echo '{"step":1,"loss":1}' >old.jsonl
    refused 1 'model.safetensors: Input/output error' env LD_PRELOAD="$PWD/eio.so" \
        "$trainer" $tiny --init three/step-00000002 --log old.jsonl &&
        [ "$(cat old.jsonl)" = '{"step":1,"loss":1}' ]
    report $? "weights that cannot be read: code $code, the old log is as it was"
fi

# ---- what a run leaves that does nothing ---------------------------------------------------------

refused 2 'does not divide' "$trainer" $tiny --heads 3 --out fresh && [ ! -e fresh ]
report $? "a run that is refused makes no folder: $(cat err)"
"$trainer" $tiny --steps 1 --out fresh >out 2>err &&
    "$trainer" $tiny --steps 1 --resume fresh/step-00000001 >out 2>err &&
    grep -q '^note: .* --steps 1: nothing is trained$' out
report $? "a resume with no steps left says so: $(grep ^note out)"
mv fresh/step-00000001 fresh/tmp-00000001-host-1
"$trainer" $tiny --steps 2 --out fresh --resume fresh/step-00000001 >out 2>err &&
    [ -f fresh/step-00000002/trainer.json ]
report $? "a resume by the name that an interrupted save did not give: $(grep ^resuming out)"

# ---- a machine without a GPU or its driver, as the login node of a cluster -----------------------

blind() { CPU_NO_DEVICE=1 CUDA_VISIBLE_DEVICES='' timeout 60 "$@" >out 2>err </dev/null; }
blind "$trainer" --help && grep -q '^usage' out && [ ! -s err ]
report $? "--help needs no GPU"
blind "$trainer" $tiny --dry-run && grep -q '^device  *no GPU, ' out &&
    grep -q '^MiB per rank' out && [ ! -s err ]
report $? "--dry-run needs no GPU: $(grep -a '^device' out)"
blind "$trainer" $tiny --steps 1
[ $? = 2 ] && [ "$(wc -l <err)" = 1 ] && grep -q 'no GPU can be used' err
report $? "training does: $(cat err)"

# ---- byte_corpus: replaces shards and nothing else -----------------------------------------------

mknod null c 1 3 2>/dev/null || ln -s /dev/null null
ln -s "$dir/target" link && echo precious >target
cp "$readme" text && : >empty
for case in 'text val.bin text' 'train.bin train.bin text' 'train.bin null text' \
    'link val.bin text' 'train.bin val.bin missing' 'train.bin ./text text' \
    'train.bin val.bin empty empty'; do
    refused 1 '^byte_corpus: cannot' "$corpus" $case && cmp -s text "$readme" && [ ! -f null ] &&
        [ -L link ] && [ "$(cat target)" = precious ] && ! ls ./*.bin* >/dev/null 2>&1
    report $? "byte_corpus $case: $(cat err)"
done
refused 1 'cannot write' bash -c 'ulimit -f 4; exec "$@"' x "$corpus" train.bin val.bin "$readme" &&
    ! ls ./*.bin* >/dev/null 2>&1
report $? "byte_corpus on a full disk leaves nothing: $(cat err)"
"$corpus" train.bin val.bin text >out 2>err && "$corpus" train.bin val.bin text >out 2>err
report $? "byte_corpus replaces its own shards"

# ---- tools: the flag that has a wrong value is named ---------------------------------------------

for case in 'schedule --micros 0 zb-h1' 'schedule --forward -1 1f1b' 'loss --width x text' \
    'profile --skip -1 text' 'timeline --costs 1,1 text'; do
    read -r tool flag value _ <<<"$case"
    "$tools"/$case >out 2>err
    [ $? = 2 ] && grep -q "^$tool: $flag cannot be '$value'" err
    report $? "$case: $(head -n 1 err)"
done
"$tools/schedule" --help >out 2>err && grep -q '^usage: schedule' out && [ ! -s err ]
report $? "schedule --help"

finish
