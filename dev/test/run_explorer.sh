#!/usr/bin/env bash
# run_explorer.sh [BUILD]: does doc/explorer.html equal the output of its sources, and are its
# numbers the trainers' own? The page runs in headless Chromium. Its schedules are compared with
# build/tools/schedule, and its times and searches with build/tools/plan. Its layouts are compared
# with --dry-run, NCCL_TRAFFIC=1 and the trainer's refusals. Without clang (target wasm32) or
# Chromium that part is skipped.
# needs: fp32/train_gpt_3d bf16/train_gpt_3d fp32/train_zero_bubble bf16/train_zero_bubble
# needs: bf16/train_llama bf16/train_5d tools/schedule tools/plan
. "$(dirname "$0")/report.sh"
cpu_only 'the numbers are those of the stand-ins'
page=doc/explorer.html

check() { # check TEXT WRONG: passes if nothing is wrong, else says what
    [ -z "$2" ]
    report $? "$1${2:+
$2}"
}

# ---- the page ------------------------------------------------------------------------------------

check "the page has $(wc -c <$page) bytes, at most 335 KB" \
    "$([ "$(wc -c <$page)" -le 335000 ] || echo 'too large')"
loads='(src|action)="?[^#"][^"]*"|href="[a-z]*:|https?://|url\(|@import|fetch\(|XMLHttp'
check "the page loads nothing" "$(grep -oE "$loads" $page)"

clang=${CLANG:-clang} linker=${WASM_LD:-wasm-ld}
made=$(tail -n 1 $page)
here=$("$clang" --version 2>/dev/null | sed -n '1s/.*version \([0-9.]*\).*/<!-- clang \1 -->/p')
if ! command -v "$linker" >/dev/null || ! "$clang" --print-targets 2>/dev/null |
    grep -q wasm32; then
    echo 'skip the bytes of the page: no clang with the target wasm32, or no wasm-ld'
elif [ "$made" != "$here" ]; then
    dev/explorer/build.sh "$dir/explorer.html" >"$dir/made" 2>&1
    check "the page can be made" "$([ -s "$dir/explorer.html" ] || cat "$dir/made")"
    echo "skip the bytes of the page: $made made it, and here is $here"
else
    dev/explorer/build.sh "$dir/explorer.html" >"$dir/made" 2>&1
    check "the page is what its sources make (else: make explorer)" \
        "$(cmp "$dir/explorer.html" $page 2>&1)"
    check "no warning of the compiler" "$(grep -i warning "$dir/made")"
fi

# One number for the memory of libraries in the trainers, the page and every cluster of GPUs.
reserve=$(sed -n 's/^static constexpr size_t GPU_RESERVE = \([0-9]*\);/\1/p' llmc/trainer/start.cuh)
for file in dev/clusters/*.json; do
    [ "$file" = dev/clusters/laptop.json ] && continue  # no GPU
    value=$(sed -n 's/.*"reserve": {"value": \([^,]*\),.*/\1/p' "$file")
    [ -n "$reserve" ] && awk -v a="$value" -v b="$reserve" 'BEGIN { exit a + 0 != b + 0 }'
    check "$file reserves the trainers' $reserve bytes" "$([ $? = 0 ] || echo "$value is not")"
done

chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
[ -n "$chromium" ] || skip 'the numbers of the page: no Chromium'

# ---- what the page says --------------------------------------------------------------------------

