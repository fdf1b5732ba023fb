#!/usr/bin/env bash
# holmes.sh: the published rates of Holmes (rows_holmes.csv) beside those of the light simulation,
# as a table in Markdown. Each network is dev/clusters/holmes-a100.json with other numbers of
# nodes. No constant was fitted on these rows. The sources do not state the speed of Ethernet and
# the batch, so both are varied.
set -eu
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/../.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

# predict NAME CLUSTER ROWS: the predictions, after one sed for the cluster and one for the rows.
predict() {
    local args=() network infiniband roce
    while read -r network infiniband roce; do
        sed "$2; /\"infiniband_nodes\"/s/: 4,/: $infiniband,/; /\"roce_nodes\"/s/: 4,/: $roce,/" \
            dev/clusters/holmes-a100.json |
            sed '/_nodes": {"value": 0,/d' | sed -z 's/,\n  }/\n  }/g' >"$dir/$1-$network.json"
        args+=("$dir/$1-$network.json:holmes-$network-")
    done <<<$'ib 8 0\nroce 0 8\neth 0 0\nhybrid 4 4'
    sed "$3" dev/scale/rows_holmes.csv >"$dir/rows.csv"
    build/tools/scale --csv "$dir/$1" "$dir/rows.csv" "${args[@]}" >/dev/null
}
predict ours '' ''
predict ethernet 's/2.8e9/5.6e9/' ''
predict batch '' 's/,768,/,1536,/'
sed 's/"[0-9,]*",/-,/' dev/scale/rows_holmes.csv >"$dir/rows"
echo '| model | GPUs | network | published TFLOP/s | ours | off | Ethernet of 50 Gbit/s' \
    '| batch of 1536 |'
echo '|---|---|---|---|---|---|---|---|'
awk -F, 'FNR == 1 { file++; next }
    { gsub(/"/, "", $1) }
    file == 1 { rate[$1] = $19; id[++n] = $1; next }
    { is[file, $1] = rate[$1] * $5 / $4 * (file == 4 ? 2 : 1) }
    END {
        split("ib InfiniBand roce RoCE eth Ethernet hybrid InfiniBand,_RoCE", word, " ")
        for (i = 1; i < 8; i += 2) name[word[i]] = word[i + 1]
        for (i = 1; i <= n; i++) {
            split(id[i], part, "-")
            network = name[part[2]]
            if (part[5] == "mlm") network = network " (Megatron-LM)"
            else if (part[2] == "hybrid") network = network " (Holmes)"
            sub(/_/, " ", network)
            rates = rate[id[i]]
            printf "| %s | %s | %s | %d ", toupper(part[3]), part[4], network, rates
            printf "| %.0f | %+.0f%% ", is[2, id[i]], 100 * (is[2, id[i]] / rates - 1)
            printf "| %.0f | %.0f |\n", is[3, id[i]], is[4, id[i]]
        }
    }' "$dir/rows" "$dir/ours" "$dir/ethernet" "$dir/batch"
