#!/usr/bin/env bash
# run_not_finite.sh [BUILD]: weights that are not finite, in any tensor. Training and --eval must
# name the tensor. Ends with `N passed, N failed`.
# needs: fp32/train_gpt fp32/train_gpt_3d fp32/train_llama fp32/train_moe tools/byte_corpus
. "$(dirname "$0")/report.sh"
need_gpus 2
export OMP_NUM_THREADS=1 ONEDNN_MAX_CPU_ISA=SSE41

build/tools/byte_corpus "$dir/train.bin" "$dir/val.bin" README.md >/dev/null || exit 1
data="--train-data $dir/train.bin --seq 32 --micro-batch 2 --global-batch 4"

# spoil FOLDER TENSOR BYTES: copies a checkpoint to $dir/bad, and overwrites one float in the middle
# of a tensor.
spoil() {
    local file=$dir/bad/model.safetensors header begin end
    rm -rf "$dir/bad"
    cp -r "$1" "$dir/bad"
    header=$(od -An -tu8 -N8 "$file" | tr -d ' ')
    offsets='.*"data_offsets":\[\([0-9]*\),\([0-9]*\)\].*'
    read -r begin end < <(head -c $((8 + header)) "$file" | tail -c +9 | tr '{' '\n' |
        grep -A1 -F "\"$2\":" | sed -n "s/$offsets/\1 \2/p" | tail -n 1)
    # shellcheck disable=SC2059
    printf "$3" | dd of="$file" bs=1 seek=$((8 + header + begin + (end - begin) / 8 * 4)) \
        conv=notrunc 2>/dev/null
}
nan='\x00\x00\xc0\x7f' minus_infinity='\x00\x00\x80\xff'

for name in train_gpt train_llama train_moe; do
    # shellcheck disable=SC2086
    "$build/$name" $data --layers 2 --heads 2 --channels 32 --steps 1 --out "$dir/$name" \
        >"$dir/out" 2>"$dir/err"
    report $? "$name makes a checkpoint"
done

while read -r name tensor; do
    ok=0
    for bytes in "$nan" "$minus_infinity"; do
        spoil "$dir/$name/step-00000001" "$tensor" "$bytes"
        # shellcheck disable=SC2086
        "$build/$name" $data --init "$dir/bad" --steps 2 --out "$dir/none" >"$dir/out" 2>"$dir/err"
        [ $? = 1 ] && [ "$(cat "$dir/err")" = \
            "error: the weights of $dir/bad are not finite: $tensor" ] &&
            [ -z "$(ls -d "$dir/none"/step-* 2>/dev/null)" ] && ok=$((ok + 1))
    done
    [ $ok = 2 ]
    report $? "$name: NaN and infinity in $tensor"
done <<'END'
train_gpt wte.weight
train_gpt wpe.weight
train_gpt h.0.attn.c_attn.bias
train_gpt h.1.ln_2.weight
train_gpt ln_f.bias
train_llama model.layers.0.mlp.up_proj.weight
train_llama model.layers.1.self_attn.k_proj.weight
train_llama model.norm.weight
train_moe h.1.moe.router.weight
END

spoil "$dir/train_gpt/step-00000001" h.1.mlp.c_proj.weight "$nan"
for flags in '--tensor 2' '--pipeline 2' '--data 2' '--data 2 --zero 0'; do
    # shellcheck disable=SC2086
    $launch -n 2 "$build/train_gpt_3d" $data $flags --init "$dir/bad" --steps 2 >"$dir/out" \
        2>"$dir/err"
    code=$?
    [ $code = 1 ] && grep -qx \
        "error: the weights of $dir/bad are not finite: h.1.mlp.c_proj.weight" "$dir/err"
    report $? "train_gpt_3d $flags: code $code and the name"
done

# Rows of an evaluation: the header of eval_file.h would be long to write here.
if command -v python3 >/dev/null; then
    PYTHONDONTWRITEBYTECODE=1 python3 dev/data/prepare.py windows --text Makefile --seq 32 \
        --stride 32 --out "$dir" >"$dir/out" 2>&1
    "$build/train_gpt" --seq 32 --init "$dir/bad" --eval "$dir/windows.bin" >>"$dir/out" \
        2>"$dir/err"
    [ $? = 1 ] && grep -qx "error: the weights of $dir/bad are not finite: h.1.mlp.c_proj.weight" \
        "$dir/err"
    report $? '--eval names the tensor as well'
fi

# A learning rate that is far too large makes every gradient infinite, and no tensor is to blame.
# shellcheck disable=SC2086
"$build/train_gpt" $data --layers 2 --heads 2 --channels 32 --steps 9 --lr 1000 --lr-final 1 \
    --clip 0 --weight-decay 1000 >"$dir/out" 2>"$dir/err"
[ $? = 1 ] && grep -q \
    '^error: step [2-9]: .*the weights are not finite any more: \|no gradient is finite' \
    "$dir/err" &&
    ! grep -q 'the first tensor' "$dir/err"
report $? "a learning rate that is far too large: $(cat "$dir/err")"
finish
