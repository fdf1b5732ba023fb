#!/usr/bin/env bash
# run_fine_tuning.sh [BUILD]: the commands of doc/lab/fine_tuning.md, as they stand there, on small
# models made here. Then transformers must find the validation losses of the saved folders and the
# logits that the trainer computes. Needs the Python packages that the page names; PYTHON names
# another interpreter. Ends with `N passed, N failed`.
# needs: fp32/train_llama fp32/train_gpt_3d fp32/dev/test/test_tokenizer
. "$(dirname "$0")/report.sh"
build=$(realpath -m "$build") repository=$PWD
python=${PYTHON:-python3}
"$python" -c 'import importlib.util as u, sys
needed = "tokenizers", "torch", "transformers"
sys.exit(any(u.find_spec(name) is None for name in needed))' 2>/dev/null ||
    skip 'the Python packages tokenizers, torch and transformers are not installed'
export OMP_NUM_THREADS=1

# In a folder of its own, which looks like the repository to the commands.
mkdir "$dir/build" && ln -s "$repository/dev" "$dir/dev" && ln -s "$build" "$dir/build/cpu-fp32" ||
    exit 1
# The licence and the pages, an empty line behind each paragraph: some 300 documents.
cat LICENSE doc/course/*.md doc/lab/checkpoints.md >"$dir/notes.txt"

# step NUMBER: runs a command of the page; the first one, make, has been run by make test.
step() {
    local command
    command=$(sed -n '/<!-- commands/,/<!-- end -->/p' "$repository/doc/lab/fine_tuning.md" |
        grep -v '^[<`]' | sed -n "$1s/train_llama/$trainer/; $1p")
    command=${command/#mpirun/$launch}
    command=${command/#python3/$python}
    (cd "$dir" && bash -c "$command") >"$dir/out" 2>&1
}

for kind in llama qwen2 qwen3 mistral nemotron gpt2; do
    class=LlamaForCausalLM trainer=train_llama tokenizer=$kind
    case $kind in
        llama) tokenizer=llama3 ;;
        qwen2) class=Qwen2ForCausalLM ;;
        qwen3) class=Qwen3ForCausalLM tokenizer=qwen2 ;;
        mistral) class=MistralForCausalLM tokenizer=llama3 ;;
        nemotron) class=NemotronForCausalLM tokenizer=llama3 ;;
        gpt2) class=GPT2LMHeadModel trainer=train_gpt_3d ;;
    esac
    rm -rf "$dir/build/model" "$dir/build/notes" "$dir/build/tuned"
    "$python" dev/data/check_transformers.py "$dir/build/model" --random 2,4,32,285,128 \
        --type $kind >"$dir/out" 2>&1 &&
        "$build/dev/test/test_tokenizer" --fixture "$dir/build/model/tokenizer.json" $tokenizer
    report $? "$kind: transformers makes a small model"
    step 2 && grep -q 'text_val_000000.bin: [0-9]* tokens' "$dir/out"
    report $? "$kind: prepare.py makes shards of a text with the folder's tokenizer"
    step 3 && grep -q '2 layers, 4 heads, 32 channels, vocabulary 285' "$dir/out"
    report $? "$kind: --dry-run reads the folder"
    step 4
    report $? "$kind: two ranks train"
    losses=$(sed -n 's/.*| validation loss //p' "$dir/out" | xargs)
    awk '{ exit !(NF == 2 && $2 < $1) }' <<<"$losses"
    report $? "$kind: and the validation loss falls: $losses"
    grep -q '^sample: hello' "$dir/out"
    report $? "$kind: a sample begins with the prompt"
    "$python" dev/data/check_transformers.py "$dir/build/tuned/step-00000020" \
        --from "$dir/build/model" >"$dir/out" 2>&1
    report $? "$kind: what training does not change comes out again: $(tail -n 1 "$dir/out")"
    step 5 && grep -q $class "$dir/out"
    report $? "$kind: from_pretrained loads the folder"
    "$python" dev/data/check_transformers.py "$dir/build/tuned/step-00000020" \
        "$dir/build/notes/text_val_000000.bin" --seq 64 --batch 8 --loss "${losses#* }" \
        --tolerance 1e-5 >"$dir/out" 2>&1
    report $? "$kind: and finds the validation loss: $(tail -n 1 "$dir/out")"
    "$python" dev/data/check_transformers.py "$dir/build/tuned/step-00000020" \
        --logits "$build/$trainer" >"$dir/out" 2>&1
    report $? "$kind: and the trainer's logits: $(tail -n 1 "$dir/out")"
done
finish