# An address of the page, and the kind of comparison:
#   schedule  ARGUMENTS of build/tools/schedule (LIST: the file of a list)
#   dry       --dry-run
#   traffic   one step of the golden model
#   refused   the refusal
golden='heads=4&channels=32&vocab=61&seq=24&micro=2&global=8&sp=0&recompute=none'
small='heads=4&channels=128&vocab=257&seq=64&micro=4&global=16&sp=0&recompute=none'
middle='heads=8&channels=512&vocab=50257&seq=512&micro=4&global=32&sp=0&recompute=none'
five='model=mixtral-8x7b&heads=8&channels=16&vocab=61&seq=24&micro=2&global=8&recompute=none'
experts='model=qwen3-30b-a3b&channels=256&vocab=257&seq=64&micro=1&global=8&recompute=none'
long='model=smollm2-135m&seq=512&micro=1&global=8'
# Parts that several cases share.
drawn='schedule --stages' four='schedule --stages 4 --micros 8'
unequal='--forward 1.11 --backward 1.28' tenths='--forward 1.1 --backward 1.3'
fp32='precision=fp32' bf16='precision=bf16'
mixtral='model=mixtral-8x7b&heads=8&channels=128&vocab=257&seq=64&micro=2&global=16&recompute=none'
qwen='model=qwen2.5-0.5b' xl='model=gpt2-xl&tensor=1' roce='cluster=roce-a100'
cases=(
    '#schedules|schedule --stages 4 --micros 8 1f1b'
    '#schedules?kind=gpipe|schedule --stages 4 --micros 8 gpipe'
    '#schedules?kind=interleaved&v=2|schedule --stages 4 --micros 8 --virtual 2 interleaved'
    '#schedules?kind=zb-h1|schedule --stages 4 --micros 8 zb-h1'
    '#schedules?kind=zb-auto|schedule --stages 4 --micros 8 zb-auto'
    '#schedules?kind=zb-auto&limit=4&p=4&m=12|schedule --stages 4 --micros 12 --limit 4 zb-auto'
    '#schedules?p=1&m=3|schedule --stages 1 --micros 3 1f1b'
    '#schedules?p=16&m=64|schedule --stages 16 --micros 64 1f1b'
    '#schedules?kind=gpipe&p=7&m=5|schedule --stages 7 --micros 5 gpipe'
    "#schedules?kind=interleaved&p=8&m=16&v=3|$drawn 8 --micros 16 --virtual 3 interleaved"
    "#schedules?kind=zb-h1&p=8&m=32&F=1.11&B=1.28|$drawn 8 --micros 32 $unequal zb-h1"
    "#schedules?kind=zb-auto&p=8&m=32&F=1.1&B=1.3|$drawn 8 --micros 32 $tenths zb-auto"
    '#schedules?transfer=0.25|schedule --stages 4 --micros 8 --transfer 0.25 1f1b'
    "#schedules?kind=zb-auto&transfer=0.5&F=2|$four --transfer 0.5 --forward 2 zb-auto"
    "#schedules?kind=interleaved&v=4&transfer=.1|$four --virtual 4 --transfer .1 interleaved"
    '#schedules?kind=zb-v|schedule --stages 4 --micros 8 zb-v'
    '#schedules?kind=v-half&p=5&m=12&B=1.2|schedule --stages 5 --micros 12 --backward 1.2 v-half'
    "#schedules?kind=dualpipe-v&transfer=0.5|$four --transfer 0.5 dualpipe-v"
    '#schedules?kind=dualpipe-v&m=4|schedule --stages 4 --micros 4 dualpipe-v'
    '#schedules?kind=zb-h1&p=5&m=3&W=0.25|schedule --stages 5 --micros 3 --weight 0.25 zb-h1'
    'LIST doc/schedules/1f1b.txt|schedule LIST'
    'LIST doc/schedules/zb-h1.txt|schedule LIST'
    'LIST doc/schedules/no-idle.txt|schedule LIST'
    '#schedules?kind=interleaved&v=2&m=7|schedule --stages 4 --micros 7 interleaved'
    '#schedules?kind=zb-h1&p=1|schedule --stages 1 --micros 8 zb-h1'
    '#schedules?v=2|schedule --stages 4 --micros 8 --virtual 2 1f1b'
    '#schedules?kind=list&list=F0+B0+X1|schedule F0 B0 X1'
    '#schedules?kind=list&list=F0+F1+B1+B0%3B+F0+F1+B0+B1|schedule F0 F1 B1 B0; F0 F1 B0 B1'
    "#layout?$small&layers=4&tensor=2&data=2&pipeline=2&virtual=2&$fp32|dry"
    "#layout?$middle&layers=6&tensor=1&data=1&pipeline=1&$fp32|dry"
    "#layout?$middle&layers=6&tensor=8&data=1&pipeline=1&sp=1&$fp32|dry"
    "#layout?$middle&layers=6&tensor=2&data=4&pipeline=1&recompute=layer&$fp32|dry"
    "#layout?$middle&layers=6&tensor=1&data=2&pipeline=3&zero=0&global=24&recompute=gelu&$fp32|dry"
    "#layout?$middle&layers=6&tensor=1&data=1&pipeline=4&schedule=zb-h1&$fp32|dry"
    "#layout?$middle&layers=6&tensor=2&data=1&pipeline=2&schedule=zb-auto&sp=1&$bf16|dry"
    "#layout?$middle&layers=6&tensor=2&data=2&pipeline=2&order=pdt&$bf16|dry"
    "#layout?$middle&layers=5&tensor=1&data=2&pipeline=2&virtual=2&zero=0&$bf16|dry"
    "#layout?model=smollm2-135m&tensor=3&data=1&pipeline=2&seq=512&global=8&micro=2&$bf16|dry"
    "#layout?$qwen&tensor=2&data=2&pipeline=1&seq=256&global=8&recompute=none&zero=0&$bf16|dry"
    "#layout?$mixtral&layers=4&tensor=2&data=4&pipeline=1&context=2&expert=4&sp=1&$bf16|dry"
    "#layout?$mixtral&layers=3&tensor=1&data=4&pipeline=2&context=4&expert=2&capacity=&$bf16|dry"
    "#layout?$experts&layers=4&tensor=1&data=4&pipeline=2&context=1&expert=2&order=dpt&$bf16|dry"
    "#layout?$long&tensor=3&data=4&pipeline=1&context=4&recompute=gelu&sp=1&$bf16|dry"
    "#layout?$mixtral&layers=4&tensor=1&data=4&pipeline=1&context=3&expert=4&$bf16|refused"
    "#layout?$mixtral&layers=4&tensor=1&data=2&pipeline=1&context=1&expert=4&$bf16|refused"
    "#layout?$mixtral&layers=4&tensor=1&data=4&pipeline=1&capacity=x&$bf16|refused"
    "#layout?$long&tensor=1&data=4&pipeline=1&context=1&expert=2&sp=0&$bf16|refused"
    "#layout?model=smollm2-135m&tensor=2&data=1&pipeline=1&$bf16|refused"
    "#layout?model=llama-3.2-1b&tensor=1&data=1&pipeline=2&schedule=zb-h1&global=8&$bf16|refused"
    "#layout?$golden&layers=4&tensor=1&data=1&pipeline=1&$fp32|traffic"
    "#layout?$golden&layers=4&tensor=2&data=1&pipeline=1&$fp32|traffic"
    "#layout?$golden&layers=4&tensor=2&data=1&pipeline=2&sp=1&$fp32|traffic"
    "#layout?$golden&layers=4&tensor=1&data=4&pipeline=1&$fp32|traffic"
    "#layout?$golden&layers=4&tensor=1&data=2&pipeline=2&zero=0&schedule=gpipe&$fp32|traffic"
    "#layout?$golden&layers=4&tensor=2&data=2&pipeline=2&virtual=2&micro=1&$bf16|traffic"
    "#layout?$golden&layers=4&tensor=2&data=1&pipeline=3&schedule=zb-h1&global=6&$fp32|traffic"
    "#layout?$golden&layers=4&tensor=4&data=1&pipeline=2&sp=1&recompute=layer&$bf16|traffic"
    "#layout?$golden&layers=4&tensor=2&data=2&pipeline=2&order=dpt&recompute=gelu&$fp32|traffic"
    "#layout?$five&layers=1&tensor=2&data=4&pipeline=1&context=2&expert=4&sp=1&$bf16|traffic"
    "#layout?$five&layers=2&tensor=1&data=4&pipeline=2&context=4&expert=2&sp=0&$bf16|traffic"
    "#layout?$small&layers=4&tensor=3&data=1&pipeline=1&$fp32|refused"
    "#layout?$small&layers=4&tensor=x&data=1&pipeline=1&$fp32|refused"
    "#layout?$small&layers=4&tensor=1&data=1&pipeline=3&virtual=2&$fp32|refused"
    "#layout?$small&layers=4&tensor=1&data=1&pipeline=2&virtual=2&global=12&$fp32|refused"
    "#layout?$small&layers=4&tensor=1&data=1&pipeline=1&order=tdd&$fp32|refused"
    "#layout?$small&layers=4&tensor=1&data=1&pipeline=1&heads=3&$fp32|refused"
    '#layout|time'
    '#layout?model=gpt3-175b|time'
    '#layout?model=llama-3.1-70b|time'
    '#layout?model=nemotron-4-340b&cluster=eos-2025&pipeline=8&virtual=2|time'
    '#layout?model=ptdp-145b&recompute=layer|time'
    '#layout?model=ptdp-1t&cluster=selene-2021|time'
    "#layout?$xl&data=4&pipeline=2&schedule=zb-auto&cluster=foundry-h100&micro=1|time"
    "#layout?$xl&data=6&pipeline=3&schedule=zb-h1&cluster=eos-2025&micro=1&global=48|time"
    '#layout?model=ptdp-39b&order=ptd&cluster=dgx-h100&sp=1&zero=1|time'
    "#layout?model=ptdp-18b&tensor=2&pipeline=4&schedule=gpipe&zero=1&$roce&micro=1|time"
    '#layout?model=gpt3-175b&data=8&pipeline=16|search'
    '#layout?model=gpt2-xl&tensor=1&data=2&pipeline=4&cluster=foundry-a100-40&global=64|search'
    '#layout?model=llama-3.1-8b&cluster=dgx-h100|search'
    '#schedules?one=1|hangs 2->3'
    '#schedules?one=1&kind=gpipe|schedule --stages 4 --micros 8 gpipe'
    '#schedules?kind=list&list=F0+B0+F1+B1%3B+F0+F1+B0+B1|hangs 0->1'
    '#collectives|ring 6 100663296 100663296 15,15,15,15;15,15,15,15;15,15,15,15;15,15,15,15'
    '#collectives?op=reduce-scatter&n=3&size=3|ring 2 2097152 2097152 7,5,1;2,7,3;6,4,7'
    '#collectives?op=all-gather&n=2&size=2|ring 1 1048576 1048576 1,2;1,2'
    '#collectives?op=broadcast&n=3&size=3|ring 4 3145728 3145728 1,1,1;1,1,1;1,1,1'
    '#collectives?op=all-to-all&n=4&size=4|ring 3 3145728 3145728 1,2,4,8;1,2,4,8;1,2,4,8;1,2,4,8'
    '#collectives?op=all-to-all&n=3&size=3|ring 3 2097152 2097152 1,2,4;1,2,4;1,2,4'
    '#collectives?op=tree+all-reduce&n=3&size=3|ring 4 6291456 4194304 7,7,7;7,7,7;7,7,7'
    '#collectives?op=zigzag+attention&n=3&size=1|ring 2 2097152 6 2,2,2;2,2,2;2,2,2'
    '#collectives?op=contiguous+attention&n=3&size=1|ring 2 2097152 10 2,2,2;0,4,4;0,0,4'
)
# A list as an address: line ends are %0A, spaces +, comments stay.
list_address() {
    sed 's/ /+/g; s/#/%23/g; s/;/%3B/g; s/$/%0A/' "$1" | tr -d '\n' |
        sed 's/^/#schedules?kind=list\&list=/'
}
addresses=() wants=() lists=()
for case in "${cases[@]}"; do
    address=${case%%|*} list=
    [[ $address == LIST* ]] && list=${address#LIST } address=$(list_address "$list")
    addresses+=("$address") wants+=("${case#*|}") lists+=("$list")
done
slow=('#schedules?p=64&m=512' '#schedules?kind=gpipe&p=64&m=512'
      '#schedules?kind=interleaved&v=2&p=64&m=512'
      '#schedules?kind=zb-h1&p=64&m=512&transfer=0.2' '#schedules?kind=zb-auto&p=64&m=512'
      '#schedules?kind=interleaved&v=8&p=64&m=512&transfer=0.2' '#schedules?kind=v-half&p=64&m=512'
      '#schedules?kind=interleaved&v=8&p=64&m=512&transfer=0.7&layers=777'
      '#schedules?kind=zb-auto&p=64&m=512&B=2&transfer=0.3'
      '#schedules?kind=zb-auto&p=64&m=512&transfer=3&B=1.28&W=0.9'
      '#schedules?kind=zb-auto&p=64&m=512&transfer=3&F=1.11&B=1.28&W=1.17&layers=100&limit=200'
      '#schedules?kind=zb-auto&p=64&m=512&transfer=7.3&B=1.9'
      '#schedules?kind=zb-auto&p=64&m=512&transfer=7.3&B=0.71&W=0.9&layers=100&limit=64'
      '#layout?model=ptdp-1t'
      '#layout?model=ptdp-1t&schedule=zb-auto')

array() { printf '"%s", ' "$@"; }
{
    cat $page
    echo '<script>'
    echo "const ADDRESSES = [$(array "${addresses[@]}")], WANTS = [$(array "${wants[@]}")];"
    echo "const SLOW = [$(array "${slow[@]}")];"
    cat dev/test/explorer_driver.js
    echo '</script>'
} >"$dir/driven.html"
timeout 200 "$chromium" --headless --no-sandbox --disable-gpu --user-data-dir="$dir/profile" \
    --window-size=1280,1000 \
    --dump-dom "file://$dir/driven.html" 2>"$dir/browser" | sed -n '/<pre id="result">/,/^end$/p' |
    sed 's/&lt;/</g; s/&gt;/>/g; s/&amp;/\&/g' >"$dir/said"
if [ "$(tail -n 1 "$dir/said")" != end ]; then
    check 'the page runs in Chromium' "it did not come to its end
$(tail -n 5 "$dir/browser"; tail -n 3 "$dir/said")"
    finish
fi

said() { sed -n "s/^$1 $2 //p" "$dir/said"; } # said NUMBER WHAT
# compare PAGE PROGRAM: prints the lines that differ, each with its origin.
compare() { diff <(echo "$1") <(echo "$2") | sed 's/^</page    /; s/^>/program /; /^[0-9]/d'; }

compare_schedule() { # compare_schedule NUMBER ARGUMENTS
    local out arguments
    case $2 in
        LIST) arguments=("${lists[$1]}") ;;
        F*) arguments=("$2") ;;
        *) read -ra arguments <<<"$2" ;;
    esac
    if ! out=$(build/tools/schedule "${arguments[@]}" 2>&1); then
        compare "$(said "$1" refused)" "${out#refused: }"
        return
    fi
    local bubble
    bubble=$(said "$1" bubble | awk '{ printf "%.2f %s %s\n", 100 * $1, $2, $3 }')
    compare "$(said "$1" stage; echo "$bubble")" \
        "$(awk '/^ *[0-9]/ { print $1, $3, $4 }
                /^bubble/ { sub("%", "", $2); gsub(/[(;)]/, ""); print $2, $6, $8 }' <<<"$out")"
}

