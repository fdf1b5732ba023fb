#!/usr/bin/env bash
# holmes.sh [SED]: the published figures of Holmes (rows_holmes.csv) beside the light simulation's, as a table in Markdown.
# Each network has the cluster of dev/clusters/holmes-a100.json with other nodes. No constant was fitted on these rows.
# SED changes the cluster, as in `dev/scale/holmes.sh 's/2.8e9/1.4e9/'`. `make holmes` builds what it needs.
set -eu
cd "$(dirname "$0")/../.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
args=()
# nodes NETWORK INFINIBAND ROCE: a cluster with so many nodes of each kind; the rows say how many GPUs.
nodes() {
    sed "/\"infiniband_nodes\"/s/\"value\": 4/\"value\": $2/; /\"roce_nodes\"/s/\"value\": 4/\"value\": $3/; ${4:-}" \
        dev/clusters/holmes-a100.json | awk '/_nodes"/ && /"value": 0,/ { next } { print }' |
        sed -z 's/,\n  }/\n  }/g' >"$dir/$1.json"
    args+=("$dir/$1.json:holmes-$1-")
}
nodes ib 8 0 "${1:-}"
nodes roce 0 8 "${1:-}"
nodes eth 0 0 "${1:-}"
nodes hybrid 4 4 "${1:-}"
build/tools/scale --csv "$dir/out.csv" dev/scale/rows_holmes.csv "${args[@]}" >/dev/null
awk -F, -v rows=dev/scale/rows_holmes.csv '
    BEGIN {
        split("ib InfiniBand roce RoCE eth Ethernet hybrid InfiniBand+RoCE", words, " ")
        for (i = 1; i < 8; i += 2) name[words[i]] = words[i + 1]
        while ((getline line <rows) > 0) {
            gsub(/"[0-9,]*",/, "-,", line)
            split(line, f, ",")
            published[f[1]] = f[19]
        }
        print "| model | GPUs | network | published TFLOP/s | ours | off |"
        print "|---|---|---|---|---|---|"
    }
    FNR > 1 {
        gsub(/"/, "", $1)
        split($1, word, "-")
        ours = published[$1] * $5 / $4
        who = word[5] == "mlm" ? ", Megatron-LM" : word[2] == "hybrid" ? ", Holmes" : ""
        printf "| %s%s | %s | %s | %d | %.0f | %+.0f%% |\n", toupper(word[3]), who, word[4], name[word[2]], published[$1], ours,
            100 * (ours / published[$1] - 1)
    }' "$dir/out.csv"
