#!/usr/bin/env bash
# run_reproduce.sh [BUILD]: `make reproduce` in small. The text is of a Debian package, the
# validation curve must fall, and 1 and 8 ranks must have the same losses. So must PyTorch if it
# is installed. Ends with `N passed, N failed`.
# needs: fp32/train_gpt fp32/train_gpt_3d tools/byte_corpus tools/loss
. "$(dirname "$0")/report.sh"
cpu_only 'its layouts are for a CPU'
[ -d /usr/share/common-licenses ] || [ -d /usr/share/perl ] ||
    skip 'not a Debian: its text is not there'
shown="$dir/printed $dir/output"
# As make starts it: without the MPIRUN of the tests.
env -u MPIRUN OUT="$dir" dev/reproduce.sh small "$build" >"$dir/printed" 2>&1
report $? 'make reproduce, in small'
grep -q '^text .* files: .*(package ' "$dir/printed"
report $? "it names the text and its licence: $(grep -m1 '^text' "$dir/printed")"
awk '
    /validation loss of 1 rank/ { on = 1; next }
    on && NF == 3 && $1 ~ /^[0-9]+$/ { if (!n++) first = $2; last = $2 }
    END { exit !(n >= 3 && last < first - 0.5) }' "$dir/printed"
report $? 'its validation curve falls'
[ "$(grep -c '^  *step  *[0-9]*/[0-9]* .* left$' "$dir/printed")" -ge 20 ]
report $? \
    "it shows how far each part is, and the time left: $(grep -c ' left$' "$dir/printed") lines"
last=$(tail -n 1 "$dir/printed")
small='[0-9.]+e-[0-9]+'
differ="^The losses of 1 and 8 ranks differ by at most $small in 20 steps, "
differ+="their validation losses by at most $small in 30; "
[[ $last =~ $differ ]]
report $? "its last sentence: $last"
if "${PYTHON:-python3}" -c 'import torch, transformers' 2>/dev/null; then
    [[ $last =~ '; those of PyTorch in 20 steps by at most '[0-9.]+e-[0-9]+'.'$ ]]
    report $? 'which has the difference from PyTorch'
else
    [[ $last =~ 'PyTorch was not compared: torch and transformers are not installed.'$ ]]
    report $? 'which says that PyTorch is not there'
fi
REPRODUCE_SECONDS=soon OUT="$dir/none" dev/reproduce.sh >"$dir/printed" 2>&1
[ $? = 2 ] && grep -q "^error: REPRODUCE_SECONDS must be .*'soon'$" "$dir/printed" &&
    [ ! -e "$dir/none" ]
report $? "refused before any work: $(cat "$dir/printed")"
finish