# trainer NUMBER MORE [THROUGH...]: runs the command line that the page gives.
trainer() {
    local address=${addresses[$1]} precision=fp32 name=train_gpt_3d more=$2 flags ranks=1 size
    [[ $address == *precision=bf16* ]] && precision=bf16
    [[ $address == *schedule=zb-* ]] && name=train_zero_bubble
    flags=$(said "$1" flags)
    [[ $flags == *--model* ]] && name=train_llama
    [[ $flags =~ (mixtral|a3b|--context|--expert-parallel) ]] && name=train_5d
    for size in $(sed -nE 's/.*&tensor=([0-9]+)&data=([0-9]+)&pipeline=([0-9]+).*/\1 \2 \3/p' \
        <<<"$address"); do
        ranks=$((ranks * size))
    done
    shift 2
    # shellcheck disable=SC2086
    OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=SSE41 $launch -n $ranks "$@" \
        "${build/fp32/$precision}/$name" $flags $more 2>&1 </dev/null
}

compare_dry() {
    compare "$(said "$1" rank | awk '{
            printf "%d", $1
            for (i = 2; i <= 5; i++) printf " %.1f", $i / 2^20
            print "" }')" \
        "$(trainer "$1" --dry-run |
            awk '/^MiB per rank/ { on = 1; next } on { print $1, $2, $3, $4, $5 }')"
}

# Each rank writes its errors to a file of its own. The launcher may lose or mix lines that several
# ranks write at once or just before they end.
compare_traffic() {
    local data=dev/test/golden/train.bin
    rm -f "$dir"/rank.*
    # shellcheck disable=SC2016
    if ! NCCL_TRAFFIC=1 trainer "$1" "--train-data $data --steps 1" sh -c 'exec "$@" 2>"$0.$$"' \
        "$dir/rank" \
        >"$dir/printed"; then
        echo 'the trainer failed:'
        tail -n 5 "$dir/printed" "$dir"/rank.*
        return
    fi
    # Two groups have a name of two words.
    local one_word='s/context sums/context-sums/; s/expert data/expert-data/'
    compare "$(said "$1" traffic | sed "$one_word" | sort)" \
        "$(cat "$dir"/rank.* | grep -a '^traffic:' | sed "$one_word" | awk '
            BEGIN { name["ncclAllReduce"] = "all-reduce"
                    name["ncclReduceScatter"] = "reduce-scatter"
                    name["ncclAllGather"] = "all-gather"; name["ncclBroadcast"] = "broadcast"
                    name["ncclSend"] = "send"; name["ncclRecv"] = "receive" }
            { op = $7; sub(":", "", op); key = $2 " " name[op]
              calls[key] += $8; sent[key] += $10; got[key] += $13 }
            END { for (key in calls)
                      printf "%s %d %.0f %.0f\n", key, calls[key], sent[key], got[key] }' | sort)"
}

# The page's time, memory, MFU and parts must equal the planner's for that layout alone.
compare_time() {
    local flags
    read -ra flags <<<"$(said "$1" plan)"
    build/tools/plan --light --json "${flags[@]}" --shard 0 >"$dir/plan" 2>&1
    awk -v page="$(said "$1" time)" '
        BEGIN {
            parts = "tensor pipeline data idle_seconds"
            count = split("step_seconds memory_bytes mfu " parts, names)
            split(page, x)
        }
        { gsub(/[":,\t]/, " "); seen[$1] = $2; last = $0 }
        $1 ~ /^}/ {
            rows++
            same = page != ""
            for (i = 1; i <= count; i++) {
                far = x[i] - seen[names[i]]
                if (far * far > 1e-20 * x[i] * x[i] + 1e-20) same = 0
            }
            agree += same
        }
        END {
            if (agree) exit
            print "page " page ": none of " rows + 0 " rows of the planner agrees: " last
        }' "$dir/plan"
    said "$1" memory | grep -v agrees
}

# The ten rows of a search, and the sentences on changes of the first one.
compare_search() {
    local flags
    read -ra flags <<<"$(said "$1" wish)"
    build/tools/plan --light --no-v --json "${flags[@]}" >"$dir/plan" 2>&1
    compare "$(said "$1" row | awk '{ printf "%.9g %s", $1, $2; $1 = $2 = ""; print }')" \
        "$(awk -F '\t' '
            { key = $4; gsub(/[":,]/, "", key) }
            { value = $5; gsub(/[",]/, "", value); seen[key] = value }
            $3 ~ /^}/ {
                printf "%.9g %s  ", seen["step_seconds"], seen["memory_bytes"]
                print seen["flags"] }' "$dir/plan")"
    build/tools/plan --light --no-v "${flags[@]}" |
        sed -n '/^why not/,/^train:/s/^  \([^ ].\{25\}\)\(.*\)/\1|\2/p' |
        sed -E 's/ *\|/|/; s/(\|[+-][0-9.]+%), [0-9.]+ GiB/\1/' >"$dir/why"  # a column of its own
    said "$1" whynot >"$dir/page"
    said "$1" best | grep -vx loaded
    [ "$(cut -d '|' -f 1 "$dir/page" | grep -cxFf <(cut -d '|' -f 1 "$dir/why"))" -ge 5 ] ||
        echo 'too few changes'
    while IFS='|' read -r name text; do
        grep -qF "$name|" "$dir/why" && ! grep -qxF "$name|$text" "$dir/why" &&
            echo "page $name|$text: planner $(grep -F "$name|" "$dir/why")"
    done <"$dir/page"
}

for i in "${!cases[@]}"; do
    want=${wants[$i]} title=${addresses[$i]}
    [ -n "${lists[$i]}" ] && title=${lists[$i]}
    case $want in
        schedule*) wrong=$(compare_schedule "$i" "${want#schedule }") ;;
        dry) wrong=$(compare_dry "$i") ;;
        traffic) wrong=$(compare_traffic "$i") ;;
        time) wrong=$(compare_time "$i") ;;
        search) wrong=$(compare_time "$i")$(compare_search "$i") ;;
        refused)
            error=$(trainer "$i" --dry-run | sed -n 's/^error: //p')
            wrong=$(compare "$(said "$i" refused)" "$error")
            ;;
        hangs*) wrong=$([[ "$(said "$i" hangs)" == "${want#hangs }"* ]] || said "$i" hangs) ;;
        ring*) wrong=$(compare "$(said "$i" ring)" "${want#ring }") ;;
    esac
    [ -z "$(said "$i" address | grep -v ^same)$(said "$i" sums | grep -vx agree)" ] ||
        wrong+=" its address or its sums: $(said "$i" address), $(said "$i" sums)"
    grep -q "^$i " "$dir/said" || wrong='the page says nothing'
    check "${want%% *}: $title" "$wrong"
done

check 'bad input: the sentence, and nothing else changes' \
    "$([ "$(grep -c '^bad kept' "$dir/said")" = 6 ] || grep '^bad' "$dir/said")"
check 'keys move time, rank, round and a number' \
    "$([ "$(grep -cE '^keys (time|rank|round|number)' "$dir/said")" = 4 ] ||
        grep '^keys' "$dir/said")"
while read -r _ name verdict more; do
    check "user: $name" "$([ "$verdict" = right ] || echo "$more")"
done < <(grep '^found ' "$dir/said")
check 'user: every finding was tried' \
    "$([ "$(grep -c '^found ' "$dir/said")" = 111 ] || echo 'some are missing')"
# A quiet machine draws each of them within 0.2 s. One that is shared may need longer all 20 times:
# three times as long is a fault of the page.
check 'p = 64, m = 512 is drawn within 0.6 s, at the latest at the 20th time' \
    "$([ "$(awk '/^time/ && $2 <= 600' "$dir/said" | wc -l)" = ${#slow[@]} ] ||
        grep '^time' "$dir/said")"

finish
